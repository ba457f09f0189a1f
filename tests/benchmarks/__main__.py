"""`make bench`: all benchmarks, each in a process of its own, and one table of their promises.

    python -m tests.benchmarks [NAME ...]     all of them, or those named
    python -m tests.benchmarks --gpu          those that compute on a device, on the first GPU

A row is one limit: the peer's figure, ours, their ratio. What the benchmarks print besides goes to
stderr. Limits are those of CPUs; on a GPU a row shows what `gpu_figures.toml` expects there. To add
a benchmark, write its module, which prints rows by `table.promise`, and add a line to BENCHMARKS.
Exit codes: 0 all limits are kept, 1 one is not or a benchmark failed, 2 there is no GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.table import DEVICE_ENV, ROW

Row = dict[str, Any]
FIGURES = Path(__file__).with_name("gpu_figures.toml")
COLUMNS = ("benchmark", "limit", "peer", "ours", "ratio", "")


class Benchmark(NamedTuple):
    """A module of this folder; `on_gpu`: its models and images follow `table.device`."""

    name: str
    on_gpu: bool = False


BENCHMARKS = (
    Benchmark("executor"),
    Benchmark("leases"),
    Benchmark("input"),
    Benchmark("memory"),
    Benchmark("attacks", on_gpu=True),
    Benchmark("autoattack", on_gpu=True),
    Benchmark("training", on_gpu=True),
    Benchmark("sampling", on_gpu=True),
    Benchmark("patches", on_gpu=True),
    Benchmark("workers"),
    Benchmark("sequential"),
    Benchmark("votes"),
    Benchmark("corruptions"),
    Benchmark("spatial"),
    Benchmark("lesions", on_gpu=True),
    Benchmark("storage"),
    Benchmark("storage_flow"),
)


def rows_of(name: str, *, device: str) -> Iterator[Row]:
    """Run one benchmark; yields its rows, and one more if it failed for another reason."""
    command, broken = [sys.executable, "-m", f"tests.benchmarks.{name}"], False
    env = {**os.environ, DEVICE_ENV: device}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if row := _row(line):
                broken |= not row["kept"]
                yield {**row, "benchmark": name}
            else:
                print(line, end="", file=sys.stderr, flush=True)
    if process.returncode and not broken:
        failed = {"limit": "", "peer": "", "ours": "", "ratio": None, "kept": False}
        yield {ROW: f"ended with exit code {process.returncode}", **failed, "benchmark": name}


def _row(line: str) -> Row | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and ROW in found else None


def table(rows: Sequence[Row], expected: Mapping[str, float] | None) -> Iterator[str]:
    """Lines of the table; `expected`: the ratios of a GPU, which replace the limits of a CPU."""
    cells = [COLUMNS, *(_cells(row, expected) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    for line in cells:
        padded = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        yield "  ".join(padded).rstrip()


def _cells(row: Row, expected: Mapping[str, float] | None) -> tuple[str, ...]:
    title = f"{row['benchmark']}: {row[ROW]}"
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:g}"
    if expected is None:
        limit, verdict = row["limit"] or "-", "" if row["kept"] else "not kept"
    else:
        known = expected.get(title)
        limit, verdict = "not measured yet" if known is None else f"about {known:g}", ""
    return (title, limit, row["peer"] or "-", row["ours"] or "-", ratio, verdict)


def expected_on(name: str) -> Mapping[str, float]:
    """The ratios to expect on this GPU, by row."""
    known: Mapping[str, float] = tomllib.loads(FIGURES.read_text(encoding="utf-8")).get(name, {})
    return known


def as_figures(rows: Iterable[Row], name: str) -> Iterator[str]:
    """What `gpu_figures.toml` would hold after these rows."""
    yield f"[{json.dumps(name)}]"
    for row in rows:
        if row["ratio"] is not None:
            yield f"{json.dumps(row['benchmark'] + ': ' + row[ROW])} = {row['ratio']}"


def gpu_name() -> str | None:
    """The name of the first GPU; None: there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--gpu", action="store_true", help="compute on the first GPU")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in names]:
        parser.error(f"{unknown[0]} is not a benchmark; choose of {', '.join(names)}")
    name = gpu_name() if given.gpu else None
    if given.gpu and name is None:
        print("benchmarks: --gpu: torch sees no GPU on this machine", file=sys.stderr)
        return 2
    chosen = [
        one.name
        for one in BENCHMARKS
        if (one.name in given.names if given.names else one.on_gpu or not given.gpu)
    ]
    device = "cuda" if given.gpu else "cpu"
    rows = [row for one in chosen for row in rows_of(one, device=device)]
    print("\n".join(table(rows, expected_on(name) if name else None)))
    if name:
        print(f"\nFor {FIGURES.name}:\n" + "\n".join(as_figures(rows, name)))
        return int(any(row["ratio"] is None for row in rows))
    return int(not all(row["kept"] for row in rows))


class _AsWritten(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of this module's docstring."""


if __name__ == "__main__":
    sys.exit(main())
