"""When, where and how long the steps of a run took: a page differs each time in this alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.report.content import Cell, Column, Fact, Link, Table


@dataclass(frozen=True, slots=True)
class StepExecution:
    """The execution of a step as its manifest records it; older manifests have none."""

    step: str
    started: str  # UTC, 2026-01-31T12:00:00Z
    seconds: float | None
    machine: str
    run_id: str
    page: str | None  # of the run on an MLflow server

    @classmethod
    def read(
        cls, step: str, recorded: Mapping[str, object], *, run_id: str, page: str | None
    ) -> "StepExecution":
        """From the manifest's `execution`."""
        seconds = recorded.get("seconds")
        return cls(
            step,
            str(recorded.get("started", "")),
            float(seconds) if isinstance(seconds, int | float) else None,
            str(recorded.get("machine", "")),
            run_id,
            page,
        )


def duration(seconds: float) -> str:
    """0.4 s, 12 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _minute(started: str) -> str:
    return started[:16].replace("T", " ")


def facts(steps: Sequence[StepExecution]) -> tuple[Fact, ...]:
    """Date, duration and hardware of the whole run."""
    known = [step for step in steps if step.started]
    if not known:
        return ()
    machines = dict.fromkeys(step.machine for step in known)
    total = sum(step.seconds or 0 for step in known)
    return (
        Fact("Date", f"{_minute(min(step.started for step in known))} UTC"),
        Fact("Duration", f"{duration(total)} in {len(known)} steps"),
        Fact("Hardware", "; ".join(machines)),
    )


def steps_table(steps: Sequence[StepExecution]) -> Table | None:
    """One row per step, with a link to its run; None where nothing is recorded."""
    if not steps:
        return None
    columns = (
        *(Column("Step"), Column("started", "number", "UTC"), Column("took", "number")),
        *(Column("on"), Column("MLflow run")),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            step.step,
            _minute(step.started) or None,
            None if step.seconds is None else duration(step.seconds),
            step.machine or None,
            Link(step.run_id, step.page) if step.page else step.run_id,
        )
        for step in steps
    ]
    return Table("steps", columns, tuple(rows), title="Steps")
