"""Rows of the table of `make bench`: a limit, the peer's figure, ours, and the ratio.

A benchmark calls `promise` once for each limit that it checks: it prints the row as one JSON line,
which `python -m tests.benchmarks` collects from all benchmarks. Run alone, a benchmark prints the
same lines among its own.

Benchmarks that also run on a GPU take their device and their clock from here.
"""

import json
import os
import time
from functools import cache

import torch

DEVICE_ENV = "CASEMATE_BENCH_DEVICE"
ROW = "promise"  # key of the JSON lines that the table collects
DIGITS = 3


def promise(
    what: str,
    *,
    ratio: float,
    at_most: float | None = None,
    at_least: float | None = None,
    peer: str = "",
    ours: str = "",
    kept: bool = True,
) -> bool:
    """Print a row; returns whether the ratio keeps its limit, if there is one, and `kept` holds.

    `peer` and `ours` are figures with their unit, e.g. `torchattacks 0.412 s`; without a peer the
    ratio is the figure itself. Without a limit the row only informs.
    """
    kept &= at_most is None or ratio <= at_most
    kept &= at_least is None or ratio >= at_least
    limits = {"<=": at_most, ">=": at_least}
    limit = " ".join(f"{sign} {value:g}" for sign, value in limits.items() if value is not None)
    row = {ROW: what, "limit": limit, "peer": peer, "ours": ours}
    print(json.dumps({**row, "ratio": round(ratio, DIGITS), "kept": bool(kept)}), flush=True)
    return bool(kept)


@cache
def device() -> torch.device:
    """Where the benchmark computes: the CPU, or a GPU with `--gpu`."""
    return torch.device(os.environ.get(DEVICE_ENV, "cpu"))


def clock() -> float:
    """Processor time of this process; on a GPU the wall time after all its kernels."""
    if device().type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()
