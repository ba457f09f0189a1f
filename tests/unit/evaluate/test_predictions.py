"""Per-item results: accuracy, calibration, classes and comparisons against loops over items."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.core.statistics import mcnemar_p_value, paired_difference
from components.evaluate.calibration import calibration_error, measurements, reliability
from components.evaluate.predictions import (
    SCHEMA,
    Predictions,
    accuracy_measurements,
    aligned,
    class_accuracy,
    comparison_measurements,
    joined,
)
from components.evaluate.settings import CalibrationSettings


def random_predictions(seed=0, num_items=40, num_classes=7):
    rng = np.random.default_rng(seed)
    return Predictions(
        tuple(f"i{row:03d}" for row in range(num_items)),
        np.arange(num_items) % num_classes,
        rng.integers(0, num_classes, num_items),
        rng.random(num_items) < 0.8,
        rng.random(num_items).astype(np.float32).astype(np.float64),
    )


def test_logits_become_rows():
    logits = torch.tensor([[0.0, 3.0, 1, 2, 2, 2, 2], [1.0, 1, 1, 1, 1, 1, 1]])
    found = Predictions.of_logits(["a", "b"], torch.tensor([6, 4]), logits)
    assert found.predictions.tolist() == [1, 0]
    assert found.top5.tolist() == [True, True]  # classes 1 3 4 5 6, and 0 1 2 3 4
    assert found.correct.tolist() == [False, False]
    weights = [math.exp(value) for value in logits[0].tolist()]
    assert found.confidence.tolist() == pytest.approx([weights[1] / sum(weights), 1 / 7])
    worse = Predictions.of_logits(["a", "b"], torch.tensor([2, 5]), logits)
    assert worse.top5.tolist() == [False, False]
    few = Predictions.of_logits(["a"], torch.tensor([1]), torch.tensor([[1.0, 0.0]]))
    assert few.top5.tolist() == [True]


def test_tables_keep_everything_and_parts_join_in_any_order():
    whole = random_predictions()
    assert whole.table().schema == SCHEMA
    parts = [whole.rows(np.arange(start, start + 10)) for start in (20, 0, 30, 10)]
    again = joined(parts)
    assert again.table().equals(whole.table())
    assert again.confidence.tolist() == whole.confidence.tolist()
    with pytest.raises(ValueError, match="an item occurs twice"):
        joined([parts[0], parts[0]])


def test_accuracy_and_classes_count_items():
    found = random_predictions()
    top1, top5 = accuracy_measurements(found, item="clean")
    assert top1.value == sum(found.correct.tolist()) / 40
    assert top5.value == sum(found.top5.tolist()) / 40
    rows = class_accuracy(found, [*"abcdefg", "empty"])
    assert [row.item for row in rows] == [*"abcdefg", "empty"]
    for label, row in enumerate(rows[:7]):
        own = [
            p == label for p, y in zip(found.predictions, found.labels, strict=True) if y == label
        ]
        assert (row.value, row.n) == (sum(own) / len(own), len(own))
    assert rows[7].value is None
    with pytest.raises(ValueError, match="below 3"):
        class_accuracy(found, "abc")


def slow_bins(found, num_bins):
    """Guo et al. 2017: interval by interval, item by item."""
    table = []
    for number in range(num_bins):
        low, high = number / num_bins, (number + 1) / num_bins
        own = [
            (c, bool(p == y))
            for c, p, y in zip(found.confidence, found.predictions, found.labels, strict=True)
            if low < c <= high or (number == 0 and c == 0)
        ]
        table.append(own)
    return table


@given(
    st.lists(
        st.tuples(
            st.one_of(st.floats(0, 1), st.integers(0, 15).map(lambda n: n / 15)), st.booleans()
        ),
        min_size=1,
        max_size=40,
    )
)
def test_calibration_is_that_of_its_definition(cases):
    confidence = np.array([c for c, _ in cases])
    right = np.array([r for _, r in cases])
    zeros = np.zeros(len(cases), np.int64)
    ids = tuple(map(str, range(len(cases))))
    found = Predictions(ids, zeros, np.where(right, 0, 1), right, confidence)
    table = reliability(found, num_bins=15)
    expected = slow_bins(found, 15)
    assert [row.n for row in table] == [len(own) for own in expected]
    error = 0.0
    for row, own in zip(table, expected, strict=True):
        if own:
            accuracy = sum(r for _, r in own) / len(own)
            mean = math.fsum(c for c, _ in own) / len(own)
            assert (row.accuracy, row.confidence) == (accuracy, pytest.approx(mean))
            error += len(own) / len(cases) * abs(accuracy - mean)
        else:
            assert row.accuracy is row.confidence is row.lo95 is None
    assert calibration_error(table) == pytest.approx(error, abs=1e-12)


def test_calibration_by_hand():
    """Two of four right at 0.9: 0.4; one of one right at 0.6: 0.4; weights 4/5 and 1/5."""
    found = Predictions(
        tuple("abcde"),
        np.zeros(5, np.int64),
        np.array([0, 0, 1, 1, 0]),
        np.ones(5, bool),
        np.array([0.9, 0.9, 0.9, 0.9, 0.6]),
    )
    assert CalibrationSettings().num_bins == 15
    rows = measurements(found, item="clean", num_bins=15)
    assert (rows[0].metric, rows[0].n) == ("ece", 5)
    assert rows[0].value == pytest.approx(0.4)
    by_bin = {(row.level, row.metric): row for row in rows[1:]}
    assert len(by_bin) == 30
    assert by_bin[14, "bin_accuracy"].value == 0.5  # (13/15, 14/15]
    assert by_bin[9, "bin_accuracy"].value == 1  # (8/15, 9/15] holds 0.6
    assert by_bin[1, "bin_accuracy"].flags == ("null: no confidence in (0.000, 0.067]",)
    wrong = Predictions(
        ("a",), np.zeros(1, int), np.zeros(1, int), np.ones(1, bool), np.array([1.1])
    )
    with pytest.raises(ValueError, match="in \\[0, 1\\]"):
        reliability(wrong, num_bins=15)
    (empty,) = measurements(found.rows(np.zeros(5, bool)), item="clean", num_bins=15)
    assert (empty.value, empty.flags) == (None, ("null: no items",))


def test_two_models_are_compared_on_the_same_items_in_any_order():
    one, other = random_predictions(1), random_predictions(2)
    mixed = other.rows(np.random.default_rng(3).permutation(40))
    found = comparison_measurements(one, mixed, rival="b", item="clean")
    assert found == comparison_measurements(one, other, rival="b", item="clean")
    difference, p_value = found
    gap = paired_difference(one.correct, other.correct)
    ends = (gap["value"], gap["low"], gap["high"])
    assert (difference.value, difference.lo95, difference.hi95) == ends
    assert p_value.value == mcnemar_p_value(one.correct, other.correct)
    assert (difference.metric, p_value.metric) == ("difference_to/b", "mcnemar_p/b")
    assert (difference.n, p_value.n) == (40, 40)


def test_p_values_of_equal_models_are_rarely_small():
    """Each below alpha in at most a share alpha of all outcomes of eight discordant items."""
    values = []
    for coins in product([False, True], repeat=8):
        one = np.array(coins)
        values.append(mcnemar_p_value(one, ~one))
    for alpha in (0.01, 0.05, 0.3):
        assert np.mean(np.array(values) <= alpha) <= alpha


def test_other_items_or_labels_are_not_compared():
    one = random_predictions(1)
    with pytest.raises(CasemateError, match="i039 is in one of two results only"):
        aligned(one, one.rows(np.arange(39)))
    moved = Predictions(one.item_ids, one.labels[::-1], one.predictions, one.top5, one.confidence)
    with pytest.raises(CasemateError, match="has two labels"):
        aligned(one, moved)
