"""What a voting worker is given: places on disk and what its votes depend on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from components.certify.vote_rows import image_digest
from components.core.types import Array
from components.data.prepared import ImageSplit, PreparedDataset, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteSettings:
    """Everything beside model and data that votes depend on; a family's class adds its own."""

    kind: str
    micro_batch: int
    device: str

    def to_dict(self) -> dict[str, object]:
        """The `settings` of a votes file's header."""
        return {"micro_batch": self.micro_batch, "device": self.device}


VotesT = TypeVar("VotesT", bound=VoteSettings)


@dataclass(frozen=True)  # no slots: generic classes set __orig_class__
class VoteTask(Generic[VotesT]):
    """Prepared dataset, model folder and settings; `denoiser` is the source of a network."""

    dataset: Path
    model: Path
    votes: VotesT
    denoiser: str | None = None

    def items(self) -> Split:
        """The test items: in memory where they fit, else read shard by shard."""
        return PreparedDataset.open(self.dataset).open_split("test")


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
