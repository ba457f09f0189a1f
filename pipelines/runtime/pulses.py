"""What busy workers tell: how many units of a lease are finished, and model evaluations so far.

An actor that computes answers no call. A thread beside the work writes to Ray's own key-value
store, where the driver reads; a lease that ends soon writes nothing. Pulses are only shown: an
error ends the telling and nothing else.
"""

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from uuid import uuid4

from ray.experimental import internal_kv

from components.core.evaluations import EVALUATIONS
from pipelines.runtime.leases import Pulse

LOG = logging.getLogger("casemate.pulses")
PULSE_SECONDS = 1.5
READ_SECONDS = 2  # for an answer of the store
NAMESPACE = b"casemate"


class Teller:
    """Follows one lease; another thread asks for its pulse."""

    def __init__(self) -> None:
        self.num_done = 0
        self.began = self.before = EVALUATIONS.total

    def begin(self, num_done: int) -> None:
        """The next unit begins after so many."""
        self.num_done, self.before = num_done, EVALUATIONS.total

    def pulse(self) -> Pulse:
        now = EVALUATIONS.total
        return Pulse(self.num_done, now - self.before, now - self.began)


@contextmanager
def telling(key: str) -> Iterator[Teller]:
    """A teller whose pulses are under `key` until the block ends."""
    teller, over = Teller(), threading.Event()
    threading.Thread(target=_tell, args=(key.encode(), teller, over), daemon=True).start()
    try:
        yield teller
    finally:
        over.set()


def _tell(key: bytes, teller: Teller, over: threading.Event) -> None:
    store = internal_kv.internal_kv_get_gcs_client()
    written = False
    try:
        while not over.wait(PULSE_SECONDS):
            store.internal_kv_put(key, json.dumps(teller.pulse()).encode(), True, NAMESPACE)
            written = True
    except Exception:
        LOG.warning("progress inside units is not shown", exc_info=True)
    if written:
        _forget(key)


def _forget(key: bytes) -> None:
    with suppress(Exception):  # the cluster may be gone, and the entry with it
        internal_kv.internal_kv_get_gcs_client().internal_kv_del(key, False, NAMESPACE)


class Listener:
    """The driver's side of one call of the executor."""

    def __init__(self) -> None:
        self.prefix = f"pulse-{uuid4().hex}"  # other flows may run on this cluster
        self.heard, self.last, self.failed = float("-inf"), dict[int, Pulse](), False

    def key(self, number: int) -> str:
        """Where the pulses of a lease are."""
        return f"{self.prefix}-{number}"

    def pulses(self, numbers: Sequence[int]) -> Mapping[int, Pulse]:
        """The latest pulses of these leases; short ones have none."""
        now = time.monotonic()
        if not self.failed and now - self.heard >= PULSE_SECONDS:
            self.heard = now
            try:
                self.last = self._read(numbers)
            except Exception:
                self.failed = True
                LOG.warning("progress inside units is not shown", exc_info=True)
        return self.last

    def _read(self, numbers: Sequence[int]) -> dict[int, Pulse]:
        keys = {self.key(number).encode(): number for number in numbers}
        store = internal_kv.internal_kv_get_gcs_client()
        found = store.internal_kv_multi_get(list(keys), NAMESPACE, READ_SECONDS) if keys else {}
        return {keys[key]: Pulse(*json.loads(text)) for key, text in found.items()}

    def forget(self, number: int) -> None:
        """Remove what a dead worker has told."""
        _forget(self.key(number).encode())
