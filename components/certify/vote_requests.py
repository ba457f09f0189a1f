"""A request for votes, and the plan of work behind a votes file."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import pyarrow as pa

from components.certify.header import VotesHeader
from components.certify.settings import CertificateSettings
from components.certify.tasks import (
    DataSource,
    ModelSource,
    VoteFields,
)
from components.certify.vote_rows import VoteRow
from components.core.units import Unit, UnitSource

SettingsT = TypeVar("SettingsT", bound=CertificateSettings)


@dataclass(frozen=True, kw_only=True)  # no slots: generic classes set __orig_class__
class VoteRequest(Generic[SettingsT]):
    """A request for one certificate: its settings, model and data."""

    settings: SettingsT
    key: str  # key of the settings in the recipe, for errors
    dataset: DataSource
    model: ModelSource
    denoiser: str | None  # the source of the network in front of the model
    seed: int
    device: str

    @property
    def vote_fields(self) -> VoteFields:
        """What every family's vote settings take from a request."""
        own = self.settings
        return VoteFields(
            kind=own.kind,
            micro_batch=own.planned_micro_batch,
            device=self.device,
            undecided=frozenset(self._undecided()),
        )

    def _undecided(self) -> Iterator[str]:
        """Settings `auto` that depend on the device of the workers; a driver may lack it."""
        if self.settings.micro_batch == "auto":
            yield "micro_batch"
        for name in ("precision", "noise") if self.device != "cpu" else ():
            if getattr(self.settings, name, None) == "auto":
                yield name


def recorded_vote_fields(header: VotesHeader) -> VoteFields:
    """The same, from a header."""
    own = header.settings
    return VoteFields(
        kind=header.kind,
        micro_batch=own["micro_batch"],
        device=own["device"],
        undecided=frozenset(),
    )


@dataclass(frozen=True, slots=True)
class VotePlan:
    """The work behind a votes file: the initial units, a source of further ones, the rows."""

    units: Sequence[Unit]
    source: UnitSource | None = None
    votes: Callable[[Iterable[pa.Table]], Iterable[pa.Table | VoteRow]] = iter
    """From the results of all units, in any order, to the rows of the file: by default all."""
