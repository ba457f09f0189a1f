"""Votes that stop early: exact bounds on what the outstanding ablations can still change.

Symbols as in `patch`; R ablations are outstanding, M is the margin of the votes so far. Any
completion moves the margin of any class by at most R, and some completion by exactly R, so a claim
is decided as soon as no completion can overturn it: not an estimate, the same result as all votes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from components.certify.patch.ablations import Patch, TouchedSets, num_touched, touched_sets
from components.certify.patch.rules import (
    check_rules,
    check_votes,
    count_votes,
    find_leaders,
    margin_under,
    rivals_of,
    withstands,
)
from components.certify.patch.settings import AblationSettings
from components.core.settings import default_of
from components.core.types import Array, IntArray
from components.data.ablation import Ablations

UNSEEN = 2**16 - 1  # in place of a vote: this ablation was not computed
ORDER = "bit_reversal"


@dataclass(frozen=True, slots=True)
class PartialClaims:
    """Verdicts from the votes so far; one row per item, one column per patch size."""

    prediction: IntArray  # (N,) the leader so far; final unless `prediction_open`
    prediction_open: NDArray[np.bool_]  # (N,)
    num_outstanding: IntArray  # (N,) = R
    margin_low: IntArray  # (N,) the final margin is at least this
    margin_high: IntArray  # (N,) and at most this
    certified: NDArray[np.bool_]  # (N, M) certified for all outstanding votes
    open: NDArray[np.bool_]  # (N, M) some outstanding votes certify, others do not

    @property
    def undecided(self) -> NDArray[np.bool_]:
        """(N,) whether the remaining ablations can still change a prediction or a verdict."""
        return self.prediction_open | self.open.any(axis=1)


def voting_order(num_ablations: int) -> IntArray:
    """All ablations, far apart first: counting upwards with the bits of every index reversed.

    Early votes are then spread over the image. The order is a function of K alone.
    """
    bits = max(num_ablations - 1, 1).bit_length()
    index = np.arange(2**bits)
    reversed_index = sum((index >> bit & 1) << (bits - 1 - bit) for bit in range(bits))
    order: IntArray = np.asarray(reversed_index, dtype=np.int64)
    return order[order < num_ablations]


def certify_partial(
    votes_so_far: Array,
    ablations: Ablations,
    *,
    num_classes: int,
    patch_sizes: Sequence[Patch],
    rule: str = default_of(AblationSettings, "rule"),
) -> PartialClaims:
    """Verdicts from (N, K) votes of which some are UNSEEN, with the exact Delta.

    The prediction is decided iff M - R >= 0; a size is certified iff M - R >= 2 Delta and out of
    reach iff M + R < 2 Delta. (M + R is the best any class can do: a class behind the leader has a
    negative margin.) Rule `loc` requires the same at every position.
    """
    check_rules([rule])
    if num_classes > UNSEEN:
        raise ValueError(f"partial votes allow at most {UNSEEN} classes, got {num_classes}")
    seen = votes_so_far != UNSEEN
    # UNSEEN becomes one more class, which is counted and then left out.
    known = np.where(seen, votes_so_far, num_classes)
    check_votes(known, num_classes=num_classes + 1, num_ablations=len(ablations))
    leaders = find_leaders(count_votes(known, num_classes + 1)[:, :num_classes])
    outstanding: IntArray = (~seen).sum(axis=1)
    margin = margin_under(leaders, rule)
    shape = (len(known), len(patch_sizes))
    certified, possible = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
    for column, patch in enumerate(patch_sizes):
        if rule == "loc":
            touched = touched_sets(ablations, patch)
            verdicts = [_loc_verdicts(votes, num_classes, touched) for votes in known]
            certified[:, column] = [certain for certain, _ in verdicts]
            possible[:, column] = [reachable for _, reachable in verdicts]
        else:
            needed = 2 * num_touched(ablations, patch)
            certified[:, column] = margin - outstanding >= needed
            possible[:, column] = margin + outstanding >= needed
    return PartialClaims(
        leaders.winner,
        leaders.margin < outstanding,
        outstanding,
        leaders.margin - outstanding,
        leaders.margin + outstanding,
        certified,
        possible & ~certified,
    )


def _loc_verdicts(votes: Array, num_classes: int, touched: TouchedSets) -> tuple[bool, bool]:
    """(certified under every completion, certified under some) for one item; unseen = num_classes.

    Against a rival the worst completion gives it everything outstanding; for a class the best one
    gives it everything. A class certified under all completions leads now, because a patch of one
    pixel already reaches any single vote.
    """
    leader = int(np.bincount(votes, minlength=num_classes + 1)[:num_classes].argmax())
    rivals = rivals_of(votes, leader, num_classes)
    if all(withstands(_fill(votes, c, num_classes), leader, [c], touched) for c in rivals):
        return True, True
    for best in (leader, *rivals):
        filled = _fill(votes, best, num_classes)
        if withstands(filled, best, rivals_of(filled, best, num_classes), touched):
            return False, True
    return False, False


def _fill(votes: Array, value: int, unseen: int) -> Array:
    return np.where(votes == unseen, value, votes)
