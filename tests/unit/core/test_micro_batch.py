"""The measured number of rows: the last that gains, within memory."""

import pytest
import torch

from components.certify.patch.voters import item_units
from components.core import micro_batch
from components.core.micro_batch import fastest_micro_batch


@pytest.fixture
def clock(monkeypatch):
    """Time that only passes of `run` spend."""
    now = [0.0]
    monkeypatch.setattr(micro_batch.time, "process_time", lambda: now[0])
    monkeypatch.setattr(micro_batch.time, "perf_counter", lambda: now[0])
    return now


def chosen(clock, seconds, sizes=(10, 20, 40, 80), most=1000):
    def run(size):
        if size > most:
            raise torch.OutOfMemoryError
        clock[0] += seconds(size)

    return fastest_micro_batch(run, sizes, device="cpu")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (lambda size: 1.0, 80),  # a device that is not full
        (lambda size: size, 10),  # full with the smallest
        (lambda size: 10 + size, 80),  # 2, 1.5, 1.25 and 1.125 a row
        (lambda size: 0.5 + size, 10),  # 1.05, 1.025: too little
        (lambda size: max(40, size), 40),
    ],
)
def test_more_rows_must_pay(clock, seconds, expected):
    assert chosen(clock, seconds) == expected


def test_what_does_not_fit_ends_the_search(clock):
    assert chosen(clock, lambda size: 1.0, most=50) == 40


def test_units_fill_a_measured_pass_and_stay_as_they_were_otherwise():
    sizes = {
        rows: [unit.num_items for unit in item_units(100, num_votes=4, rows=rows)]
        for rows in (0, 64, 256, 9999)
    }
    assert sizes[0] == sizes[64] == [20] * 5
    assert sizes[256] == sizes[9999] == [64, 36]
    assert [unit.num_items for unit in item_units(3, num_votes=2000, rows=512)] == [1, 1, 1]
