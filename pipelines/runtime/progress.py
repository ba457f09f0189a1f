"""Progress of stages: bars on a terminal, one line a minute elsewhere, and a small file.

Lines on stderr, where it is not a terminal (`parse_line` reads them):

    progress certify.l2: 120/1000 items, 3.20/s, eta 275 s, failures 0, workers 3/4, waiting 0 s

`rate` and `eta` are `?` before anything is finished, `workers` is `ready/wanted`, or `-` for stages
whose workers belong to Ray. Figures of the stage may follow after a semicolon. The line of a stage
comes once a minute, also when nothing was finished in between.

`unfinished/progress.json` in the folder of a step holds the same, replaced as a whole every few
seconds: step, phase, done, under_way, evaluations (of models), total, unit, rate (per second),
eta_seconds, failures, workers, workers_wanted, waiting_seconds, note, updated (seconds since 1970);
null where unknown. It is removed with the other scratch files when the step is finished.
"""

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from components.core.control_characters import visible
from components.core.files import write_text
from components.core.secrets import redact
from pipelines.runtime import bars

console = Console(stderr=True)

FILE_NAME = "progress.json"
LINE_SECONDS = 60.0
FILE_SECONDS = 3.0
TICK_SECONDS = 0.5
RATE_SECONDS = 300.0  # the rate is that of the last minutes

LINE = re.compile(
    r"progress (?P<step>[^:]+): (?P<done>[\d.]+)/(?P<total>[\d.]+) (?P<unit>[^,]+), "
    r"(?P<rate>[\d.?]+)/s, eta (?P<eta_seconds>[\d?]+) s, failures (?P<failures>\d+), "
    r"workers (?:-|(?P<workers>\d+)/(?P<workers_wanted>\d+)), waiting (?P<waiting_seconds>\d+) s"
    r"(?:; (?P<note>.*))?$"
)


@dataclass(slots=True, kw_only=True)
class Status:
    """How far a stage is."""

    step: str
    unit: str
    done: float
    total: float
    under_way: float = 0.0  # computed by workers that have not returned it
    evaluations: int = 0  # of models in this start; 0: not counted
    phase: str = ""  # of a stage with several, e.g. one per attack
    rate: float | None = None  # units per second
    eta_seconds: float | None = None
    failures: int = 0  # of units; each is tried again on other workers
    workers: int | None = None  # that are ready; None: Ray places them
    workers_wanted: int | None = None
    waiting_seconds: float = 0.0  # since when no worker is ready
    draws: int = 0
    images_per_second: float | None = None
    note: str = ""

    def line(self) -> str:
        """The status as one line."""
        rate = "?" if self.rate is None else f"{self.rate:.2f}"
        eta = "?" if self.eta_seconds is None else f"{self.eta_seconds:.0f}"
        workers = "-" if self.workers is None else f"{self.workers}/{self.workers_wanted}"
        note = "; ".join(filter(None, [self.phase, bars.evaluations(self), self.note]))
        done = f"{bars.number(self.done)}/{bars.number(self.total)} {self.unit}"
        return (
            f"progress {self.step}: {done}, "
            f"{rate}/s, eta {eta} s, failures {self.failures}, workers {workers}, "
            f"waiting {self.waiting_seconds:.0f} s" + (f"; {note}" if note else "")
        )


def parse_line(text: str) -> dict[str, str | float | None] | None:
    """The fields of a progress line, by the names in progress.json; None for any other line."""
    if (found := LINE.search(text)) is None:
        return None
    words = {"step", "unit", "note"}
    return {
        name: value if name in words else float(value) if value and value != "?" else None
        for name, value in found.groupdict().items()
    }


class Bar:
    """The progress of one stage, shown by whatever is there to show it."""

    def __init__(
        self, status: Status, *, file: Path | None, watch: Callable[[Status], None] | None
    ) -> None:
        self.status = status
        self._file, self._watch = file, watch
        self._seen: deque[tuple[float, float]] = deque()  # (time, done), to compute the rate
        self._line_at = time.monotonic() + LINE_SECONDS
        self._file_at = 0.0
        self._lock, self._open = threading.Lock(), True

    def advance(self, count: float = 1) -> None:
        self.at(self.status.done + count)

    def at(self, completed: float, note: str = "") -> None:
        """Show `completed` of the total; the first call does not count for the rate."""
        self.status.done, self.status.note = completed, note
        if not self._seen:
            self._seen.append((time.monotonic(), completed))

    def tick(self, now: float) -> None:
        """Update rate and ETA; print the line and write the file if they are due."""
        with self._lock:
            if not self._open:
                return  # the folder of the file may be gone
            self._measure(now)
            if now >= self._file_at:
                self._file_at = now + FILE_SECONDS
                self._record()
            if now >= self._line_at:
                self._line_at = now + LINE_SECONDS
                if not console.is_terminal:
                    say(self.status.line())

    def close(self) -> None:
        """Record the last state; the file stays if the stage has failed."""
        with self._lock:
            self._open = False
            self._measure(time.monotonic())
            self._record()
        _DISPLAY.leave(self)

    def _measure(self, now: float) -> None:
        status, seen = self.status, self._seen
        if not seen:
            return
        reached = status.done + status.under_way
        seen.append((now, reached))
        while len(seen) > 2 and now - seen[1][0] > RATE_SECONDS:
            seen.popleft()
        began, first = seen[0]
        if reached > first and now > began:
            status.rate = (reached - first) / (now - began)
            status.eta_seconds = max(0.0, status.total - reached) / status.rate

    def _record(self) -> None:
        if self._watch:
            self._watch(self.status)
        if self._file is None:
            return
        values = asdict(self.status) | {"updated": round(time.time(), 3)}
        with suppress(OSError):  # a stage does not fail for its progress: the next write may work
            write_text(self._file, json.dumps(values), sync=False)


class _Display:
    """The one live display: a terminal has room for one, and trainings run side by side."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bars: list[Bar] = []
        self.live: Live | None = None
        self.over = threading.Event()

    def join(self, bar: Bar) -> None:
        with self.lock:
            self.bars = [*self.bars, bar]
            if len(self.bars) == 1:
                self.over = threading.Event()
                threading.Thread(target=self._watch, args=(self.over,), daemon=True).start()
                if console.is_terminal:
                    self.live = Live(get_renderable=self._picture, console=console, transient=True)
                    self.live.start()
            if self.live:
                self.live.refresh()  # at once

    def leave(self, bar: Bar) -> None:
        with self.lock:
            if bar not in self.bars:
                return
            self.bars = [other for other in self.bars if other is not bar]
            if not self.bars:
                self.over.set()
                if self.live:
                    self.live.stop()
                    self.live = None

    def _picture(self) -> RenderableType:
        return bars.picture([bar.status for bar in self.bars], width=console.width)

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(TICK_SECONDS):
            for bar in self.bars:
                bar.tick(time.monotonic())


_DISPLAY = _Display()


@contextmanager
def bar(
    label: str,
    *,
    total: float,
    unit: str,
    done: float = 0,
    phase: str = "",
    file: Path | None = None,
    watch: Callable[[Status], None] | None = None,
) -> Iterator[Bar]:
    """A progress bar for `total` units of which `done` were finished by an earlier run.

    The state is also written to `file` and given to `watch`, every few seconds.
    """
    status = Status(step=label, unit=unit, done=done, total=total, phase=phase)
    shown = Bar(status, file=file, watch=watch)
    _DISPLAY.join(shown)
    try:
        yield shown
    finally:
        shown.close()


@contextmanager
def follow(
    label: str,
    *,
    total: float,
    unit: str,
    look: Callable[[Bar], None],
    every: float = 0.5,
    file: Path | None = None,
    watch: Callable[[Status], None] | None = None,
) -> Iterator[None]:
    """A bar for work of another process: `look` updates it every `every` seconds and at the end.

    An error in `look` is raised at the end.
    """
    over = threading.Event()

    def follow_bar() -> None:
        with bar(label, total=total, unit=unit, file=file, watch=watch) as shown:
            while not over.wait(every):
                look(shown)
            look(shown)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(follow_bar)
        try:
            yield
        finally:
            over.set()
        watching.result()


@contextmanager
def busy(text: str) -> Iterator[None]:
    """Show on a terminal that something is done that cannot be counted."""
    if not console.is_terminal or _DISPLAY.live:
        yield
        return
    with console.status(visible(redact(text)), spinner_style="dim"):
        yield


def started(step: str) -> None:
    """Say in a log that a step begins; on a terminal its bar does."""
    if not console.is_terminal:
        say(f"{step:<16} started")


def say(text: str) -> None:
    """Print one plain line on stderr, also where it is not a terminal."""
    console.print(visible(redact(text)), highlight=False, markup=False, soft_wrap=True)
