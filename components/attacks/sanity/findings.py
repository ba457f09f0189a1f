"""The finding of one check, and the verdict over all checks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Label = Literal["reliable", "suspect", "unchecked"]
NONE_ATTACKED = "no item is classified correctly, so none was attacked"
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
    """`suspect` if any check fails; robust accuracy is then only an upper bound.

    `unchecked` where nothing was attacked.
    """

    label: Label
    reasons: tuple[str, ...]


def finding(name: str, *, value: float, limit: float, text: str) -> Finding:
    """The finding of a check; NaN exceeds every limit."""
    return Finding(name, ok=value <= limit, value=float(value), limit=float(limit), text=text)


def verdict(findings: Iterable[Finding], *, any_attacked: bool = True) -> Verdict:
    """`reliable` without reasons, or `suspect` with one line for each failed check.

    Checks say nothing where no item was right at the clean point, so that none was attacked.
    """
    reasons = tuple(f"{f.name}: {f.text}" for f in findings if not f.ok)
    if not reasons and not any_attacked:
        return Verdict("unchecked", (NONE_ATTACKED,))
    return Verdict("suspect" if reasons else "reliable", reasons)
