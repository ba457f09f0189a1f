"""Models that a command takes by their names: opened here, stored where workers find them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.folders import Folder, absolute, folder_at
from components.models.places.registry import FOLDER, ModelFacts, find_place, folder_of

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
        yield GivenModel(folder, spec, folder.name, is_new=False)
        return
    from components.models.places.load import load_any

    model = load_any(text, given, suggested)
    with tempfile.TemporaryDirectory(prefix="casemate-") as temporary:
        save_model(Path(temporary), model, recipe_digest="")
        label = Path(name).name if place.kind == "file" else text
        yield GivenModel(Path(temporary), model.spec, label, is_new=True)
