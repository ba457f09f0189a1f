"""How progress looks on a terminal: for each stage two lines that fit, however narrow it is.

    attack.linf           ━━━━━━━━━╸━━━━━━━━━   120/500 items   3.2/s   0:01:58
      square: 0.612 robust so far

Step, bar, count, rate and time left are always there; the bar takes the room that is left over,
and what does not fit of the second line is cut off.
"""

from collections.abc import Sequence
from typing import Protocol

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

COUNT, RATE, LEFT = 26, 9, 8  # columns, without the space between them
WIDEST_NAME = 24
WIDEST_BAR = 40
NARROWEST_BAR = 8


class Shown(Protocol):
    """What is shown of a stage; None: not known yet."""

    step: str
    unit: str
    done: float
    total: float
    under_way: float
    evaluations: int
    phase: str
    note: str
    rate: float | None
    eta_seconds: float | None
    failures: int
    workers: int | None
    workers_wanted: int | None
    waiting_seconds: float


def picture(stages: Sequence[Shown], *, width: int) -> RenderableType:
    """All stages that are at work, below each other."""
    lines: list[RenderableType] = []
    longest = max((len(stage.step) for stage in stages), default=0)
    for stage in stages:
        lines.append(_line(stage, width, name=min(longest, WIDEST_NAME)))
        if note := note_of(stage):
            lines.append(Text(f"  {note}", style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def note_of(stage: Shown) -> str:
    """What else is known: the phase, failures, missing workers, figures of the stage."""
    known = stage.workers is not None
    wait = f"waiting for workers since {stage.waiting_seconds:.0f} s"
    parts = [
        stage.phase,
        wait if known and stage.waiting_seconds >= 1 else "",
        f"{stage.failures} failed, tried again" if stage.failures else "",
        f"{stage.workers}/{stage.workers_wanted} workers" if known else "",
        evaluations(stage),
        stage.note,
    ]
    return "; ".join(filter(None, parts))


def evaluations(stage: Shown) -> str:
    """Model evaluations, which move while long units do not end."""
    return f"{stage.evaluations:,} evaluations" if stage.evaluations else ""


def number(value: float) -> str:
    """A count; halves of epochs have a decimal."""
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def rate_of(per_second: float | None) -> str:
    """Units per second, per minute or per hour, whichever can be read."""
    if per_second is None or per_second <= 0:
        return "?/s"
    for factor, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if per_second * factor >= 1 or unit == "h":
            value = per_second * factor
            return f"{value:.1f}/{unit}" if value < 1000 else f"{value:.0f}/{unit}"
    raise AssertionError(per_second)


def time_left(seconds: float | None) -> str:
    """Hours, minutes and seconds; from a hundred hours on days and hours."""
    if seconds is None:
        return "?:??:??"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{rest:02}"


def _line(stage: Shown, width: int, *, name: int) -> RenderableType:
    """One line of fixed columns; only the bar gives way, then the name of the step."""
    fixed = COUNT + RATE + LEFT + 4
    name = max(4, min(name, width - fixed - NARROWEST_BAR))
    line = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    line.add_column(width=name, no_wrap=True, overflow="ellipsis")
    line.add_column(width=max(NARROWEST_BAR, min(WIDEST_BAR, width - fixed - name)))
    for columns in (COUNT, RATE, LEFT):
        line.add_column(width=columns, no_wrap=True, justify="right", overflow="ellipsis")
    count = f"{number(stage.done)}/{number(stage.total)} {stage.unit}"
    bar = ProgressBar(total=max(stage.total, 1e-9), completed=stage.done + stage.under_way)
    line.add_row(Text(stage.step), bar, count, rate_of(stage.rate), time_left(stage.eta_seconds))
    return line
