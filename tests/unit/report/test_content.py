"""Numbers as text: a page may understate what is proven, never overstate it."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.core.statistics import accuracy
from components.report.content import Accuracy, Chapter, Column, Content, Table


def counted(held: int, num_items: int) -> Accuracy:
    return Accuracy.parse(accuracy(np.arange(num_items) < held), where="test")


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_proven_percent_is_the_exact_share_rounded_down(case):
    held, num_items = case
    shown = Fraction(counted(held, num_items).percent("proven").removesuffix("%"))
    exact = Fraction(100 * held, num_items)
    assert shown <= exact < shown + Fraction(1, 10)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_printed_interval_covers_the_exact_one(case):
    share = counted(*case)
    low, high = (float(end) for end in share.interval().split(" to "))
    assert low <= 100 * share.low
    assert high >= 100 * share.high
    assert high - low <= 100 * (share.high - share.low) + 0.2 + 1e-9


@pytest.mark.parametrize(
    ("held", "num_items", "proven", "measured"),
    [(57, 100, "57.0%", "57.00%"), (2, 3, "66.6%", "66.67%"), (999, 1000, "99.9%", "99.90%"),
     (1999, 2000, "99.9%", "99.95%"), (0, 5, "0.0%", "0.00%"), (5, 5, "100.0%", "100.00%")],
)  # fmt: skip
def test_percent_examples(held, num_items, proven, measured):
    share = counted(held, num_items)
    assert share.percent("proven") == proven
    assert share.percent("measured") == measured


@pytest.mark.parametrize(
    "raw",
    [{}, {"value": 0.5, "low": 0.4, "high": 0.6},
     {"value": "x", "low": 0, "high": 1, "num_items": 1},
     {"value": 0.5, "low": 0.6, "high": 0.7, "num_items": 9},
     {"value": float("nan"), "low": 0, "high": 1, "num_items": 9},
     {"value": 0.5, "low": 0.4, "high": 0.6, "num_items": 0}],
)  # fmt: skip
def test_what_is_no_accuracy_is_refused_with_its_source(raw):
    with pytest.raises(CasemateError, match=r"attack\.linf"):
        Accuracy.parse(raw, where="attack.linf")


def test_a_ragged_table_and_two_tables_of_one_name_are_refused():
    with pytest.raises(ValueError, match="2 cells, 1 columns"):
        Table("t", (Column("a"),), ((1, 2),))
    table = Table("t", (Column("a"),), ((1,),))
    page = Content("", "", (), table, (), (Chapter("s", "S", tables=(table,)),), "")
    with pytest.raises(ValueError, match="share a name"):
        page.tables()
