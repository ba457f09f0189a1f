"""Minimum figures for a release: results are verified first, and compared without rounding."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from components.core.settings import Fractional
from pipelines.api.figures import (
    Figure,
    exact_names,
    figures_at,
    matching,
    may_also_name,
    unreadable_at,
)
from pipelines.api.tables import frame
from pipelines.api.verified_results import first_problem

if TYPE_CHECKING:
    import pandas as pd

SHOWN_NAMES = 30  # in a message


@dataclass(frozen=True)
class Check:
    """One minimum and what was found; `problem` says why it is not met."""

    name: str
    minimum: Fraction
    asked: str  # the minimum as it was given
    figure: Figure
    value: Fraction  # what was compared: the share, or the lower end of its interval
    problem: str
    verified: bool = True  # whether the result holds that the value is of

    @property
    def passed(self) -> bool:
        return not self.problem

    @property
    def place(self) -> str:
        """The path or URI that the value comes from."""
        return self.figure.result.place

    @property
    def words(self) -> str:
        """The value as text; none of a result that does not verify."""
        if not self.verified:
            return ""
        lower = None if self.value == self.figure.value else self.value
        return self.figure.words(lower)

    def record(self) -> dict[str, Any]:
        """The check as JSON values."""
        return {
            "name": self.name,
            "minimum": float(self.minimum),
            "value": float(self.value),
            "num_items": self.figure.num_items,
            "passed": self.passed,
            "problem": self.problem or None,
            "place": self.place,
        }


@dataclass(frozen=True)
class Gate:
    """The outcome of all minima."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def table(self) -> "pd.DataFrame":
        """One row per minimum."""
        return frame(check.record() for check in self.checks)


def figures(path: str | Path) -> "pd.DataFrame":
    """What `gate` can compare in the finished results at a path or URI; nothing is verified.

    >>> from pipelines import api
    >>> import tempfile
    >>> api.figures(tempfile.mkdtemp())
    Traceback (most recent call last):
    components.core.errors.CasemateError: path: ... holds no finished attack, evaluation or ...
    """
    return frame(figure_records(path))


def figure_records(path: str | Path) -> list[dict[str, Any]]:
    """The rows of `figures` as plain values."""
    found = figures_at(path)
    return [
        {
            "name": name,
            "value": float(figure.value),
            "low": figure.low,
            "num_items": figure.num_items,
            "doubt": figure.doubt or None,
            "words": figure.words(),
            "place": figure.result.place,
        }
        for name, figure in zip(exact_names(found), found, strict=True)
    ]


def gate(
    path: str | Path,
    minima: Mapping[str, float | str],
    *,
    lower_bound: bool = False,
    allow_suspect: bool = False,
    key: str | Path | None = None,
) -> Gate:
    """Compare figures of finished results with minimum values.

    `path`: a storage, the folder of a flow or of a step, or a certificate; or a URI of one.
    `minima`: names of `figures` with shares in [0, 1], as numbers or text such as `3/5`.
    `lower_bound` compares the lower end of the 95 % interval. A certificate counts if its claims
    follow from its votes, at claimed radii and sizes only, and never if it is not sound; with a
    public `key` it must also be signed. Attacks that are suspect count with `allow_suspect`.

    >>> from pipelines import api
    >>> api.gate("runs/demo", {"certified.l2@0.5": 0.6}).passed  # doctest: +SKIP
    """
    if not minima:
        raise CasemateError("minima", "", "are missing; name at least one")
    shares = {name: _minimum(name, text) for name, text in minima.items()}
    if key is not None:  # a key that cannot be read is bad input, not a failed minimum
        from components.certify.keys import read_public_key

        read_public_key(Path(key).expanduser())
    found = figures_at(path)
    named = {name: _only(name, found, path) for name in shares}
    verified: dict[str, str] = {}
    checks = []
    for name, figure in named.items():
        place = figure.result.place
        if place not in verified:
            verified[place] = first_problem(figure.result, key)
        value = _lower(figure) if lower_bound else figure.value
        problem = verified[place] or _doubt(figure, allow_suspect=allow_suspect)
        if not problem and value < shares[name]:
            problem = f"is below {minima[name]}"
        asked, holds = str(minima[name]), not verified[place]
        checks.append(Check(name, shares[name], asked, figure, value, problem, holds))
    return Gate(tuple(checks))


def _minimum(name: str, value: float | str) -> Fraction:
    try:
        text = value.replace(" ", "") if isinstance(value, str) else repr(float(value))
        Fractional.read(text)  # refuses what would take long to compute
        share = Fraction(text)
    except (ValueError, TypeError) as error:
        remedy = "is not a share; write a number or fraction in [0, 1]"
        raise CasemateError(f"--min {name}", value, remedy) from error
    if not 0 <= share <= 1:
        remedy = "is outside [0, 1]; write 0.6 for 60 %"
        raise CasemateError(f"--min {name}", value, remedy)
    return share


def _only(name: str, found: list[Figure], path: str | Path) -> Figure:
    """The one figure of a name, or an error that lists what there is."""
    named = matching(name, found)
    if len(named) == 1:
        for result, error in unreadable_at(path):
            if may_also_name(name, named[0], result):
                remedy = f"may also stand for a figure of {error.value}, which {error.remedy}"
                raise CasemateError("--min", name, remedy)
        return named[0]
    if not named:
        remedy = f"is not a figure of {path}; it has: {_listed(found, found)}"
        for _, error in unreadable_at(path):
            remedy += f"; {error.value} {error.remedy}"
        raise CasemateError("--min", name, remedy)
    remedy = f"stands for {len(named)} figures; write one of: {_listed(named, found)}"
    raise CasemateError("--min", name, remedy)


def _listed(some: list[Figure], found: list[Figure]) -> str:
    known = [n for n, figure in zip(exact_names(found), found, strict=True) if figure in some]
    more = len(known) - SHOWN_NAMES
    return ", ".join(known[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _lower(figure: Figure) -> Fraction:
    """The lower end of the interval; 0 where there is none."""
    return Fraction(figure.low) if figure.low is not None else Fraction(0)


def _doubt(figure: Figure, *, allow_suspect: bool) -> str:
    suspect = figure.base.startswith("robust.")
    return "" if suspect and allow_suspect else figure.doubt
