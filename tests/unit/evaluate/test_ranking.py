"""Ranks and ties: independent of the order of results, symmetric, and those of the exact tests."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from components.evaluate.ranking import board_of, standings
from components.evaluate.verdicts import Verdicts

ITEMS = 40


def verdicts(correct, **changes) -> Verdicts:
    values = np.asarray(correct)
    ids = tuple(f"i{i:03}" for i in range(len(values)))
    fields = {
        **{"base": "robust.linf", "budget": "8/255", "kind": "attacked", "item_ids": ids},
        **{"labels": (0,) * len(values), "correct": values, "dataset": "d" * 64},
        **{"conditions": {"attacks": [{"kind": "fgsm"}]}},
    }
    return Verdicts(**(fields | changes))


def first(count: int, size: int = ITEMS) -> np.ndarray:
    return np.arange(size) < count


boards = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.integers(0, 2**ITEMS - 1).map(
        lambda bits: np.array([bits >> i & 1 for i in range(ITEMS)], dtype=np.bool_)
    ),
    min_size=1,
    max_size=6,
)


@given(boards, st.randoms())
def test_nothing_depends_on_the_order_of_results(rows, random):
    names = list(rows)
    random.shuffle(names)
    given_order = standings({name: verdicts(own) for name, own in rows.items()})
    shuffled = standings({name: verdicts(rows[name]) for name in names})
    assert given_order == shuffled


@given(boards)
def test_ties_are_symmetric_and_ranks_count_what_is_better(rows):
    found = {s.name: s for s in standings({n: verdicts(own) for n, own in rows.items()})}
    for one, other in combinations(found.values(), 2):
        assert (one.name in other.ties) == (other.name in one.ties)
        if one.share.value == other.share.value:
            assert one.rank == other.rank
            assert one.name in other.ties  # equal shares are never significantly apart
    for own in found.values():
        better = sum(rows[n].sum() > rows[own.name].sum() for n in rows)
        assert own.rank == 1 + better
        assert own.best <= own.rank <= own.worst
        assert own.worst - own.best == len(own.ties)
        assert own.name not in own.ties
    assert sorted(found.values(), key=lambda s: s.rank)[0].rank == 1


@given(st.integers(0, ITEMS), st.integers(0, ITEMS))
def test_two_results_tie_exactly_if_the_binomial_test_says_so(one, other):
    found = standings({"one": verdicts(first(one)), "other": verdicts(first(other))})
    gap = abs(one - other)
    apart = gap > 0 and binomtest(gap, gap).pvalue < 0.05
    assert [bool(s.ties) for s in found] == [not apart] * 2
    assert found[0].share.value >= found[1].share.value


def test_all_pairs_share_the_error_of_a_board():
    """6 of 6 discordant items: p = 0.031 alone, three times that on a board of three."""
    alone = {"a": verdicts(first(20)), "b": verdicts(first(14))}
    assert not standings(alone)[0].ties
    both = standings({**alone, "c": verdicts(first(17))})
    assert both[0].ties == ("c", "b")


def test_results_that_do_not_count_come_last_and_change_nothing():
    rows = {"a": verdicts(first(30)), "b": verdicts(first(10))}
    found = standings(rows, {"x": verdicts(first(40)), "y": verdicts(first(39))})
    assert [s.name for s in found] == ["a", "b", "x", "y"]
    assert found[:2] == standings(rows)
    assert {(s.rank, s.best, s.worst, s.ties) for s in found[2:]} == {(None, None, None, ())}


def test_means_over_variants_are_ranked_by_the_paired_t_test():
    shares = np.linspace(0, 1, ITEMS)
    found = standings({"low": verdicts(shares * 0.5), "high": verdicts(shares)})
    assert [(s.name, s.rank, s.ties) for s in found] == [("high", 1, ()), ("low", 2, ())]


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": "e" * 64},
        {"labels": (1,) * ITEMS},
        {"item_ids": tuple(f"j{i:03}" for i in range(ITEMS))},
        {"images": ("f" * 64,) * ITEMS},
        {"base": "robust.l2"},
        {"budget": "4/255"},
        {"kind": "measured"},
        {"conditions": {"attacks": [{"kind": "pgd"}]}},
        {"conditions": {"attacks": [{"kind": "fgsm"}], "surrogate": "abc"}},
    ],
)
def test_what_differs_is_on_another_board(changes):
    own = verdicts(first(20))
    assert board_of(own) == board_of(verdicts(first(3), place="elsewhere", doubt="suspect"))
    assert board_of(own) != board_of(verdicts(first(20), **changes))
    assert board_of(own) != board_of(verdicts(first(20, ITEMS - 1)))


def test_what_a_dataset_settles_is_no_protocol_of_its_own():
    """A step that was copied without its data no longer knows how images were resized."""
    conditions = {"attacks": [{"kind": "fgsm"}], "preprocessing, fit": "pad"}
    assert board_of(verdicts(first(3), conditions=conditions)) == board_of(verdicts(first(3)))
