"""Registry of model places: how a model may be named, and the function that loads it.

    models/deit-s, s3://bucket/runs/RECIPE/model.main-0123456789ab    a model folder
    timm:NAME, hf:ORG/NAME[@REVISION], robustbench:NAME[@DATASET/THREAT]
    python:FILE.py:FACTORY                                            code of the user's
    NET.pt2, NET.pt                                                   torch.export, TorchScript

A loader returns the network with its weights and the spec from which workers build it again. To add
a place, write its loader and an entry below. Nothing numerical is imported here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.errors import CasemateError
from components.core.folders import Folder, folder_at, within
from components.core.hints import did_you_mean
from components.core.object_stores import is_uri
from components.core.registry import load_reference

if TYPE_CHECKING:
    from torch import nn

    from components.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a user says about a model, or the data suggest; None: not said."""

    num_classes: int | None = None
    image_size: int | None = None
    channels: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    weights: str | None = None
    """A file with the state dict of a network that code of the user's builds."""

    def said(self) -> dict[str, object]:
        """The facts that are not None."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def or_else(self, other: "ModelFacts") -> "ModelFacts":
        """These facts, and those of `other` that are not said here."""
        return replace(other, **self.said())  # type: ignore[arg-type]

    def check_pair(self) -> None:
        """Raise an error if only one of mean and std is given: the other one would be a guess."""
        for key, value, other in (("mean", self.mean, "std"), ("std", self.std, "mean")):
            if value is not None and getattr(self, other) is None:
                remedy = f"is given without {other}: images are (pixels - mean) / std; give both"
                raise CasemateError(key, value, remedy)

    def without(self, *names: str) -> "ModelFacts":
        """These facts without some of them."""
        return replace(self, **dict.fromkeys(names))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A network with its weights, and the spec of the model around it."""

    net: "nn.Module"
    spec: "ModelSpec"


Loader = Callable[[str, ModelFacts, ModelFacts], Loaded]


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """One kind of place; `loader(name, given, suggested)` is `module:function`."""

    kind: str
    form: str  # for people
    loader: str
    takes: tuple[str, ...] = ()
    """The facts that a user may give: the place does not always say them."""
    says: str = ""
    """What defines the other facts."""

    def check(self, given: ModelFacts) -> None:
        """Raise an error for facts that the place says itself, and for half a normalisation."""
        for key, value in given.said().items():
            if key not in self.takes:
                remedy = f"does not apply to {self.form}: {self.says} defines it"
                if key == "weights":
                    remedy = f"does not apply to {self.form}, which has weights"
                raise CasemateError(key, value, remedy)
        given.check_pair()

    def load(self, name: str, given: ModelFacts, suggested: ModelFacts) -> Loaded:
        """The network at `name`; the facts are given by a user, or suggested by the data."""
        self.check(given)
        loader: Loader = load_reference(self.loader)
        return loader(name, given, suggested)


_PIXELS = ("image_size", "channels", "mean", "std")
_HERE = "components.models.places"
FOLDER = ModelPlace("folder", "a model folder", "", says="model.json")
PREFIXED = {
    place.kind: place
    for place in (
        ModelPlace("timm", "timm:NAME", f"{_HERE}.hubs:from_timm", says="timm"),
        ModelPlace(
            "hf", "hf:ORG/NAME", f"{_HERE}.hubs:from_hugging_face", ("mean", "std"), "its config"
        ),
        ModelPlace(
            "robustbench", "robustbench:NAME", f"{_HERE}.robustbench:load", says="RobustBench"
        ),
        ModelPlace(
            "python",
            "python:FILE.py:FACTORY",
            f"{_HERE}.factories:load",
            ("num_classes", *_PIXELS, "weights"),
        ),
    )
}
FILE = ModelPlace(
    "file", "a .pt2 or TorchScript file", f"{_HERE}.programs:load", _PIXELS, "the file"
)
PLACES = {FOLDER.kind: FOLDER, **PREFIXED, FILE.kind: FILE}
FORMS = (
    "a model folder, timm:NAME, hf:ORG/NAME, robustbench:NAME, python:FILE.py:FACTORY, "
    "a .pt2 file or a TorchScript file"
)


def find_place(text: str) -> tuple[ModelPlace, str]:
    """The place that a text names, and the name in it."""
    if not text:
        raise CasemateError("model", "''", f"is empty; name {FORMS}")
    kind, colon, name = text.partition(":")
    if colon and not is_uri(text) and kind in PREFIXED:
        if not name:
            raise CasemateError("model", text, f"has no name; write {PREFIXED[kind].form}")
        return PREFIXED[kind], name
    path = Path(text).expanduser()
    if not is_uri(text) and path.is_file():
        return FILE, str(path)
    return FOLDER, text


def folder_of(text: str) -> Folder:
    """The model folder at a path or URI, or the folder `model` in that of a training."""
    folder = folder_at(text)
    if isinstance(folder, Path) and not folder.is_dir():
        hub = text.partition(":")[0]
        guess = f", and {hub} {did_you_mean(hub, PREFIXED)}" if ":" in text else f"; name {FORMS}"
        raise CasemateError("model", text, f"does not exist{guess}")
    inside = within(folder, "model")
    return inside if (inside / "model.json").is_file() else folder
