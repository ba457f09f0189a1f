"""Progress of stages: bars on a terminal, one line a minute elsewhere, and a small file.

Lines on stderr, where it is not a terminal (`parse_line` reads them):

    progress certify.l2: 120/1000 items, 3.20/s, eta 275 s, failures 0, workers 3/4, waiting 0 s

`rate` and `eta` are `?` before anything is finished, `workers` is `ready/wanted`, or `-` for stages
whose workers belong to Ray. Figures of the stage may follow after a semicolon. The line of a stage
comes once a minute, also when nothing was finished in between.

`unfinished/progress.json` in the folder of a step holds the same, replaced as a whole every few
seconds: step, phase, done, total, unit, rate (per second), eta_seconds, failures, workers,
workers_wanted, waiting_seconds, note, updated (seconds since 1970); null where unknown. It is
removed with the other scratch files when the step is finished.
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

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from components.core.control_characters import visible
from components.core.files import write_text
from components.core.secrets import redact

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
        note = "; ".join(filter(None, [self.phase, self.note]))
        return (
            f"progress {self.step}: {_number(self.done)}/{_number(self.total)} {self.unit}, "
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


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


class Bar:
    """The progress of one stage, shown by whatever is there to show it."""

    def __init__(
        self,
        progress: Progress,
        status: Status,
        *,
        file: Path | None,
        watch: Callable[[Status], None] | None,
    ) -> None:
        self.status = status
        self._progress, self._file, self._watch = progress, file, watch
        self._task: TaskID = progress.add_task(
            status.step, total=status.total, unit=status.unit, note="", rate=""
        )
        progress.update(self._task, completed=status.done)
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
        self._progress.update(self._task, completed=completed, note=note)

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
        _DISPLAY.leave(self, self._task)

    def _measure(self, now: float) -> None:
        status, seen = self.status, self._seen
        if not seen:
            return
        seen.append((now, status.done))
        while len(seen) > 2 and now - seen[1][0] > RATE_SECONDS:
            seen.popleft()
        began, first = seen[0]
        if status.done > first and now > began:
            status.rate = (status.done - first) / (now - began)
            status.eta_seconds = max(0.0, status.total - status.done) / status.rate

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
        self.progress: Progress | None = None
        self.over = threading.Event()

    def join(self, make: Callable[[Progress], Bar]) -> Bar:
        with self.lock:
            if self.progress is None:
                self.progress = _new_progress()
                self.progress.start()
                self.over = threading.Event()
                threading.Thread(target=self._watch, args=(self.over,), daemon=True).start()
            bar = make(self.progress)
            self.bars.append(bar)
            return bar

    def leave(self, bar: Bar, task: TaskID) -> None:
        with self.lock:
            if self.progress is None or bar not in self.bars:
                return
            self.progress.remove_task(task)
            self.bars.remove(bar)
            if not self.bars:
                self.progress.stop()
                self.progress = None
                self.over.set()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(TICK_SECONDS):
            with self.lock:
                bars = list(self.bars)
            for bar in bars:
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
    shown = _DISPLAY.join(lambda display: Bar(display, status, file=file, watch=watch))
    try:
        yield shown
    finally:
        shown.close()


def _new_progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return _RatedProgress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )


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


class _RatedProgress(Progress):
    """Adds `12.3/s` to every task."""

    def get_renderables(self):  # type: ignore[no-untyped-def]
        for task in self.tasks:
            task.fields["rate"] = f"{task.speed:.1f}/s" if task.speed else ""
        yield from super().get_renderables()


def say(text: str) -> None:
    """Print one plain line on stderr, also where it is not a terminal."""
    console.print(visible(redact(text)), highlight=False, markup=False, soft_wrap=True)
