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

if TYPE_CHECKING:
    import torch

    from components.train.session import Session

STATE = "state.pt"


def train_loop(config: dict[str, Any]) -> None:
    """Train from the last checkpoint, or from the start, to the last epoch."""
    import ray.train
    import torch
    from ray.train import Checkpoint
    from ray.train.torch import get_device, prepare_model

    from components.data.prepared import PreparedDataset
    from components.models.checkpoint import save_model
    from components.train.feed import Feeding, Worker
    from pipelines import recipe as recipes
    from pipelines.stages.train import make_session

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
        wrap=prepare_model,
        device=get_device(),
        fresh=checkpoint is None,
        feeding=Feeding(recipe.cluster.feed_threads, 2 * recipe.cluster.feed_threads),
    )
    if checkpoint:
        with checkpoint.as_directory() as folder:
            session.restore(torch.load(Path(folder) / STATE, weights_only=True, map_location="cpu"))
    live = _Live(Path(config["live"]), session) if worker.rank == 0 else None
    while session.next_epoch < session.settings.epochs:
        session.run_epoch(
            total=_all_reduce, on_step=live.step if live else lambda step, steps: None
        )
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if live:
                torch.save(session.state(), Path(folder) / STATE)
                saved = Checkpoint.from_directory(folder)
            ray.train.report({"epoch": session.next_epoch - 1}, checkpoint=saved)
        if live:
            live.epoch_done()
    if live:
        out = Path(config["out"])
        save_model(out / "model", session.model, recipe_digest=config["recipe_digest"])
        live.write(out / "history.json", {"rows": session.history})


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
        self.path, self.session, self.last = path, session, 0.0
        self.epoch_done()

    def step(self, step: int, steps: int) -> None:
        if time.monotonic() - self.last > 1:
            self._note(step / steps)

    def epoch_done(self) -> None:
        self._note(0.0)

    def _note(self, fraction: float) -> None:
        self.last = time.monotonic()
        self.write(
            self.path, {"rows": self.session.history, "fraction": fraction, "pid": os.getpid()}
        )

    @staticmethod
    def write(path: Path, value: object) -> None:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(value))
        partial.replace(path)
