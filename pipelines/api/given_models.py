"""Models that a command takes by their names: opened here, stored where workers find them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from components.core.folders import Folder, absolute, folder_at
from components.models.places.registry import FOLDER, ModelFacts, ModelPlace, find_place, folder_of

if TYPE_CHECKING:
    from components.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A model folder; that of a model from another place exists in the block of `given_model`."""

    folder: Folder
    spec: "ModelSpec"
    label: str
    """A short name for people."""
    is_new: bool
    """Whether the folder is temporary."""

    def stored(self, *, storage: str | Path, recipe: str) -> str:
        """The path or URI under which workers find it: as it is, or as a step of the storage."""
        if not self.is_new:
            return absolute(self.folder)
        from pipelines.flow.given import store_model

        return str(store_model(Path(str(self.folder)), storage=storage, recipe=recipe))


@contextmanager
def given_model(text: str, given: ModelFacts, suggested: ModelFacts) -> Iterator[GivenModel]:
    """The model that a text names (`components.models.places`), as a folder."""
    from components.models.checkpoint import read_header, save_model
    from components.models.spec import ModelSpec

    place, name = find_place(text)
    if place is FOLDER:
        place.check(given)
        folder = folder_at(absolute(folder_of(name)))
        spec = ModelSpec.from_dict(read_header(folder)["spec"], source=str(folder / "model.json"))
        yield GivenModel(folder, spec, _label_of_folder(folder), is_new=False)
        return
    from components.models.places.load import load_any

    model = load_any(text, given, suggested)
    with tempfile.TemporaryDirectory(prefix="casemate-") as temporary:
        save_model(Path(temporary), model, recipe_digest="")
        label = _label(place, name, text, given.weights)
        yield GivenModel(Path(temporary), model.spec, label, is_new=True)


def _label_of_folder(folder: Folder) -> str:
    """Its name; that of the training it belongs to, as all of these have one folder `model`."""
    *_, above, own = PurePosixPath("/", str(folder)).parts
    return above if own == "model" else own


def _label(place: ModelPlace, name: str, text: str, weights: str | None) -> str:
    """The text; of a file only its name, and that of the weights, which tell networks apart."""
    if place.kind not in ("file", "python"):
        return text
    return f"{Path(name).name} {Path(weights).stem}" if weights else Path(name).name
