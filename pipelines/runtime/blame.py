"""Failures of units and of the places where they ran, and which of the two is to blame.

Blame needs evidence: a place that fails `SUSPECT` units in a row is suspected. If these units
succeed elsewhere, the place is to blame; if they fail there too, the units are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from components.core.errors import last_line
from components.core.units import Unit
from pipelines.runtime.crew import Place

MAX_TRIES = 3
SUSPECT = 3  # failures in a row after which a place is suspected, and left out once proven
HOPELESS = 10  # failures in a row, at least, before the stage ends


class ShardFailedError(RuntimeError):
    """Units that failed three times, or workers that never came; finished units are kept."""


@dataclass(slots=True)
class Tries:
    """The failed tries of a unit."""

    places: list[Place] = field(default_factory=list)
    error: BaseException | None = None
    when: float = 0.0  # of the last one

    @property
    def nodes(self) -> set[str]:
        return {place.node for place in self.places}


@dataclass(slots=True)
class _Record:
    """Failures of a place since its last success."""

    suspected: int = 0  # not yet explained, or explained by the place
    proven: int = 0  # of these: units that succeeded elsewhere


class Blame:
    """The failures of one call of the executor."""

    def __init__(self) -> None:
        self.tries: dict[str, Tries] = {}  # of units that have not succeeded since
        self.failed: dict[str, Unit] = {}  # `MAX_TRIES` times
        self.records: dict[Place, _Record] = {}
        self._in_a_row = 0  # failures without a success in between
        self._first: tuple[Unit, BaseException] | None = None

    def is_suspected(self, place: Place) -> bool:
        """Whether too many units failed there in a row."""
        record = self.records.get(place)
        return record is not None and record.suspected >= SUSPECT

    def add_success(self, units: Sequence[Unit], place: Place) -> list[tuple[Place, int]]:
        """Clear this place of blame; returns places to blame for earlier failures of these units,
        each with the number of units that failed only there."""
        self._in_a_row = 0
        self.records.pop(place, None)
        proven: list[tuple[Place, int]] = []
        for unit in units if self.tries else ():
            past = self.tries.pop(unit.name, None)
            for other in set(past.places) - {place} if past else ():
                if record := self.records.get(other):
                    record.proven += 1
                    proven += [(other, record.proven)] * (record.proven >= SUSPECT)
        return proven

    def add_failure(self, unit: Unit, place: Place, error: BaseException, *, now: float) -> bool:
        """Note a failed try; returns whether the unit may be tried again."""
        self._in_a_row += 1
        self._first = self._first or (unit, error)
        past = self.tries.setdefault(unit.name, Tries())
        for other in set(past.places) - {place}:  # not the fault of these, then
            if record := self.records.get(other):
                record.suspected = max(0, record.suspected - 1)
        self.records.setdefault(place, _Record()).suspected += 1
        past.places.append(place)
        past.error, past.when = error, now
        if len(past.places) < MAX_TRIES:
            return True
        self.failed[unit.name] = unit
        return False

    def check_hope(self, places: Iterable[Place], *, num_wanted: int) -> None:
        """Raise if no place is left that could still succeed."""
        if self._in_a_row < max(HOPELESS, num_wanted):
            return
        if any(place not in self.records for place in places):
            return
        assert self._first is not None
        unit, error = self._first
        raise ShardFailedError(
            f"{self._in_a_row} failures and no success in between, finished units are kept; "
            f"first {_cause(unit, error)}"
        ) from error

    def check_units(self) -> None:
        """Raise if units have failed for good."""
        if not self.failed:
            return
        unit = next(iter(self.failed.values()))
        past = self.tries[unit.name]
        assert past.error is not None
        where = "; ".join(dict.fromkeys(str(place) for place in past.places))
        raise ShardFailedError(
            f"{len(self.failed)} unit(s) failed {MAX_TRIES} times, all others are kept; "
            f"first {_cause(unit, past.error)} (on {where})"
        ) from past.error


def _cause(unit: Unit, error: BaseException) -> str:
    return f"{unit.name} ({unit.about}): {type(error).__name__}: {last_line(error)}"
