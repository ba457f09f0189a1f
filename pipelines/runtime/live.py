"""Live metrics of a running step in MLflow: `live/done`, and accuracies so far with their bands.

A stage with several phases has them under the phase's name: `live/pgd/main/robust_accuracy`. Their
steps are finished units (items, where these are counted), so a resumed stage continues them. They
are sent from a thread, at most every half minute, and may be lost: a failed call is logged once,
the next ones come later and later. They never change the final metrics of a step.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from components.core.units import SoFar

LOG = logging.getLogger("casemate.live")
LIVE_SECONDS = 30.0
LONGEST_PAUSE = 600.0
END_SECONDS = 5.0  # for a call that is under way when the stage ends

Send = Callable[[Mapping[str, float], int], None]  # values, step


def metrics_of(so_far: SoFar, *, done: float, failures: int, phase: str) -> dict[str, float]:
    """Progress, and every share with the ends of its band, by metric name."""
    prefix = f"live/{phase}" if phase else "live"
    values = {f"{prefix}/done": done, f"{prefix}/failures": float(failures)}
    for name, share in so_far.shares.items():
        low, high = share.band()
        values |= {
            f"{prefix}/{name}": share.value,
            f"{prefix}/{name}_low": low,
            f"{prefix}/{name}_high": high,
            f"{prefix}/{name}_items": float(share.seen),
        }
    return values


class LiveMetrics:
    """Sends the newest values in a thread of its own: a slow server does not slow the stage."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.pause = LIVE_SECONDS
        self.due = time.monotonic() + LIVE_SECONDS
        self.sender: threading.Thread | None = None

    def is_due(self) -> bool:
        """Whether it is time for new values; false while a call is under way."""
        under_way = self.sender is not None and self.sender.is_alive()
        return time.monotonic() >= self.due and not under_way

    def offer(self, values: Mapping[str, float], step: int) -> None:
        """Send these values at this step."""
        self.due = time.monotonic() + self.pause
        self.sender = threading.Thread(target=self._send, args=(values, step), daemon=True)
        self.sender.start()

    def _send(self, values: Mapping[str, float], step: int) -> None:
        try:
            self.send(values, step)
        except Exception as error:
            if self.pause == LIVE_SECONDS:
                LOG.warning("live metrics are not logged (%s)", type(error).__name__)
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
            self.due = time.monotonic() + self.pause
        else:
            self.pause = LIVE_SECONDS

    def close(self) -> None:
        if self.sender is not None:
            self.sender.join(END_SECONDS)


@contextmanager
def live_metrics(send: Send | None) -> Iterator[LiveMetrics | None]:
    """Live metrics for the time of a stage; None where there is nothing to send them to."""
    live = LiveMetrics(send) if send else None
    try:
        yield live
    finally:
        if live:
            live.close()
