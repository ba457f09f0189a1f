"""Sequential certificates: the e-process, its thresholds, the claims, and how often they fail."""

import re
from fractions import Fraction
from itertools import pairwise
from math import comb

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from components.certify.l2.bounds import clopper_pearson_lower, max_radius, probability_needed
from components.certify.l2.sequential import (
    FINAL_SHARE,
    SequentialPlan,
    certify_prefix,
    certify_threshold,
    choose_class,
    finished_prefix,
    futility_threshold,
    log_futility_value,
)
from components.core.confidence_sequences import (
    anytime_interval,
    log_e_value,
    lower_confidence,
)
from components.core.errors import CasemateError

PLAN = SequentialPlan(sigma=0.5, radii=(0.25, 0.5, 1.0))
SMALL = SequentialPlan(
    sigma=0.5, radii=(0.0, 0.25), failure_prob=0.01, num_estimate=150, look_every=16
)
PHI = stats.norm.cdf


def draws(rng, q, size):
    return (rng.random(size) < q).astype(np.uint16)


# The e-process


@pytest.mark.parametrize(
    ("k", "t", "p0", "value"),
    [
        (64, 64, PHI(1), 8.722863),
        (58, 64, PHI(0.5), 7.323198),
        (60, 64, PHI(0.5), 10.479983),
        (512, 512, PHI(2), 9.325511),
        (20, 20, 0.5, 11.511568),
    ],
)
def test_published_values(k, t, p0, value):
    assert float(log_e_value(k, t, p0)) == pytest.approx(value, abs=6e-7)


states = st.integers(0, 40).flatmap(lambda t: st.tuples(st.integers(0, t), st.just(t)))
probs = st.floats(0.05, 0.95)


@settings(deadline=None, max_examples=40)
@given(states, probs)
def test_values_in_exact_arithmetic(state, p0):
    (k, t), p = state, Fraction(p0)
    # Int_p^1 x^k (1-x)^(t-k) dx = P(Bin(t+1, p) <= k) / ((t+1) C(t, k)), by parts
    below = sum(comb(t + 1, i) * p**i * (1 - p) ** (t + 1 - i) for i in range(k + 1))
    exact = below / ((t + 1) * comb(t, k)) / (1 - p) / (p**k * (1 - p) ** (t - k))
    assert float(log_e_value(k, t, p0)) == pytest.approx(float(mpmath.log(exact)), abs=1e-11)


@pytest.mark.parametrize(("k", "t"), [(84_700, 100_000), (97_900, 100_000), (9_818, 9_984)])
def test_rounding_stays_inside_the_margin(k, t):
    p0 = lower_confidence(k, t, 0.0009)
    with mpmath.workdps(40):
        p = mpmath.mpf(p0)
        # the tail right of p0 is 1 but for less than alpha, which float64 gives well enough
        tail = 1 - mpmath.mpf(float(special.betainc(k + 1, t - k + 1, p0)))
        exact = mpmath.log(mpmath.beta(k + 1, t - k + 1) * tail) - k * mpmath.log(p)
        exact -= (t - k + 1) * mpmath.log(1 - p)
    assert abs(float(log_e_value(k, t, p0) - exact)) < 1e-9 + 1e-14 * t
    assert float(exact) >= -np.log(0.0009)


@settings(deadline=None, max_examples=40)
@given(states, probs, st.floats(0.01, 1))
def test_the_process_is_fair_at_the_null_and_loses_below_it(state, p0, share):
    (k, t), q = state, share * p0
    now, up, down = (np.exp(log_e_value(i, n, p0)) for i, n in ((k, t), (k + 1, t + 1), (k, t + 1)))
    assert p0 * up + (1 - p0) * down == pytest.approx(float(now), rel=1e-9)
    assert q * up + (1 - q) * down <= now * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(states, probs)
def test_futility_is_the_mirror_image(state, p0):
    (k, t), p = state, Fraction(p0)
    above = sum(comb(t + 1, i) * p**i * (1 - p) ** (t + 1 - i) for i in range(k + 1, t + 2))
    exact = above / ((t + 1) * comb(t, k)) / p / (p**k * (1 - p) ** (t - k))
    assert float(log_futility_value(k, t, p0)) == pytest.approx(float(mpmath.log(exact)), abs=1e-10)


# Thresholds and the confidence sequence


@pytest.mark.parametrize(
    ("row", "certify", "give_up"),
    [
        (0, "58 109 207 397 771 1507 7112 28091", "30 69 149 313 649 1332 6710 27257"),
        (1, "64 123 238 463 909 1792 8561 33988", "42 91 191 397 813 1654 8242 33328"),
        (2, "65 129 257 512 1018 2027 9818 39218", "56 116 238 484 978 1969 9686 38948"),
    ],
)
def test_published_thresholds(row, certify, give_up):
    at = np.searchsorted(PLAN.looks, [64, 128, 256, 512, 1024, 2048, 9984, 40000])
    assert PLAN.certify_from[row, at].tolist() == [int(word) for word in certify.split()]
    assert PLAN.give_up_to[row, at].tolist() == [int(word) for word in give_up.split()]


def test_the_first_look_that_can_certify_radius_one():
    assert PLAN.looks[(PLAN.certify_from[2] <= PLAN.looks).argmax()] == 448
    assert (PLAN.looks[-2], PLAN.looks[-1]) == (99_968, 100_000)


def test_published_counts_of_the_final_bound():
    for k, radius in zip((69_690, 84_564, 97_899), PLAN.radii, strict=True):
        p0 = probability_needed(radius, 0.5)
        below, at = (clopper_pearson_lower(j, 100_000, FINAL_SHARE * 0.001) for j in (k - 1, k))
        assert below < p0 <= at


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), probs, st.sampled_from([0.2, 0.01]))
def test_thresholds_by_trying_every_count(t, p0, level):
    k, looks = np.arange(t + 1), np.array([t])
    enough = np.flatnonzero(log_e_value(k, t, p0) >= -np.log(level) + 1e-8)
    hopeless = np.flatnonzero(log_futility_value(k, t, p0) >= -np.log(level))
    assert certify_threshold(looks, p0, failure_prob=level) == min(enough, default=t + 1)
    assert futility_threshold(looks, p0, futility_prob=level) == max(hopeless, default=-1)


@pytest.mark.parametrize(
    ("k", "t", "bound"),
    [(64, 64, 0.8680420), (1000, 1000, 0.9909273), (990, 1000, 0.9715263),
     (90_000, 100_000, 0.8955564), (100_000, 100_000, 0.9999088)],
)  # fmt: skip
def test_published_lower_bounds(k, t, bound):
    assert lower_confidence(k, t, 0.001) == pytest.approx(bound, abs=6e-8)


@settings(deadline=None, max_examples=40)
@given(states.filter(lambda s: s[1] > 0), st.sampled_from([0.3, 0.05, 0.001]))
def test_the_sequence_ends_where_evidence_ends(state, alpha):
    k, t = state
    bound = lower_confidence(k, t, alpha)
    assert bound < (k + 1) / (t + 1)
    left = np.linspace(0, bound, 50)[1:] if bound else np.array([])
    right = np.linspace(bound, 1, 200)[1:-1]
    assert (log_e_value(k, t, left) >= -np.log(alpha)).all()
    assert (log_e_value(k, t, right) < -np.log(alpha) + 1e-6).all()
    low, high = anytime_interval(k, t, alpha)
    assert low <= k / t <= high
    assert low <= bound


def test_looking_at_any_time_costs_a_wider_bound():
    assert lower_confidence(900, 1000, 0.001) < clopper_pearson_lower(900, 1000, 0.001)


# Claims


def test_easy_hopeless_and_borderline_items():
    rng = np.random.default_rng(0)
    easy = certify_prefix(draws(rng, 0.9999, 10_000), PLAN, chosen=1)
    assert (easy.finished, easy.certified_radii, easy.n) == (True, PLAN.radii, 448)
    assert 1.0 <= easy.radius <= max_radius(sigma=0.5, n=448, alpha=0.001)
    hopeless = certify_prefix(draws(rng, 0.3, 10_000), PLAN, chosen=1)
    assert (hopeless.finished, hopeless.prediction, hopeless.radius) == (True, -1, 0.0)
    assert (hopeless.n, hopeless.num_looks, hopeless.certified_radii) == (64, 1, ())
    between = certify_prefix(draws(rng, 0.9, 10_000), PLAN, chosen=1)
    assert (between.finished, between.certified_radii) == (True, (0.25, 0.5))
    assert 0.5 <= between.radius < 1.0


@pytest.mark.parametrize(
    ("agreeing", "radius"), [(100_000, 1.870), (99_000, 1.141), (90_000, 0.631)]
)
def test_published_radii_of_a_full_run(agreeing, radius):
    votes = np.zeros(100_000, np.uint16)
    votes[np.random.default_rng(0).permutation(100_000)[:agreeing]] = 1
    claim = certify_prefix(votes, SequentialPlan(sigma=0.5, radii=()), chosen=1)
    assert (claim.finished, claim.n, claim.k) == (True, 100_000, agreeing)
    assert claim.radius == pytest.approx(radius, abs=6e-4)  # printed with three decimals


def test_nothing_is_known_before_the_first_look():
    claim = certify_prefix(np.ones(63, np.uint16), PLAN, chosen=1)
    assert (claim.finished, claim.abstain, claim.n, claim.p_lower) == (False, True, 0, 0.0)


def test_radius_zero_asks_for_an_answer():
    votes = draws(np.random.default_rng(1), 0.6, 4000)
    plan = SequentialPlan(sigma=0.5, radii=(0.0,), num_estimate=4000)
    claim = certify_prefix(votes, plan, chosen=1)
    assert (claim.prediction, claim.certified_radii) == (1, (0.0,))
    assert claim.p_lower > 0.5
    wrong = certify_prefix(votes, plan, chosen=0)
    assert (wrong.finished, wrong.abstain, wrong.certified_radii) == (True, True, ())


def test_a_radius_once_decided_stays_decided():
    # 64 of 64 certify 0.25 and 0.5; 91 of 128 would not, but give up 1.0 (at most 116).
    votes = np.r_[np.ones(64), np.zeros(37), np.ones(27), np.ones(1000)].astype(np.uint16)
    claim = certify_prefix(votes, PLAN, chosen=1)
    assert (claim.finished, claim.k, claim.n) == (True, 91, 128)
    assert claim.certified_radii == (0.25, 0.5)


@settings(deadline=None, max_examples=30)
@given(st.data(), st.floats(0.4, 1.0), st.integers(0, 2**32))
def test_peeking_sharding_and_resuming_change_nothing(data, q, seed):
    votes = draws(np.random.default_rng(seed), q, SMALL.num_estimate)
    final = certify_prefix(votes, SMALL, chosen=1)
    assert final.finished
    cuts = data.draw(st.sets(st.integers(1, SMALL.num_estimate - 1), max_size=8))
    edges = [0, *sorted(cuts), SMALL.num_estimate]
    blocks = [(low, votes[low:high]) for low, high in pairwise(edges)]
    arrived, best = [], 0.0
    for block in data.draw(st.permutations(blocks)):
        arrived += [block, block]  # a retried block arrives twice
        seen = certify_prefix(finished_prefix(arrived), SMALL, chosen=1)
        assert best <= seen.p_lower <= final.p_lower  # a claim once made stays
        best = seen.p_lower
        if seen.finished:
            assert seen == final
    assert seen == final


@settings(deadline=None, max_examples=30)
@given(st.floats(0.4, 1.0), st.integers(0, 2**32))
def test_claims_follow_from_every_look_by_hand(q, seed):
    votes = draws(np.random.default_rng(seed), q, SMALL.num_estimate)
    claim = certify_prefix(votes, SMALL, chosen=1)
    open_, bound = set(SMALL.radii), 0.0
    for t in (*range(16, 150, 16), 150):
        k = int(votes[:t].sum())
        bound = max(bound, lower_confidence(k, t, 0.9 * 0.01))
        for r in sorted(open_):
            p0 = probability_needed(r, 0.5)
            if bound >= p0 or float(log_futility_value(k, t, p0)) >= -np.log(0.01):
                open_.remove(r)
        if not open_:
            break
    if t == 150:
        bound = max(bound, clopper_pearson_lower(k, t, 0.1 * 0.01))
    assert (claim.k, claim.n) == (k, t)
    assert claim.p_lower == pytest.approx(bound, abs=1e-9)
    assert claim.certified_radii == tuple(r for r in SMALL.radii if claim.p_lower >= PHI(r / 0.5))


def test_blocks_behind_a_gap_wait():
    a, b = np.array([1, 2], np.uint16), np.array([3], np.uint16)
    assert finished_prefix([(2, b), (0, a)]).tolist() == [1, 2, 3]
    assert finished_prefix([(0, a), (3, b)]).tolist() == [1, 2]
    assert finished_prefix([(3, b)]).tolist() == []
    for blocks, reason in [
        ([(0, a), (0, a + 1)], "differ"),
        ([(0, a), (1, b)], "overlaps"),
        ([(-1, a)], "draw >= 0"),
    ]:
        with pytest.raises(ValueError, match=reason):
            finished_prefix(blocks)


def test_selection_stops_when_one_class_leads():
    votes = np.array([2] * 8 + [1] * 8 + [2] * 16 + [0] * 100, np.uint16)
    assert choose_class(votes[:16], num_classes=3) is None  # 8 : 8
    chosen = choose_class(votes, num_classes=3)
    assert (chosen.chosen, chosen.n0) == (2, 32)
    even = np.array([1, 0] * 60, np.uint16)
    assert choose_class(even[:99], num_classes=2) is None
    last = choose_class(even, num_classes=2)
    assert (last.chosen, last.n0) == (0, 100)  # ties to the lowest class


# How often claims fail, and what they cost


def agreeing(plan, q, *, num_streams, seed):
    """(S, J) agreeing draws at every look of many streams."""
    steps = np.diff(plan.looks, prepend=0)
    drawn = np.random.default_rng(seed).binomial(steps, q, size=(num_streams, len(steps)))
    return drawn.cumsum(axis=1)


@pytest.mark.parametrize("radius", [0.0, 0.25, 0.5])
def test_false_claims_are_as_rare_as_promised(radius):
    alpha, num = 0.05, 10_000
    plan = SequentialPlan(
        sigma=0.5, radii=(radius,), failure_prob=alpha, num_estimate=2000, look_every=20
    )
    (p0,) = plan.needed
    k = agreeing(plan, p0, num_streams=num, seed=7)  # the hardest truth for which a claim is false
    final = stats.binom.isf(FINAL_SHARE * alpha, 2000, p0) + 1  # exact bound at the last draw
    false = ((k >= plan.certify_from[0]).any(axis=1) | (k[:, -1] >= final)).mean()
    margin = 3.3 * np.sqrt(alpha * (1 - alpha) / num)  # one run in 2000 would exceed it by chance
    assert 0.2 * alpha < false <= alpha + margin
    # The control: looking as often with the bound that is made for one look is caught.
    single = stats.binom.isf(alpha, plan.looks, p0) + 1
    assert (k >= single).any(axis=1).mean() > 2 * alpha
    gave_up = (k <= plan.give_up_to[0]).any(axis=1).mean()
    assert gave_up <= plan.futility_prob + 3.3 * np.sqrt(0.01 / num)


def test_false_radii_at_any_time_are_as_rare_as_promised():
    alpha, num, q = 0.2, 300, 0.8
    plan = SequentialPlan(sigma=1.0, radii=(), failure_prob=alpha, num_estimate=240, look_every=8)
    rng, truth = np.random.default_rng(3), stats.norm.ppf(q)
    false = [certify_prefix(draws(rng, q, 240), plan, chosen=1).radius > truth for _ in range(num)]
    assert 0 < sum(false) <= stats.binom.ppf(0.9995, num, alpha)


@pytest.mark.parametrize(
    ("radius", "q", "mean"),
    [(0.25, 0.8, 326), (0.5, 0.75, 300), (0.5, 0.9, 628), (0.5, 0.95, 179), (1.0, 0.995, 819)],
)
def test_published_numbers_of_draws(radius, q, mean):
    plan = SequentialPlan(sigma=0.5, radii=(radius,), num_estimate=6400)  # none runs that long
    k = agreeing(plan, q, num_streams=4000, seed=11)
    decided = (k >= plan.certify_from[0]) | (k <= plan.give_up_to[0])
    used = plan.looks[decided.argmax(axis=1)]
    error = used.std() / np.sqrt(4000)
    # four standard errors of ours, twice the same for theirs, which had as many runs
    assert abs(used.mean() - mean) < 4 * np.sqrt(2) * error + 0.5


# Plans that can never certify


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"sigma": 0.0}, "certify.sigma"),
        ({"failure_prob": 0.5}, "certify.failure_prob"),
        ({"failure_prob": 0.0}, "certify.failure_prob"),
        ({"futility_prob": 1.0}, "certify.futility_prob"),
        ({"num_estimate": 0}, "certify.num_estimate"),
        ({"num_estimate": 12}, "certify.num_estimate"),
        ({"look_every": 0}, "certify.look_every"),
        ({"num_estimate": 10**12, "look_every": 64}, "certify.look_every"),
        ({"radii": (-0.1,)}, "certify.radii"),
        ({"radii": (0.5, 9.0)}, "certify.radii"),
    ],
)
def test_hopeless_plans_are_refused(changed, key):
    with pytest.raises(CasemateError) as caught:
        SequentialPlan(**({"sigma": 0.5, "radii": (0.1,), "num_estimate": 100} | changed))
    assert caught.value.key == key


@pytest.mark.parametrize("radii", [(), (0.75,), (1.5,)])
def test_a_refusal_names_the_draws_that_would_do(radii):
    small = {"sigma": 0.5, "radii": radii, "num_estimate": 12}
    with pytest.raises(CasemateError) as caught:
        SequentialPlan(**small | ({"num_estimate": 100} if radii else {}))
    needed = int(re.search(r"(?:to|use) (\d+)", caught.value.remedy)[1])
    plan = SequentialPlan(**small | {"num_estimate": needed})
    claim = certify_prefix(np.ones(needed, np.uint16), plan, chosen=1)
    assert claim.certified_radii == radii
    assert not claim.abstain
    with pytest.raises(CasemateError):
        SequentialPlan(**small | {"num_estimate": needed - 1})


def test_too_many_predictions_are_refused():
    with pytest.raises(ValueError, match="at most"):
        certify_prefix(np.ones(151, np.uint16), SMALL, chosen=1)
