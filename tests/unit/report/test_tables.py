"""CSV: whatever is in a table can be read back from its file."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.report.content import Accuracy, Column, Table
from components.report.tables import FORMULA, to_csv

# Control characters and formulas are changed: tests/unit/hostile. Everything else must survive.
TEXT = st.text(st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"))).filter(
    lambda text: not text.startswith(FORMULA)
)
SHARES = st.none() | st.builds(
    Accuracy, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.integers(1, 10**9)
)
ROWS = st.lists(st.tuples(TEXT, st.floats(allow_nan=False), st.none() | st.integers(), SHARES))


@given(ROWS)
def test_csv_round_trip_keeps_every_digit(rows):
    columns = (
        Column("name"),
        Column("x", "number"),
        Column("n", "number", "px"),
        Column("c", "proven"),
    )
    text = to_csv(Table("t", columns, tuple(rows)))
    header, *read = csv.reader(io.StringIO(text, newline=""))
    assert header == ["name", "x", "n (px)", "c value", "c low", "c high", "c num_items"]
    back = []
    for name, x, n, *parts in read:
        share = Accuracy(*map(float, parts[:3]), int(parts[3])) if any(parts) else None
        back.append((name, float(x), int(n) if n else None, share))
    assert back == rows


def test_a_plain_number_in_an_accuracy_column_is_refused():
    with pytest.raises(ValueError, match="holds accuracies"):
        to_csv(Table("t", (Column("c", "proven"),), ((0.5,),)))
