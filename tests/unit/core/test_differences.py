"""Differences of accuracies: exact coverage by enumeration, and symmetries."""

from itertools import product
from math import exp, lgamma, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.statistics import difference, paired_difference

COUNTS = st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


def verdicts(won: int, lost: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Items of which `won` are right now only, `lost` before only; others alternate."""
    now, before = (np.arange(n) % 2 == 0 for _ in range(2))
    now[:won], before[:won] = True, False
    now[won : won + lost], before[won : won + lost] = False, True
    return now, before


def probability(won: int, lost: int, n: int, p: float, q: float) -> float:
    """Of a trinomial with shares p won, q lost."""
    rest = n - won - lost
    ways = lgamma(n + 1) - lgamma(won + 1) - lgamma(lost + 1) - lgamma(rest + 1)
    return exp(ways + won * log(p) + lost * log(q) + rest * log(1 - p - q))


@pytest.mark.parametrize("n", [12, 24])
def test_the_paired_interval_covers_the_truth_in_95_of_100_samples(n):
    """All outcomes of a trinomial; 94 where nine of ten items or more change sides."""
    outcomes = [(w, v) for w in range(n + 1) for v in range(n + 1 - w)]
    found = {pair: paired_difference(*verdicts(*pair, n)) for pair in outcomes}
    shares = (0.01, 0.05, 0.2, 0.45)
    for p, q in [*product(shares, shares), (0.7, 0.2), (0.1, 0.85), (0.9, 0.05)]:
        held = sum(
            probability(*pair, n, p, q)
            for pair, d in found.items()
            if d["low"] - 1e-12 <= p - q <= d["high"] + 1e-12
        )
        assert held >= (0.95 if p + q < 0.89 else 0.94), (p, q)


def test_the_unpaired_interval_covers_the_truth_in_95_of_100_samples():
    n = 15
    found = {pair: difference(*pair, n=n, n_before=n) for pair in product(range(n + 1), repeat=2)}
    for p, q in product((0.02, 0.1, 0.3, 0.5, 0.8), repeat=2):
        pmf = [[_binomial(k, n, share) for k in range(n + 1)] for share in (p, q)]
        held = sum(
            pmf[0][k] * pmf[1][j]
            for (k, j), d in found.items()
            if d["low"] - 1e-12 <= p - q <= d["high"] + 1e-12
        )
        assert held >= 0.95, (p, q)


def _binomial(k: int, n: int, p: float) -> float:
    return exp(
        lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + k * log(p) + (n - k) * log(1 - p)
    )


@given(COUNTS, COUNTS)
def test_the_interval_holds_its_value_and_turns_with_its_sign(one, other):
    (n, k), (m, j) = one, other
    there, back = difference(k, j, n=n, n_before=m), difference(j, k, n=m, n_before=n)
    assert -1 <= there["low"] <= there["value"] <= there["high"] <= 1
    assert there["value"] == pytest.approx(k / n - j / m)
    assert there["low"] == pytest.approx(-back["high"])


def test_items_that_never_changed_sides_leave_room_for_rare_changes():
    same = np.arange(100) % 3 == 0
    d = paired_difference(same, same)
    assert d["value"] == 0
    assert d["low"] == -d["high"]
    assert 0.02 < d["high"] < 0.06  # 3.6 of 100 is the exact bound of either share


def test_pairing_tells_apart_what_two_samples_cannot():
    """10 items won, none lost, of 100: a clear gain; 55 against 45 of 100 alone is none."""
    assert paired_difference(*verdicts(10, 0, 100))["low"] > 0
    assert difference(55, 45, n=100, n_before=100)["low"] < 0


@pytest.mark.parametrize(
    ("now", "before"),
    [([1, 0], [True, False]), ([True], [True, False]), ([], []), ([[True]], [[True]])],
)
def test_anything_but_equal_rows_of_verdicts_is_refused(now, before):
    kinds = [np.array(v, dtype=None if v else bool) for v in (now, before)]
    with pytest.raises(ValueError, match="expected"):
        paired_difference(*kinds)
