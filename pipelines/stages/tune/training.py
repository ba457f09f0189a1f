"""The training of a trial on one worker: the recipe with other values, from its last checkpoint."""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from components.core import arithmetic
from components.core.folders import folder_at
from components.core.types import Labels
from components.data.prepared import PreparedDataset
from components.models.pixels import PixelModel
from components.train.feed import Feeding, Worker
from components.train.objectives.base import Batch
from components.train.passes import arithmetic_on
from components.train.session import Row, Session, TrainingStoppedError
from components.train.sharding import shard
from components.train.tally import Total
from components.train.validation import BATCH, AttackPredictions
from pipelines.recipe import load as recipes
from pipelines.recipe.schema.recipe import MAIN, Recipe
from pipelines.recipe.trials import Values, trial_recipe, tuned
from pipelines.runtime.devices import device_name, worker_device
from pipelines.stages.train.session import make_session, training_split
from pipelines.stages.train.worker import all_reduce

EPOCHS, SCORE = "epochs", "score"  # what schedulers and searches look at
MISTAKE = "mistake"  # of the user: ends the search
STOPPED = "stopped"  # why a training cannot continue
LOGGED = ("loss", "train_accuracy", "val_accuracy", "val_robust_accuracy", "lr", "eps", "seconds")


class RecordedAttack:
    """An attack that records which items of a pass were robust.

    Trials attack the same items, so their differences can be judged item by item.
    """

    def __init__(self, attack: AttackPredictions) -> None:
        self.attack = attack
        self._found: dict[int, Tensor] = {}  # by batch, of this worker's share

    def predictions(self, model: PixelModel, batch: Batch) -> Labels:
        """Classes of the attacked images."""
        found = self.attack.predictions(model, batch)
        self._found[batch.step] = found == batch.labels
        return found

    def robust(self, num_items: int, total: Total) -> str:
        """A 0 or 1 for every item of the pass on all workers, which all must call it."""
        verdicts = torch.zeros(num_items, dtype=torch.float64)
        for step, right in self._found.items():
            verdicts[step * BATCH : step * BATCH + len(right)] = right.double().cpu()
        return "".join("01"[round(right)] for right in total(verdicts).tolist())


class Point(TypedDict):
    """The number of a trial and the recipe values that it tries."""

    trial: int
    values: Values


class TrialJob(TypedDict):
    """The input that all trials of a search share: plain values, which Ray Tune can store."""

    recipe: dict[str, Any]  # resolved, with absolute paths
    dataset: str
    num_threads: int


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


class TrialTraining:
    """The training of a trial on one of its workers, from its last checkpoint.

    The checkpoint records which values trained which epochs: a scheduler that copies trials and
    changes their values leaves a schedule, and it is read from there.
    """

    def __init__(
        self,
        job: TrialJob,
        values: Values,
        saved: bytes | None,
        *,
        worker: Worker = Worker(),  # noqa: B008 - frozen
    ) -> None:
        torch.set_num_threads(job["num_threads"])
        base = recipes.parse(job["recipe"], source="recipe")
        section, dataset = tuned(base), PreparedDataset.open(folder_at(job["dataset"]))
        recipe, kind = trial_recipe(base, values), worker_device()
        assert recipe.train is not None
        arithmetic.use(arithmetic_on(recipe.train, kind))
        device = torch.device(kind)
        self.metric, self.device = section.metric, device_name(kind)
        self.total = partial(all_reduce, device=device)
        self.session = make_session(
            recipe,
            MAIN,
            dataset,
            train=training_split(recipe.train, dataset, device=device, limit=section.train_items),
            device=device,
            fresh=saved is None,
            wrap=_wrap_of(recipe, worker, device),
            worker=worker,
            feeding=Feeding.by_threads(recipe.cluster.num_feed_threads),
        )
        self.recorded = RecordedAttack(self.session.val_attack) if self.session.val_attack else None
        self.session.val_attack = self.recorded
        self.lineage = Lineage()
        if saved is not None:
            state = torch.load(io.BytesIO(saved), weights_only=True, map_location="cpu")
            self.lineage = Lineage(state.pop("schedule"), state.pop("standing"))
            continue_with_own_settings(self.session, state)
        self.lineage.note_values(self.session.next_epoch, values)

    @property
    def finished(self) -> bool:
        return self.session.finished

    def run_epoch(self) -> dict[str, Any]:
        """The report of one epoch, or of why training cannot continue."""
        try:
            row = self.session.run_epoch(total=self.total)
        except TrainingStoppedError as error:  # a result, too: a restart would stop again
            return {EPOCHS: self.session.next_epoch, SCORE: 0.0, STOPPED: str(error)}
        if self.recorded:
            robust = self.recorded.robust(len(self.session.attacked), self.total)
            if self.session.selected_epoch == self.session.next_epoch - 1:
                self.lineage.robust = robust
        return self._report(row)

    def state(self) -> bytes:
        """The checkpoint; all workers of a trial must call it."""
        buffer = io.BytesIO()
        torch.save(self.session.state() | self.lineage.state(), buffer)
        return buffer.getvalue()

    def _report(self, row: Row) -> dict[str, Any]:
        session = self.session
        kept = session.history[session.selected_epoch]
        return {
            **row,
            EPOCHS: session.next_epoch,
            SCORE: kept[self.metric],
            "kept": kept,
            "finished": session.finished,
            "device": self.device,
            **self.lineage.state(),
            # All epochs: Ray copies its own log of a trial to the storage later than its state.
            "history": [{key: done[key] for key in LOGGED} for done in session.history],
        }


def _wrap_of(
    recipe: Recipe, worker: Worker, device: torch.device
) -> Callable[[PixelModel], nn.Module]:
    """How the network is shared between the workers of a trial, as in a training."""
    if worker.world == 1:
        return lambda network: network
    if recipe.cluster.strategy == "fsdp":
        return shard
    return partial(DistributedDataParallel, device_ids=[device] if device.type == "cuda" else None)


def continue_with_own_settings(session: Session, state: dict[str, Any]) -> None:
    """Restore a session, but keep this trial's weight decay and other optimiser settings.

    An optimiser's state brings the settings of the trial that it comes from.
    """
    groups = session.updater.optimizer.param_groups
    own = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    session.restore(state)
    for group, settings in zip(session.updater.optimizer.param_groups, own, strict=True):
        group.update(settings)
