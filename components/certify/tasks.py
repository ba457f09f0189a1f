"""The input of a voting worker: model, data, and the settings that its votes depend on.

Stages give folders, because workers are other processes; a notebook gives loaded objects.
"""

import copy
from dataclasses import dataclass
from typing import Generic, TypedDict, TypeVar

from components.certify.vote_rows import image_digest
from components.core.arithmetic import EXACT, Arithmetic
from components.core.folders import Folder
from components.core.types import Array
from components.data.memory import MemoryDataset
from components.data.prepared import ImageSplit, PreparedDataset, Split
from components.models.checkpoint import load_model, read_header, weights_digest
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec

ModelSource = Folder | PixelModel
DataSource = Folder | MemoryDataset
Dataset = PreparedDataset | MemoryDataset


class VoteFields(TypedDict):
    """The arguments that all classes of vote settings share."""

    kind: str
    micro_batch: int
    device: str
    undecided: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteSettings:
    """Settings that votes depend on besides model and data; a family's class adds its own.

    `undecided` names those that a recipe leaves to the first worker; they hold a default until
    then, and no header is written before.
    """

    kind: str
    micro_batch: int
    device: str
    undecided: frozenset[str] = frozenset()

    def to_dict(self) -> dict[str, object]:
        """The `settings` of a votes file's header.

        On a CPU float32 is always exact; elsewhere the switches under which votes are computed are
        recorded.
        """
        values = {"micro_batch": self.micro_batch, "device": self.device}
        return values if self.device == "cpu" else {**values, "float32": self.arithmetic.to_dict()}

    @property
    def arithmetic(self) -> Arithmetic:
        """The switches of float32 products under which votes are computed."""
        return EXACT


VotesT = TypeVar("VotesT", bound=VoteSettings)


@dataclass(frozen=True)  # no slots: generic classes set __orig_class__
class VoteTask(Generic[VotesT]):
    """Data, model and settings; `denoiser` is the source of a network in front of the model."""

    dataset: DataSource
    model: ModelSource
    votes: VotesT
    denoiser: str | None = None

    def items(self) -> Split:
        """The test items, read when they are asked for."""
        return self.open_data().on_demand("test")

    def open_data(self) -> Dataset:
        """The dataset of the items."""
        return open_data(self.dataset)

    def load_model(self) -> PixelModel:
        """The model on the device of the votes, in eval mode; the caller's spec is not changed."""
        if isinstance(self.model, PixelModel):
            return copy.copy(self.model)  # weights are shared; the caller chooses the device
        return load_model(self.model, device=self.votes.device)


def open_data(source: DataSource) -> Dataset:
    """The dataset of a prepared folder, or the one already in memory."""
    return source if isinstance(source, MemoryDataset) else PreparedDataset.open(source)


def spec_of(model: ModelSource) -> ModelSpec:
    """The spec of a model folder, or of a loaded model."""
    if isinstance(model, PixelModel):
        return model.spec
    return ModelSpec.from_dict(read_header(model)["spec"])


def digest_of(model: ModelSource) -> str:
    """The digest of a model: as recorded in its folder, or of the loaded weights."""
    if isinstance(model, PixelModel):
        return weights_digest(model)
    return str(read_header(model)["digest"])


def vote_row(item: ImageSplit, stream: str, start: int, predictions: Array) -> dict[str, object]:
    """A row of the votes file, from the predictions of one item."""
    return {
        "item_id": item.item_ids[0],
        "label": int(item.labels[0]),
        "image_sha256": image_digest(item.images[0]),
        "stream": stream,
        "start": start,
        "stop": start + len(predictions),
        "predictions": predictions,
    }
