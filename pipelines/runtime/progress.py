"""Progress on a terminal's stderr, and nothing anywhere else."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(stderr=True)


class Bar:
    """One bar with rate and time left; silent where stderr is no terminal."""

    def __init__(self, progress: Progress, task: int) -> None:
        self._progress = progress
        self._task = progress.tasks[task].id

    def advance(self, count: int = 1) -> None:
        self._progress.advance(self._task, count)

    def at(self, completed: float, note: str = "") -> None:
        self._progress.update(self._task, completed=completed, note=note)


@contextmanager
def bar(label: str, *, total: float, unit: str, done: int = 0) -> Iterator[Bar]:
    """A progress bar for `total` units of which `done` were finished by an earlier run."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with _RatedProgress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as p:
        task = p.add_task(label, total=total, completed=done, note="", rate="")
        yield Bar(p, task)


@contextmanager
def follow(
    label: str, *, total: float, unit: str, look: Callable[[Bar], None], every: float = 0.5
) -> Iterator[None]:
    """A bar for work that another process does: `look` reads how far it is, now and then.

    It looks once more when the work is over. An error in `look` is raised at the end.
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
    """One plain line to a person: stderr, also where it is no terminal."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
