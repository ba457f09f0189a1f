"""Progress bars on stderr if it is a terminal, and plain lines."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from components.core.secrets import redact

console = Console(stderr=True)


class Bar:
    """One line with rate and time left; silent where stderr is not a terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, count: int = 1) -> None:
        self._progress.advance(self._task, count)

    def at(self, completed: float, note: str = "") -> None:
        self._progress.update(self._task, completed=completed, note=note)


class _Display:
    """The one live display: a terminal has room for one, and trainings run side by side."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_bars = 0
        self.progress: Progress | None = None

    def join(self) -> Progress:
        with self.lock:
            if self.progress is None:
                self.progress = _new_progress()
                self.progress.start()
            self.num_bars += 1
            return self.progress

    def leave(self, progress: Progress, task: TaskID) -> None:
        with self.lock:
            progress.remove_task(task)
            self.num_bars -= 1
            if self.num_bars == 0:
                progress.stop()
                self.progress = None


_DISPLAY = _Display()


@contextmanager
def bar(label: str, *, total: float, unit: str, done: int = 0) -> Iterator[Bar]:
    """A progress bar for `total` units of which `done` were finished by an earlier run."""
    progress = _DISPLAY.join()
    task = progress.add_task(label, total=total, completed=done, unit=unit, note="", rate="")
    try:
        yield Bar(progress, task)
    finally:
        _DISPLAY.leave(progress, task)


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
    label: str, *, total: float, unit: str, look: Callable[[Bar], None], every: float = 0.5
) -> Iterator[None]:
    """A bar for work of another process: `look` updates it every `every` seconds and at the end.

    An error in `look` is raised at the end.
    """
    over = threading.Event()

    def watch() -> None:
        with bar(label, total=total, unit=unit) as shown:
            while not over.wait(every):
                look(shown)
            look(shown)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
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
    console.print(redact(text), highlight=False, markup=False, soft_wrap=True)
