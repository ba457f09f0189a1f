"""The finding of one check, and the verdict over all checks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

NOT_CHECKED = "not checked: "  # how the text of a check that could not be run begins


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: ok if `value` does not exceed `limit`. `text` explains it in a sentence."""

    name: str
    ok: bool
    value: float
    limit: float
    text: str


class Verdict(NamedTuple):
    """`suspect` if any check fails; robust accuracy is then only an upper bound."""

    label: Literal["reliable", "suspect"]
    reasons: tuple[str, ...]


def finding(name: str, *, value: float, limit: float, text: str) -> Finding:
    """The finding of a check; NaN exceeds every limit."""
    return Finding(name, ok=value <= limit, value=float(value), limit=float(limit), text=text)


def verdict(findings: Iterable[Finding]) -> Verdict:
    """`reliable` without reasons, or `suspect` with one line for each failed check."""
    reasons = tuple(f"{f.name}: {f.text}" for f in findings if not f.ok)
    return Verdict("suspect" if reasons else "reliable", reasons)
