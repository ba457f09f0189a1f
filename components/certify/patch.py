"""Which column votes no square patch can overturn.

Levine & Feizi 2020 (Theorem 1) and Salman et al. 2022 (sec. 2). Symbols: n_c votes for class c,
Delta the most bands a patch touches, c the winner (ties go to the lowest class), c' a rival, A
the bands a position touches. The claim holds for votes that each see their own band only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from components.certify.ablations import num_touched, touched_by
from components.core.types import Array, IntArray
from components.data.ablation import column_starts

Rule = Literal["strict", "count", "loc"]
RULES: tuple[str, ...] = get_args(Rule)


@dataclass(frozen=True, slots=True)
class PatchClaims:
    """One row per item; `certified` has one column per patch size, in the order asked for."""

    prediction: IntArray  # (N,) winner of the vote
    top_votes: IntArray  # (N,)
    runner_up: IntArray  # (N,) most votes among the rivals, ties to the lowest class
    runner_up_votes: IntArray  # (N,)
    margin: IntArray  # (N,) min over c' of n_c - n_c' - [c' < c]
    certified: NDArray[np.bool_]  # (N, M)


def certify_columns(
    predictions: Array,
    *,
    num_classes: int,
    image_width: int,
    band: int,
    stride: int,
    patch_sizes: Sequence[int],
    rule: Rule = "count",
) -> PatchClaims:
    """Winners and verdicts from the (N, K) classes that the K bands of each item voted for.

    A patch takes at most Delta votes from c and gives them to one c', hence the rules: `strict`
    n_c > n_c' + 2 Delta (the published one); `count` n_c - n_c' >= 2 Delta + [c' < c], the
    tightest that sees counts only; `loc` counts, for every patch position, the votes the patch
    cannot reach. Each implies the next.
    """
    num_bands = len(column_starts(image_width, stride))
    _check_votes(predictions, num_classes=num_classes, num_bands=num_bands)
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
    counts = _count(predictions, num_classes)
    rows = np.arange(len(counts))
    winner = counts.argmax(axis=1)  # numpy returns the first maximum: the lowest class
    top = counts[rows, winner]
    rivals = counts.copy()
    rivals[rows, winner] = -1  # the winner is not its own rival
    second = rivals.argmax(axis=1)
    second_votes = rivals[rows, second]
    # The first class with the most rival votes attains the minimum over all rivals: any other has
    # either fewer votes (worth at least the bracket) or a higher index.
    margin = top - second_votes - (second < winner)

    certified = np.zeros((len(counts), len(patch_sizes)), dtype=np.bool_)
    for column, patch in enumerate(patch_sizes):
        shape = {"image_width": image_width, "band": band, "stride": stride, "patch": patch}
        if rule == "loc":
            certified[:, column] = _standing_everywhere(
                predictions, winner, touched_by(**shape), num_classes=num_classes
            )
        elif rule == "count":
            certified[:, column] = margin >= 2 * num_touched(**shape)
        else:
            certified[:, column] = top > second_votes + 2 * num_touched(**shape)
    return PatchClaims(winner, top, second, second_votes, margin, certified)


def _check_votes(predictions: Array, *, num_classes: int, num_bands: int) -> None:
    if num_classes < 2:
        raise ValueError(f"num_classes must be >= 2, got {num_classes}")
    if predictions.ndim != 2 or predictions.shape[1] != num_bands:
        raise ValueError(f"expected (N, {num_bands}) votes, got shape {predictions.shape}")
    if not np.issubdtype(predictions.dtype, np.integer):
        raise ValueError(f"votes must be integers, got {predictions.dtype}")
    if predictions.size and not 0 <= predictions.min() <= predictions.max() < num_classes:
        raise ValueError(f"votes must be classes in [0, {num_classes})")


def _count(predictions: Array, num_classes: int) -> IntArray:
    """(N, C) votes per class."""
    num_items = len(predictions)
    cell = np.arange(num_items)[:, None] * num_classes + predictions.astype(np.int64)
    flat = np.bincount(cell.ravel(), minlength=num_items * num_classes)
    return flat.reshape(num_items, num_classes).astype(np.int64)


def _standing_everywhere(
    predictions: Array, winner: IntArray, touched: NDArray[np.bool_], *, num_classes: int
) -> NDArray[np.bool_]:
    """Rule `loc`: for all positions and c', (n_c - n_c^A) - (n_c' - n_c'^A) >= |A| + [c' < c].

    This is exact when touched bands may vote for anything: the worst case hands all of A to one
    rival.
    """
    # Float64 matrix products are exact on these small integers, and far faster than integer ones.
    untouched = (~touched).astype(np.float64)  # (P, K)
    reach = touched.sum(axis=1)  # (P,) = |A|
    standing = np.empty(len(predictions), dtype=np.bool_)
    for item, (votes, best) in enumerate(zip(predictions, winner, strict=True)):
        classes = _rivals_worth_checking(votes, int(best), num_classes)
        safe = untouched @ (votes[:, None] == classes).astype(np.float64)  # (P, V)
        safe_best = untouched @ (votes == best).astype(np.float64)  # (P,)
        slack = safe_best[:, None] - safe - (classes < best)
        standing[item] = bool((slack >= reach[:, None]).all())
    return standing


def _rivals_worth_checking(votes: Array, best: int, num_classes: int) -> IntArray:
    """All voted rivals, and the lowest class without a vote.

    A class nobody voted for can still receive every touched vote. Among such classes the lowest
    is the most dangerous, because it wins the most ties.
    """
    voted = np.unique(votes).astype(np.int64)
    absent = np.setdiff1d(np.arange(min(len(voted) + 1, num_classes)), voted)[:1]
    rivals: IntArray = np.concatenate([voted, absent])
    return np.delete(rivals, np.flatnonzero(rivals == best))
