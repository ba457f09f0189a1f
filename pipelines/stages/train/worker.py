"""What every Ray Train worker runs.

Rank 0 keeps `live.json` (finished epochs, position inside the running one) on the storage. Light to
import: Ray's controller loads this module too, and would otherwise pay for torch and timm.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.files import write_text

if TYPE_CHECKING:
    import torch

    from components.train.session import Session

STATE = "state.pt"
REGISTER = "checkpoint_manager_snapshot.json"  # Ray's list of checkpoints that a start goes on from


def has_checkpoint(scratch: Path) -> bool:
    """Whether a training goes on when it is started again: a written file alone is not enough."""
    for state in scratch.glob(f"train-*/checkpoint_*/{STATE}"):
        register = state.parents[1] / REGISTER
        if register.is_file() and state.parent.name in register.read_text():
            return True
    return False


def train_loop(config: dict[str, Any]) -> None:
    """Train from the last checkpoint, or from the start, to the last epoch."""
    import ray.train
    import torch
    from ray.train import Checkpoint
    from ray.train.torch import get_device, prepare_model

    from components.data.prepared import PreparedDataset
    from components.models.checkpoint import save_model
    from components.train.feed import Feeding, Worker
    from components.train.session import TrainingStoppedError
    from components.train.sharding import shard
    from pipelines.recipe import load as recipes
    from pipelines.stages.train.stage import make_session

    torch.set_num_threads(config["num_threads"])
    recipe = recipes.parse(config["recipe"], source="recipe")
    context = ray.train.get_context()
    worker = Worker(context.get_world_rank(), context.get_world_size())
    checkpoint = ray.train.get_checkpoint()
    session = make_session(
        recipe,
        config["model"],
        PreparedDataset.open(Path(config["dataset"])),
        worker=worker,
        wrap=shard if recipe.cluster.strategy == "fsdp" else prepare_model,
        device=get_device(),
        fresh=checkpoint is None,
        feeding=Feeding(recipe.cluster.feed_threads, 2 * recipe.cluster.feed_threads),
    )
    if checkpoint:
        with checkpoint.as_directory() as folder:
            session.restore(torch.load(Path(folder) / STATE, weights_only=True, map_location="cpu"))
    live = _Live(Path(config["live"]), session) if worker.rank == 0 else None

    def report() -> None:
        """A checkpoint of all workers, who wait for each other; the first one writes it."""
        state = session.state()
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if live:
                torch.save(state, Path(folder) / STATE)
                saved = Checkpoint.from_directory(folder)
            ray.train.report({"epoch": session.next_epoch}, checkpoint=saved)

    while not session.finished:
        try:
            session.run_epoch(
                total=_all_reduce,
                on_step=live.step if live else lambda step, steps: None,
                on_checkpoint=report,
            )
        except TrainingStoppedError as error:
            if live:
                write_text(Path(config["stopped"]), json.dumps(error.args))
            return  # not a failure: a restart would stop at the same step
        report()
        if live:
            live.note()
    final = session.final_model()
    if live:
        out = Path(config["out"])
        save_model(out / "model", final, recipe_digest=config["recipe_digest"])
        history = {"rows": session.history, "selected_epoch": session.selected_epoch}
        write_text(out / "history.json", json.dumps(history))


def _all_reduce(sums: "torch.Tensor") -> "torch.Tensor":
    import torch.distributed
    from ray.train.torch import get_device

    if torch.distributed.is_initialized():
        sums = sums.to(get_device(), torch.float64)
        torch.distributed.all_reduce(sums)
    return sums.cpu()


class _Live:
    """Rank 0's public diary: replaced whole, at most about once a second."""

    def __init__(self, path: Path, session: "Session") -> None:
        self.path, self.session = path, session
        self.since = time.monotonic(), session.num_done  # when and where steps began to count
        self.note()

    def step(self, step: int, steps: int) -> None:
        if time.monotonic() - self.last > 1:
            self.note()

    def note(self) -> None:
        session, self.last = self.session, time.monotonic()
        if session.num_done == 0:  # between epochs; validation is no part of a step's time
            self.since = self.last, 0
        began, first = self.since
        images = (session.num_done - first) * session.settings.batch_size
        speed = round(images / (self.last - began), 1) if images else None
        state = {"rows": session.history, "fraction": session.progress, "pid": os.getpid()}
        running = session.running() | {"images_per_second": speed}
        write_text(self.path, json.dumps(state | {"running": running}), sync=False)
