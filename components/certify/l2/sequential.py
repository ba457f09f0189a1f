"""Anytime-valid l2 certificates: an item is sampled until its declared radii are decided.

A one-sided mixture e-process (Ville 1939; Robbins 1970; Voracek 2024 for smoothing) gives a lower
confidence sequence that holds at all times at once, so that looking early, often, or again after a
resume costs nothing. A tenth of the failure probability is kept for one exact bound at the last
draw; the two are combined by the union bound.

Symbols: k of the first t draws agree with the chosen class, q its true probability, p0 the
probability that a radius needs, alpha failure probability, beta the loss of power allowed by giving
up, E the e-process, L the lower confidence sequence.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.certify.l2.bounds import clopper_pearson_lower, draws_needed, probability_needed
from components.certify.l2.claims import radius_of_bound, refuse_beyond
from components.certify.l2.predict import ABSTAIN
from components.certify.l2.radius import FINAL_SHARE, SEQUENTIAL_SHARE
from components.certify.l2.settings import GaussianSettings
from components.core.confidence_sequences import (
    LARGEST_FAILURE_PROB,
    log_e_value,
    log_threshold,
    lower_confidence,
)
from components.core.errors import CasemateError
from components.core.settings import default_of
from components.core.types import FloatArray, IntArray

MOST_LOOKS = 10**7  # each look has a threshold for each radius, all in memory
SELECT_STEP, SELECT_LEAD = 16, 8  # draws between looks at the selection, lead that decides it


@dataclass(frozen=True)
class SequentialPlan:
    """All settings that must be fixed before the first draw; rejects a plan that can never certify.

    Radius 0 certifies a prediction (p > 1/2) without a distance. Without radii there is no early
    decision: the radius grows until `num_estimate` or until the caller stops.
    """

    sigma: float
    radii: tuple[float, ...]
    failure_prob: float = default_of(GaussianSettings, "failure_prob")  # alpha
    num_estimate: int = default_of(GaussianSettings, "num_estimate")  # maximum
    look_every: int = default_of(GaussianSettings, "look_every")
    futility_prob: float = default_of(GaussianSettings, "futility_prob")  # beta

    def __post_init__(self) -> None:
        _check_plan(self)

    @cached_property
    def looks(self) -> IntArray:
        """(J,) numbers of draws at which items may be decided, the last one `num_estimate`."""
        inner = np.arange(self.look_every, self.num_estimate, self.look_every, dtype=np.int64)
        return np.append(inner, self.num_estimate)

    @cached_property
    def max_certifiable_radius(self) -> float:
        """The radius of unanimous draws; no claim exceeds it."""
        bound = _unanimous_lower(self.num_estimate, self.failure_prob)
        return radius_of_bound(bound, sigma=self.sigma)

    @cached_property
    def needed(self) -> FloatArray:
        """(R,) probabilities that the radii need."""
        return np.array([probability_needed(r, self.sigma) for r in self.radii], dtype=np.float64)

    @cached_property
    def certify_from(self) -> IntArray:
        """(R, J) least number of agreeing draws that certifies; above the look: impossible."""
        alpha = SEQUENTIAL_SHARE * self.failure_prob
        rows = [certify_threshold(self.looks, p0, failure_prob=alpha) for p0 in self.needed]
        return np.array(rows, dtype=np.int64).reshape(len(rows), len(self.looks))

    @cached_property
    def give_up_to(self) -> IntArray:
        """(R, J) largest number of agreeing draws that gives up a radius; -1: never."""
        beta = self.futility_prob
        rows = [futility_threshold(self.looks, p0, futility_prob=beta) for p0 in self.needed]
        return np.array(rows, dtype=np.int64).reshape(len(rows), len(self.looks))


def _check_plan(plan: SequentialPlan) -> None:
    """Reject invalid values and plans that can never certify; errors use the recipe's names."""
    within = [
        ("sigma", plan.sigma, 0, math.inf),
        ("failure_prob", plan.failure_prob, 0, LARGEST_FAILURE_PROB),
        ("futility_prob", plan.futility_prob, 0, LARGEST_FAILURE_PROB),
    ]
    for name, value, low, high in within:
        if not low < value < high:
            raise CasemateError(f"certify.{name}", value, f"is outside ({low}, {high})")
    for name, count in (("num_estimate", plan.num_estimate), ("look_every", plan.look_every)):
        if count < 1:
            raise CasemateError(f"certify.{name}", count, "is not a positive number of draws")
    if plan.num_estimate // plan.look_every > MOST_LOOKS:
        remedy = f"makes more than {MOST_LOOKS:,} looks at {plan.num_estimate} draws; raise it"
        raise CasemateError("certify.look_every", plan.look_every, remedy)
    for radius in plan.radii:
        if not 0 <= radius < math.inf:
            raise CasemateError("certify.radii", radius, "is not an l2 distance in pixels")
    n, alpha, sigma = plan.num_estimate, plan.failure_prob, plan.sigma
    if plan.max_certifiable_radius == 0.0:
        needed = _draws_needed(probability_needed(0.0, sigma), alpha)
        remedy = f"draws can never exceed probability 1/2 at failure_prob {alpha}; use {needed}"
        raise CasemateError("certify.num_estimate", n, f"{remedy} or more")
    refuse_beyond(
        plan.max_certifiable_radius,
        plan.radii,
        sigma=sigma,
        n=n,
        alpha=alpha,
        needed=lambda p: _draws_needed(p, alpha),
    )


def _unanimous_lower(n: int, alpha: float) -> float:
    """The bound that a plan of n draws reaches if all of them agree."""
    sequential = lower_confidence(n, n, SEQUENTIAL_SHARE * alpha)
    return max(sequential, clopper_pearson_lower(n, n, FINAL_SHARE * alpha))


def _draws_needed(p: float, alpha: float) -> int:
    """The fewest draws with which a plan can reach p."""
    enough = draws_needed(p, FINAL_SHARE * alpha)
    return 1 + bisect_left(range(1, enough), p, key=lambda n: _unanimous_lower(n, alpha))


@dataclass(frozen=True, slots=True)
class SequentialClaim:
    """The claim about one item after `n` draws; valid at any time, final once `finished`."""

    prediction: int  # -1: abstain
    abstain: bool
    finished: bool
    k: int
    n: int  # draws used: the first look that decided all radii, or the last one seen
    num_looks: int
    p_lower: float
    radius: float
    certified_radii: tuple[float, ...]


def log_futility_value(k: ArrayLike, t: ArrayLike, p0: ArrayLike) -> FloatArray:
    """The mirror image of ln E: evidence against q >= p0, from the mean over all p < p0."""
    return log_e_value(np.asarray(t) - np.asarray(k), t, 1 - np.asarray(p0, dtype=np.float64))


def certify_threshold(t: IntArray, p0: float, *, failure_prob: float) -> IntArray:
    """(J,) least k with E_t(p0) >= 1/alpha at each t; t + 1 if no k suffices."""
    barrier = log_threshold(t, failure_prob)
    return _least_count(lambda k: log_e_value(k, t, p0) >= barrier, t)


def futility_threshold(t: IntArray, p0: float, *, futility_prob: float) -> IntArray:
    """(J,) largest k at which p0 is out of reach with confidence 1 - beta; -1 if none."""
    barrier = -math.log(futility_prob)  # giving up is always sound: no margin
    return _least_count(lambda k: log_futility_value(k, t, p0) < barrier, t) - 1


def _least_count(holds: Callable[[IntArray], NDArray[np.bool_]], t: IntArray) -> IntArray:
    """The least k in 0..t from which `holds` is true, or t + 1, by bisection at all looks."""
    low, high = np.zeros_like(t), t + 1
    while (open_ := low < high).any():
        middle = (low + high) // 2
        true = holds(np.minimum(middle, t))
        high = np.where(open_ & true, middle, high)
        low = np.where(open_ & ~true, middle + 1, low)
    return low


@dataclass(frozen=True, slots=True)
class Selection:
    """The class that the draws of the stream `select` chose, and how many were used."""

    chosen: int
    n0: int


def choose_class(
    predictions: NDArray[np.integer],
    *,
    num_classes: int,
    num_select: int = default_of(GaussianSettings, "num_select"),
    step: int = SELECT_STEP,
    lead: int = SELECT_LEAD,
) -> Selection | None:
    """The leader of (T,) selecting draws once it is `lead` votes ahead; None: draw more.

    Looks every `step` draws and, at the latest, at `num_select`; ties go to the lowest class. Any
    rule that does not use the estimating draws is sound: these catch a wrongly chosen class.
    """
    if num_classes < 2 or min(num_select, step, lead) < 1:
        raise ValueError("need at least two classes, and a positive num_select, step and lead")
    for n0 in (*range(step, num_select, step), num_select):
        if n0 > len(predictions):
            return None
        counts = np.bincount(predictions[:n0], minlength=num_classes)
        second, first = np.partition(counts, -2)[-2:]
        if first - second >= lead or n0 == num_select:
            return Selection(int(counts.argmax()), n0)
    raise AssertionError("the last look always chooses")


def finished_prefix(blocks: Iterable[tuple[int, NDArray[np.uint16]]]) -> NDArray[np.uint16]:
    """The predictions of draws 0, ..., T - 1 that (start, predictions) blocks hold without a gap.

    Blocks may come in any order and twice. Draws behind a gap are left out: the order in which
    blocks finish must not decide when an item stops.
    """
    found: dict[int, NDArray[np.uint16]] = {}
    for start, predictions in blocks:
        if start < 0 or not len(predictions):
            raise ValueError(f"a block needs predictions from a draw >= 0 on, got {start=}")
        if not np.array_equal(found.setdefault(start, predictions), predictions):
            raise ValueError(f"two blocks start at draw {start} and differ")
    parts, reached = [np.empty(0, np.uint16)], 0
    for start in sorted(found):
        if start < reached:
            raise ValueError(f"the block at draw {start} overlaps the one before it")
        if start > reached:
            break
        parts.append(found[start])
        reached += len(found[start])
    return np.concatenate(parts)


def certify_prefix(
    predictions: NDArray[np.integer], plan: SequentialPlan, *, chosen: int
) -> SequentialClaim:
    """The claim that (T,) predictions of the draws 0, ..., T - 1 support, under this plan.

    `chosen` must not depend on these draws. Only the declared looks count, up to the first
    one that decides all radii: more predictions never change a finished claim.
    """
    if predictions.ndim != 1 or len(predictions) > plan.num_estimate:
        raise ValueError(f"need at most {plan.num_estimate} predictions, got {predictions.shape}")
    looks = plan.looks[plan.looks <= len(predictions)]
    if not len(looks):
        return SequentialClaim(ABSTAIN, True, False, 0, 0, 0, 0.0, 0.0, ())
    agreed = np.cumsum(predictions == chosen)[looks - 1]
    reached = agreed >= plan.certify_from[:, : len(looks)]
    decided = reached | (agreed <= plan.give_up_to[:, : len(looks)])
    all_decided = np.logical_or.accumulate(decided, axis=1).all(axis=0) & bool(plan.radii)
    used = int(all_decided.argmax()) + 1 if all_decided.any() else len(looks)
    finished = bool(all_decided.any()) or looks[used - 1] == plan.num_estimate
    looks, agreed = looks[:used], agreed[:used]
    p_lower = max(
        _best_lower(agreed, looks, SEQUENTIAL_SHARE * plan.failure_prob),
        *plan.needed[reached[:, :used].any(axis=1)],  # the same bound, decided by integers
        _final_lower(int(agreed[-1]), int(looks[-1]), plan),
    )
    radius = radius_of_bound(float(p_lower), sigma=plan.sigma)
    return SequentialClaim(
        prediction=ABSTAIN if radius == 0.0 else chosen,
        abstain=radius == 0.0,
        finished=bool(finished),
        k=int(agreed[-1]),
        n=int(looks[-1]),
        num_looks=used,
        p_lower=float(p_lower),
        radius=radius,
        certified_radii=tuple(np.array(plan.radii)[p_lower >= plan.needed].tolist()),
    )


def _best_lower(agreed: IntArray, looks: IntArray, failure_prob: float) -> float:
    """max_t L_t: a bound stays valid. Bisects only at looks that exceed the best so far."""
    best = lower_confidence(int(agreed[-1]), int(looks[-1]), failure_prob)
    while len(looks) and best > 0:
        gain = log_e_value(agreed, looks, best) - log_threshold(looks, failure_prob)
        strongest = int(gain.argmax())
        if gain[strongest] < 0:
            break
        found = lower_confidence(int(agreed[strongest]), int(looks[strongest]), failure_prob)
        best = max(best, found)
        keep = gain > 0
        keep[strongest] = False
        agreed, looks = agreed[keep], looks[keep]
    return best


def _final_lower(k: int, t: int, plan: SequentialPlan) -> float:
    """Clopper-Pearson with the rest of alpha, at the last draw only."""
    if t < plan.num_estimate:
        return 0.0
    return clopper_pearson_lower(k, t, FINAL_SHARE * plan.failure_prob)
