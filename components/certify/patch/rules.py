"""Rules by which votes over ablations certify that no patch changes the winner.

Levine & Feizi 2020 (Theorem 1) and Salman et al. 2022 (sec. 2). Symbols: n_c votes for class c,
Delta the most ablations a patch touches, c the winner (ties go to the lowest class), c' a rival, A
the ablations a position touches. The claim holds if each vote depends on its own ablation only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from components.certify.patch.ablations import Patch, TouchedSets, num_touched, touched_sets
from components.certify.patch.settings import AblationSettings, Rule
from components.core.errors import CasemateError
from components.core.settings import default_of
from components.core.types import Array, IntArray
from components.data.ablation import Ablations

RULES: tuple[str, ...] = get_args(Rule)


@dataclass(frozen=True, slots=True)
class Leaders:
    """The two first classes of every item."""

    winner: IntArray  # (N,)
    top_votes: IntArray  # (N,)
    runner_up: IntArray  # (N,) most votes among the rivals, ties to the lowest class
    runner_up_votes: IntArray  # (N,)
    margin: IntArray  # (N,) min over c' of n_c - n_c' - [c' < c]


@dataclass(frozen=True, slots=True)
class PatchClaims:
    """One row per item; `certified` has one column per patch size, in the order of the argument."""

    prediction: IntArray  # (N,) winner of the vote
    top_votes: IntArray  # (N,)
    runner_up: IntArray  # (N,)
    runner_up_votes: IntArray  # (N,)
    margin: IntArray  # (N,)
    certified: NDArray[np.bool_]  # (N, M)


def certify(
    votes_per_ablation: Array,
    ablations: Ablations,
    *,
    num_classes: int,
    patch_sizes: Sequence[Patch],
    rule: str = default_of(AblationSettings, "rule"),
    delta_rule: str = default_of(AblationSettings, "delta_rule"),
) -> PatchClaims:
    """Winners and verdicts from the (N, K) classes that the K ablations of each item voted for.

    A patch takes at most Delta votes from c and gives them to one c', hence the rules: `strict`
    n_c > n_c' + 2 Delta (the published one); `count` n_c - n_c' >= 2 Delta + [c' < c], the
    tightest that uses counts only; `loc` counts, for every patch position, the votes the patch
    cannot reach. Each implies the next. A patch size is the side of a square or (height, width).
    `delta_rule` other than `exact` voids the guarantee; see `ablations`.
    """
    check_votes(votes_per_ablation, num_classes=num_classes, num_ablations=len(ablations))
    check_rules([rule], delta_rule=delta_rule)
    leaders = find_leaders(count_votes(votes_per_ablation, num_classes))
    certified = np.zeros((len(votes_per_ablation), len(patch_sizes)), dtype=np.bool_)
    for column, patch in enumerate(patch_sizes):
        delta = num_touched(ablations, patch, delta_rule=delta_rule)
        certified[:, column] = margin_under(leaders, rule) >= 2 * delta
        if rule == "loc":
            for item in np.flatnonzero(~certified[:, column]):  # counts certify the others
                votes, best = votes_per_ablation[item], int(leaders.winner[item])
                rivals = rivals_of(votes, best, num_classes)
                certified[item, column] = withstands(
                    votes, best, rivals, touched_sets(ablations, patch)
                )
    return PatchClaims(
        leaders.winner,
        leaders.top_votes,
        leaders.runner_up,
        leaders.runner_up_votes,
        leaders.margin,
        certified,
    )


def check_votes(votes: Array, *, num_classes: int, num_ablations: int) -> None:
    """Reject votes of another shape, or for classes that do not exist."""
    if num_classes < 2:
        raise ValueError(f"num_classes must be >= 2, got {num_classes}")
    if votes.ndim != 2 or votes.shape[1] != num_ablations:
        raise ValueError(f"expected (N, {num_ablations}) votes, got shape {votes.shape}")
    if not np.issubdtype(votes.dtype, np.integer):
        raise ValueError(f"votes must be integers, got {votes.dtype}")
    if votes.size and not 0 <= votes.min() <= votes.max() < num_classes:
        raise ValueError(f"votes must be classes in [0, {num_classes})")


def check_rules(
    rules: Iterable[object], *, delta_rule: str = default_of(AblationSettings, "delta_rule")
) -> None:
    """Reject unknown rules, and a rule for Delta that would be ignored."""
    for rule in rules:
        if rule not in RULES:
            raise CasemateError("certify.rule", rule, f"is not one of {', '.join(RULES)}")
        if rule == "loc" and delta_rule != "exact":
            remedy = "does not apply to rule loc, which counts every position by itself"
            raise CasemateError("certify.delta_rule", delta_rule, remedy)


def count_votes(votes: Array, num_classes: int) -> IntArray:
    """(N, C) votes per class."""
    num_items = len(votes)
    cell = np.arange(num_items)[:, None] * num_classes + votes.astype(np.int64)
    flat = np.bincount(cell.ravel(), minlength=num_items * num_classes)
    return flat.reshape(num_items, num_classes).astype(np.int64)


def find_leaders(counts: IntArray) -> Leaders:
    """Winner, runner-up and margin from (N, C) counts."""
    rows = np.arange(len(counts))
    winner = counts.argmax(axis=1)  # numpy returns the first maximum: the lowest class
    top = counts[rows, winner]
    rivals = counts.copy()
    rivals[rows, winner] = -1  # the winner is not its own rival
    second = rivals.argmax(axis=1)
    second_votes = rivals[rows, second]
    # The first class with the most rival votes attains the minimum over all rivals: any other has
    # either fewer votes (worth at least the bracket) or a higher index.
    return Leaders(winner, top, second, second_votes, top - second_votes - (second < winner))


def margin_under(leaders: Leaders, rule: str) -> IntArray:
    """(N,) margin that must reach 2 Delta; `strict` counts every tie as lost, for any index."""
    if rule == "strict":
        return leaders.top_votes - leaders.runner_up_votes - 1
    return leaders.margin


def withstands(votes: Array, best: int, rivals: Iterable[int], touched: TouchedSets) -> bool:
    """Rule `loc` for one item: for all positions and c' among `rivals`,
    (n_c - n_c^A) - (n_c' - n_c'^A) >= |A| + [c' < c].

    Exact when touched ablations may vote for anything: the worst case hands all of A to one rival.
    """
    most = touched.sizes.max()
    for rival in rivals:
        lead = (votes == best).astype(np.int64) - (votes == rival)  # n_c - n_c', per ablation
        slack = lead.sum() - (rival < best)
        if slack >= 2 * most:
            continue  # rule `count` holds against this rival, and it implies `loc`
        if (slack - touched.weight_inside(lead) < touched.sizes).any():
            return False
    return True


def rivals_of(votes: Array, best: int, num_classes: int) -> list[int]:
    """All voted rivals, and the lowest other class without a vote.

    A class without votes can still receive every touched vote. Among such classes the lowest is
    the worst case, because it wins the most ties.
    """
    known = np.union1d(votes[votes < num_classes], [best]).astype(np.int64)
    absent = np.setdiff1d(np.arange(min(len(known) + 1, num_classes)), known)[:1]
    return [int(c) for c in (*known, *absent) if c != best]
