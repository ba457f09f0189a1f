"""All results of a run, as the chapters of the report take them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from components.report.records import AttackResult, CertifyResult, TrainResult, TuneResult
from components.report.sweeps import Sweep, find_sweeps


@dataclass(frozen=True, slots=True)
class Dataset:
    """The properties of a prepared dataset that the report shows."""

    classes: tuple[str, ...]
    channels: int
    height: int
    width: int
    digest: str
    splits: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Results:
    """All finished results of a run; parts that were not run are empty."""

    dataset: Dataset
    trained: tuple[TrainResult, ...] = ()
    tuned: TuneResult | None = None
    attacks: tuple[AttackResult, ...] = ()
    certificates: tuple[CertifyResult, ...] = ()
    published: tuple[
        Any, ...
    ] = ()  # tables of other works, as the family of `report.compare` reads them
    first_images: Callable[[int], Mapping[str, Tensor]] = lambda count: {}  # of the test split

    def model_of(self, result: CertifyResult) -> str:
        """The trained model of a certificate, found by its digest."""
        digest = str(result.document.evidence.model_digest)
        names = {train.digest: train.model for train in self.trained}
        return names.get(digest, f"model {digest[:12]}")

    def sweeps(self) -> tuple[Sweep, ...]:
        """Certificates that differ only in what their family can sweep."""
        return find_sweeps(self.certificates, self.model_of)
