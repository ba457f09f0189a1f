"""What Ray Tune runs for a trial: epochs with their reports and checkpoints, in order."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypedDict

from ray import tune

from components.core.errors import CasemateError
from pipelines.recipe.trials import Values
from pipelines.stages.train.worker import STATE
from pipelines.stages.tune.group import TrialGroup
from pipelines.stages.tune.training import (
    EPOCHS,
    MISTAKE,
    SCORE,
    STOPPED,
    Point,
    TrialJob,
    TrialTraining,
)


class TrialConfig(TypedDict):
    """Config of a trial: Ray passes mappings, and schedulers change the point."""

    job: TrialJob
    point: Point


class Training(Protocol):
    """A trial, trained here or by workers of its own."""

    @property
    def finished(self) -> bool: ...

    def run_epoch(self) -> dict[str, Any]:
        """The report of one epoch, or of why training cannot continue."""
        ...

    def state(self) -> bytes:
        """The checkpoint."""
        ...


def trial(config: TrialConfig) -> None:
    """What Ray runs. A user's mistake is reported: Ray would retry after an error."""
    try:
        train(config["job"], config["point"]["values"])
    except CasemateError as error:
        mistake = [error.key, str(error.value), error.remedy]
        tune.report({EPOCHS: 0, SCORE: 0.0, MISTAKE: mistake})


def train(job: TrialJob, values: Values) -> None:
    """Train to the last epoch; every epoch is a report with its checkpoint."""
    with open_training(job, values, saved_state(tune.get_checkpoint())) as training:
        while not training.finished:
            report = training.run_epoch()
            if STOPPED in report:
                tune.report(report)
                return
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / STATE).write_bytes(training.state())
                tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))


@contextmanager
def open_training(job: TrialJob, values: Values, saved: bytes | None) -> Iterator[Training]:
    """The training of a trial: in this process, or on as many workers as a training has."""
    if job["recipe"]["cluster"]["train_workers"] == 1:
        yield TrialTraining(job, values, saved)
        return
    group = TrialGroup(job, values, saved)
    try:
        group.start()
        yield group
    finally:
        group.end()


def saved_state(checkpoint: tune.Checkpoint | None) -> bytes | None:
    """The state to resume from; None: train from the start.

    A kill right after Ray removed an old checkpoint leaves a search that still names it; that
    trial is trained again, with the same result.
    """
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        path = Path(folder) / STATE
        return path.read_bytes() if path.exists() else None
