"""One trial: the recipe with other values, trained in one process from its last checkpoint."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import tune

from components.core.errors import CasemateError
from components.core.types import Labels
from components.data.prepared import PreparedDataset
from components.models.pixels import PixelModel
from components.train.objectives.base import Batch
from components.train.session import Session, TrainingStoppedError
from components.train.validation import TrainingAttack, ValidationAttack
from pipelines.recipe import load as recipes
from pipelines.recipe.schema.recipe import MAIN
from pipelines.recipe.trials import trial_recipe, tuned
from pipelines.stages.train.stage import make_session
from pipelines.stages.train.worker import STATE

EPOCHS, SCORE = "epochs", "score"  # what schedulers and searches look at
MISTAKE = "mistake"  # of the user: ends the search
LOGGED = ("loss", "train_accuracy", "val_accuracy", "val_robust_accuracy", "lr", "eps", "seconds")


class RecordedAttack:
    """An attack that remembers which items of the last pass stood it, as a text of 0 and 1.

    Trials attack the same items, so their differences can be judged item by item.
    """

    def __init__(self, attack: ValidationAttack | TrainingAttack) -> None:
        self.attack, self.standing = attack, ""

    def predictions(self, model: PixelModel, batch: Batch) -> Labels:
        """The classes that the attack leaves. Batches of a pass come in order, from step 0."""
        found = self.attack.predictions(model, batch)
        verdicts = "".join("01"[right] for right in (found == batch.labels).tolist())
        self.standing = (self.standing if batch.step else "") + verdicts
        return found


def trial(config: dict[str, Any]) -> None:
    """What Ray runs. A user's mistake is reported: as an error it would be tried again."""
    try:
        train(config)
    except CasemateError as error:
        mistake = [error.key, str(error.value), error.remedy]
        tune.report({EPOCHS: 0, SCORE: 0.0, MISTAKE: mistake})


def train(config: dict[str, Any]) -> None:
    """Train to the last epoch; every epoch is a report with its checkpoint.

    The checkpoint knows which values trained which epochs: a scheduler that copies trials and
    changes their values leaves a schedule, and it is read from there.
    """
    torch.set_num_threads(config["num_threads"])
    base = recipes.parse(config["recipe"], source="recipe")
    values, section = config["point"]["values"], tuned(base)
    dataset = PreparedDataset.open(Path(config["dataset"]))
    data = dataset.load("train", limit=section.train_items)
    saved = saved_state(tune.get_checkpoint())
    session = make_session(
        trial_recipe(base, values),
        MAIN,
        dataset,
        train=data,
        device=torch.device(config["device"]),
        fresh=saved is None,
    )
    recorded = RecordedAttack(session.val_attack) if session.val_attack else None
    session.val_attack = recorded or session.val_attack  # type: ignore[assignment]
    schedule: list[dict[str, Any]] = []
    standing = ""  # of the epoch that is kept
    if saved:
        schedule, standing = saved.pop("schedule"), saved.pop("standing")
        continue_with_own_settings(session, saved)
    if not schedule or schedule[-1]["values"] != values:
        schedule.append({"epoch": session.next_epoch, "values": values})
    while not session.finished:
        try:
            row = session.run_epoch()
        except TrainingStoppedError as error:  # a result, too: started again it would stop again
            tune.report({EPOCHS: session.next_epoch, SCORE: 0.0, "stopped": str(error)})
            return
        kept = session.history[session.selected_epoch]
        if recorded and kept is session.history[-1]:
            standing = recorded.standing
        report = {
            **row,
            EPOCHS: session.next_epoch,
            SCORE: kept[section.metric],
            "kept": kept,
            "finished": session.finished,
            "standing": standing,
            "schedule": schedule,
            # All epochs: Ray copies its own log of a trial to the storage later than its state.
            "history": [{key: done[key] for key in LOGGED} for done in session.history],
        }
        with tempfile.TemporaryDirectory() as folder:
            lineage = {"schedule": schedule, "standing": standing}
            torch.save(session.state() | lineage, Path(folder) / STATE)
            tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))


def saved_state(checkpoint: tune.Checkpoint | None) -> dict[str, Any] | None:
    """The state to go on from.

    None: from the start. A kill right after Ray removed an old checkpoint leaves a search that
    still names it; that trial is trained again, with the same result.
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
