"""Which run writes which steps: one at a time writes a step, readers need no lock.

What readers have opened does not change: files are named by their content.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from pipelines.runtime.locks import TTL, Lock, LockedError
from pipelines.runtime.store import Store

AFTER_LOSS = TTL + 10.0  # seconds after which the lock of a lost machine has expired
IN_TURN = 600.0  # seconds that a process waits for others that do the same


@contextmanager
def hold(store: Store, steps: Iterable[str], *, wait: float = 0.0) -> Iterator[Mapping[str, Lock]]:
    """Hold the locks of steps, by their keys; a run that writes other steps may go on beside."""
    with ExitStack() as stack:
        held = {step: Lock(store, step, wait=wait) for step in sorted(set(steps))}
        for step, lock in held.items():
            try:
                stack.enter_context(lock)
            except LockedError as error:
                remedy = error.remedy.replace("is held by", "is in use by another run:")
                raise LockedError(store.where(step), remedy) from error
        yield held


@contextmanager
def in_turn(store: Store, name: str) -> Iterator[None]:
    """Wait for other processes that do the same, then go on alone."""
    with Lock(store, name, wait=IN_TURN):
        yield
