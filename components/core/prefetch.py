"""Results made in a thread ahead of their use."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def made_ahead(make: Callable[[T], R], of: Iterable[T], *, in_thread: bool) -> Iterator[R]:
    """`make(x)` for each x in order; `in_thread`: the next is made while the caller uses one.

    At most one result waits. An error is raised where its result is due.
    """
    if not in_thread:
        yield from map(make, of)
        return
    waiting: Future[R] | None = None
    try:
        for x in of:
            due, waiting = waiting, _thread().submit(make, x)
            if due is not None:
                yield due.result()
        if waiting is not None:
            yield waiting.result()
    finally:
        if waiting is not None:
            waiting.cancel()


def cores_left(used: int) -> bool:
    """Whether this process may run on more cores than it computes on."""
    return num_cores() > used


def num_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _thread() -> ThreadPoolExecutor:
    """One thread for the whole process: starting one costs as much as a small batch of noise."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="casemate-ahead")


os.register_at_fork(after_in_child=_thread.cache_clear)  # a forked process has no threads
