"""The table of `make bench`: its rows, its verdicts, and the refusal of a GPU that is not there."""

import json
import re
import sys

import pytest
import torch

from tests.benchmarks import __main__ as bench
from tests.benchmarks.table import ROW, promise


@pytest.mark.parametrize("one", bench.BENCHMARKS, ids=lambda one: one.name)
def test_a_benchmark_of_the_list_is_a_module_that_prints_rows(one):
    text = (bench.FIGURES.parent / f"{one.name}.py").read_text(encoding="utf-8")
    assert "promise(" in text
    assert 'if __name__ == "__main__":' in text
    assert one.on_gpu == ("device()" in text)


@pytest.mark.parametrize(
    ("ratio", "limits", "kept"),
    [
        (1.0, {"at_most": 1.0}, True),
        (1.01, {"at_most": 1.0}, False),
        (2.9, {"at_least": 3}, False),
        (3.0, {"at_least": 3, "kept": False}, False),
        (7.0, {}, True),
    ],
)
def test_a_row_keeps_its_limit(ratio, limits, kept, capsys):
    assert promise("row", ratio=ratio, peer="loop 2 s", **limits) is kept
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row[ROW], row["ratio"], row["kept"]) == ("row", ratio, kept)


def test_the_table_has_limits_on_a_cpu_and_expectations_on_a_gpu(capsys):
    promise("ours / loop", ratio=1.2, at_most=1.0, peer="loop 2 s", ours="2.4 s")
    row = {**json.loads(capsys.readouterr().out), "benchmark": "attacks"}
    head, line = bench.table([row], None)
    assert head.split() == ["benchmark", "limit", "peer", "ours", "ratio"]
    cells = ["attacks: ours / loop", "<= 1", "loop 2 s", "2.4 s", "1.2", "not kept"]
    assert re.split("  +", line) == cells
    _, open_ = bench.table([row], {})
    assert "not measured yet" in open_
    assert "<= 1" not in open_
    _, known = bench.table([row], {"attacks: ours / loop": 0.7})
    assert "about 0.7" in known
    assert list(bench.as_figures([row], "X 1")) == ['["X 1"]', '"attacks: ours / loop" = 1.2']


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--gpu"])
    assert bench.main() == 2
    assert capsys.readouterr().err.count("\n") == 1
