"""PREDICT from counts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.certify.l2.predict import lead_p_value, predict_counts

PUBLISHED = (
    (60, 40, 0.0568879336), (66, 34, 0.0017899304), (67, 33, 0.0008737198),
    (10, 0, 0.001953125), (11, 0, 0.0009765625),
)  # fmt: skip


def counts(*values):
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(("top", "other", "p_value"), PUBLISHED)
def test_published_prediction_p_values(top, other, p_value):
    # 1e-10: the values are printed with ten decimals
    assert predict_counts(counts(other, top), alpha=p_value + 1e-10) == 1
    assert predict_counts(counts(other, top), alpha=p_value - 1e-10) == -1


@pytest.mark.parametrize(
    ("n", "smallest"), [(20, 18), (100, 67), (1000, 553), (10000, 5166), (100000, 50521)]
)
def test_smallest_top_count_that_predicts(n, smallest):
    assert predict_counts(counts(n - smallest, smallest), alpha=0.001) == 1
    assert predict_counts(counts(n - smallest + 1, smallest - 1), alpha=0.001) == -1


def test_prediction_compares_the_two_leaders_only():
    assert predict_counts(counts(40, 0, 11), alpha=0.001) == 0
    assert predict_counts(counts(5, 5), alpha=0.9) == -1  # a tie is never significant


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=5).filter(any))
def test_the_p_value_is_the_sum_of_both_tails_of_fair_coins(votes):
    leader, p_value = lead_p_value(counts(*votes))
    assert leader == votes.index(max(votes))  # ties to the lowest class
    top, second = sorted(votes, reverse=True)[:2]
    n = top + second
    row = [1]  # Pascal's triangle: no library has a say
    for _ in range(n):
        row = [1, *(a + b for a, b in pairwise(row)), 1]
    tails = sum(row[top:]) + sum(row[: second + 1])
    assert p_value == pytest.approx(min(1, tails / 2**n), rel=1e-12)


def test_a_wrong_answer_is_as_rare_as_promised():
    # Classes 0 and 1 are nearly even, so every answer 1 is wrong.
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(60, [0.401, 0.399, 0.2], size=400)
    answers = [predict_counts(row, alpha=0.05) for row in drawn]
    # Either class is wrong about half as often as the two-sided test fails.
    assert 0 < answers.count(1) <= 0.05 * 400
    assert answers.count(0) > 0  # the test would notice a rule that never answers


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="at least"):
        predict_counts(counts(0, 0), alpha=0.1)
    with pytest.raises(ValueError, match="at least"):
        predict_counts(counts(5), alpha=0.1)
