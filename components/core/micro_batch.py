"""Rows of a forward pass, measured where a recipe says `micro_batch: auto`.

The first worker of a step measures once; results record the size, because rounding follows the
shape of a pass. Only speed is looked at: any size gives valid results.
"""

import time
from collections.abc import Callable, Sequence

import torch

GAIN = 1.05  # a size must be so much faster, row by row, than the best smaller one
ROUNDS = 3  # the best of them counts: other processes can only slow a round down


def fastest_micro_batch(run: Callable[[int], object], sizes: Sequence[int], *, device: str) -> int:
    """The size, of ascending ones, from which on more rows gain nothing or do not fit in memory.

    `run(n)` makes one pass of n rows; the smallest size must fit.
    """
    best, least = sizes[0], _seconds(run, sizes[0], device) / sizes[0]
    for size in sizes[1:]:
        try:
            seconds = _seconds(run, size, device) / size
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
        if seconds * GAIN > least:
            break
        best, least = size, seconds
    return best


def _seconds(run: Callable[[int], object], size: int, device: str) -> float:
    """Shortest time of some passes after a first one."""
    on_cpu = device == "cpu"
    clock = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
    run(size)
    times = []
    for _ in range(ROUNDS):
        _finish(device)
        began = clock()
        run(size)
        _finish(device)
        times.append(clock() - began)
    return min(times)


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
