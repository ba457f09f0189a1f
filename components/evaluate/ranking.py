"""Results of one protocol on the same items, ranked; what is not significantly apart is a tie.

A rank counts the results with a larger share. The best and the worst rank that a result may have
count only results that are significantly better or worse (`comparison`: the exact test of McNemar
or Student's paired t, adjusted by the method of Holm for all pairs of the board). Ties are
symmetric, and nothing depends on the order in which results are given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from components.core.digests import canonical_json, digest_json
from components.evaluate.comparison import Share, every_pair, share_of
from components.evaluate.verdicts import Kind, Verdicts

DETERMINED = "preprocessing, "  # conditions that the digest of a dataset settles


class BoardKey(NamedTuple):
    """What results must share to be ranked against each other."""

    dataset: str  # its digest
    items: str  # digest of item ids, labels and, where they are known, pixels
    base: str  # e.g. robust.linf
    budget: str
    kind: Kind
    protocol: str  # conditions as canonical JSON

    @property
    def figure(self) -> str:
        return f"{self.base}@{self.budget}" if self.budget else self.base


def board_of(own: Verdicts) -> BoardKey:
    """The board of a result."""
    labels = [str(label) for label in own.labels]
    items = digest_json([list(own.item_ids), labels, list(own.images or ())])
    protocol = canonical_json(protocol_of(own))
    return BoardKey(own.dataset, items, own.base, own.budget, own.kind, protocol)


def protocol_of(own: Verdicts) -> dict[str, Any]:
    """How a result was made, without what its dataset settles."""
    return {k: v for k, v in own.conditions.items() if not k.startswith(DETERMINED)}


@dataclass(frozen=True, slots=True)
class Standing:
    """A result among those of its board; without ranks where it does not count."""

    name: str
    share: Share
    rank: int | None = None
    best: int | None = None  # rank, if only significant differences count
    worst: int | None = None
    ties: tuple[str, ...] = ()

    @property
    def is_leader(self) -> bool:
        """Whether nothing is significantly better."""
        return self.best == 1


def standings(
    ranked: Mapping[str, Verdicts], unranked: Mapping[str, Verdicts] | None = None
) -> list[Standing]:
    """Results of one board by name, the largest share first; those that do not count come last."""
    shares = {name: _share(name, own) for name, own in ranked.items()}
    better: dict[str, set[str]] = {name: set() for name in ranked}  # significantly
    ties: dict[str, set[str]] = {name: set() for name in ranked}
    for found in every_pair({name: ranked[name] for name in sorted(ranked)}):
        one, other = found.one, found.other
        if found.is_tie:
            ties[one].add(other)
            ties[other].add(one)
        else:
            worse = other if found.outcome == one else one
            better[worse].add(found.outcome)
    made = [
        Standing(
            name,
            share,
            rank=1 + sum(other.value > share.value for other in shares.values()),
            best=1 + len(better[name]),
            worst=1 + len(better[name]) + len(ties[name]),
            ties=tuple(sorted(ties[name], key=lambda tied: _place(tied, shares[tied]))),
        )
        for name, share in shares.items()
    ]
    rest = [Standing(name, _share(name, own)) for name, own in (unranked or {}).items()]
    ordered = (sorted(group, key=lambda s: _place(s.name, s.share)) for group in (made, rest))
    return [standing for group in ordered for standing in group]


def _share(name: str, own: Verdicts) -> Share:
    return share_of(own.figure, name, own)


def _place(name: str, share: Share) -> tuple[float, str]:
    return -share.value, name
