"""One trial: the recipe with other values, trained in one process from its last checkpoint."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch
from ray import tune

from components.core.errors import CasemateError
from components.core.types import Labels
from components.data.prepared import PreparedDataset
from components.models.pixels import PixelModel
from components.train.objectives.base import Batch
from components.train.session import Row, Session, TrainingStoppedError
from components.train.validation import AttackPredictions
from pipelines.recipe import load as recipes
from pipelines.recipe.schema.recipe import MAIN
from pipelines.recipe.trials import Values, trial_recipe, tuned
from pipelines.stages.train.session import make_session
from pipelines.stages.train.worker import STATE

EPOCHS, SCORE = "epochs", "score"  # what schedulers and searches look at
MISTAKE = "mistake"  # of the user: ends the search
LOGGED = ("loss", "train_accuracy", "val_accuracy", "val_robust_accuracy", "lr", "eps", "seconds")


class RecordedAttack:
    """An attack that records which items of the last pass were robust, as a string of 0 and 1.

    Trials attack the same items, so their differences can be judged item by item.
    """

    def __init__(self, attack: AttackPredictions) -> None:
        self.attack, self.robust = attack, ""

    def predictions(self, model: PixelModel, batch: Batch) -> Labels:
        """Classes of the attacked images. Batches of a pass come in order, from step 0."""
        found = self.attack.predictions(model, batch)
        verdicts = "".join("01"[right] for right in (found == batch.labels).tolist())
        self.robust = (self.robust if batch.step else "") + verdicts
        return found


class Point(TypedDict):
    """The number of a trial and the recipe values that it tries."""

    trial: int
    values: Values


class TrialJob(TypedDict):
    """The input that all trials of a search share: plain values, which Ray Tune can store."""

    recipe: dict[str, Any]  # resolved, with absolute paths
    dataset: str
    num_threads: int
    device: str


class TrialConfig(TypedDict):
    """Config of a trial: Ray passes mappings, and schedulers change the point."""

    job: TrialJob
    point: Point


def trial(config: TrialConfig) -> None:
    """What Ray runs. A user's mistake is reported: Ray would retry after an error."""
    try:
        train(config["job"], config["point"]["values"])
    except CasemateError as error:
        mistake = [error.key, str(error.value), error.remedy]
        tune.report({EPOCHS: 0, SCORE: 0.0, MISTAKE: mistake})


def train(job: TrialJob, values: Values) -> None:
    """Train to the last epoch; every epoch is a report with its checkpoint.

    The checkpoint records which values trained which epochs: a scheduler that copies trials and
    changes their values leaves a schedule, and it is read from there.
    """
    torch.set_num_threads(job["num_threads"])
    base = recipes.parse(job["recipe"], source="recipe")
    section, dataset = tuned(base), PreparedDataset.open(Path(job["dataset"]))
    saved = saved_state(tune.get_checkpoint())
    session = make_session(
        trial_recipe(base, values),
        MAIN,
        dataset,
        train=dataset.load("train", limit=section.train_items),
        device=torch.device(job["device"]),
        fresh=saved is None,
    )
    recorded = RecordedAttack(session.val_attack) if session.val_attack else None
    session.val_attack = recorded
    lineage = Lineage()
    if saved:
        lineage = Lineage(saved.pop("schedule"), saved.pop("standing"))
        continue_with_own_settings(session, saved)
    lineage.note_values(session.next_epoch, values)
    while not session.finished:
        try:
            row = session.run_epoch()
        except TrainingStoppedError as error:  # a result, too: a restart would stop again
            tune.report({EPOCHS: session.next_epoch, SCORE: 0.0, "stopped": str(error)})
            return
        if recorded and session.selected_epoch == session.next_epoch - 1:
            lineage.robust = recorded.robust
        _report(session, row, lineage, metric=section.metric)


@dataclass(slots=True)
class Lineage:
    """What a trial keeps besides its session; its keys in checkpoints are those of `state`."""

    schedule: list[dict[str, Any]] = field(default_factory=list)  # since which epoch which values
    robust: str = ""  # per attacked item, of the epoch that is kept

    def note_values(self, epoch: int, values: Values) -> None:
        if not self.schedule or self.schedule[-1]["values"] != values:
            self.schedule.append({"epoch": epoch, "values": values})

    def state(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "standing": self.robust}


def _report(session: Session, row: Row, lineage: Lineage, *, metric: str) -> None:
    kept = session.history[session.selected_epoch]
    report = {
        **row,
        EPOCHS: session.next_epoch,
        SCORE: kept[metric],
        "kept": kept,
        "finished": session.finished,
        **lineage.state(),
        # All epochs: Ray copies its own log of a trial to the storage later than its state.
        "history": [{key: done[key] for key in LOGGED} for done in session.history],
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.save(session.state() | lineage.state(), Path(folder) / STATE)
        tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))


def saved_state(checkpoint: tune.Checkpoint | None) -> dict[str, Any] | None:
    """The state to resume from; None: train from the start.

    A kill right after Ray removed an old checkpoint leaves a search that still names it; that
    trial is trained again, with the same result.
    """
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        path = Path(folder) / STATE
        if not path.exists():
            return None
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        return state


def continue_with_own_settings(session: Session, state: dict[str, Any]) -> None:
    """Restore a session, but keep this trial's weight decay and other optimiser settings.

    An optimiser's state brings the settings of the trial that it comes from.
    """
    groups = session.updater.optimizer.param_groups
    own = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    session.restore(state)
    for group, settings in zip(session.updater.optimizer.param_groups, own, strict=True):
        group.update(settings)
