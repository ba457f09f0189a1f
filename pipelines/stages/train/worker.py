"""The function that every Ray Train worker runs.

Rank 0 keeps `live.json` (finished epochs, position inside the running one) on the storage. Light to
import: Ray's controller loads this module too, without torch and timm.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.files import write_text
from components.core.folders import Folder
from pipelines.runtime.machine import MACHINE, MachineLog

if TYPE_CHECKING:
    import torch

    from components.train.session import Session

JOB = "job"  # key of the only entry of the config: Ray passes mappings
STATE = "state.pt"
REGISTER = "checkpoint_manager_snapshot.json"  # Ray's list of checkpoints to resume from


def has_checkpoint(scratch: Path) -> bool:
    """Whether a restarted training resumes: Ray must have registered the written checkpoint."""
    for state in scratch.glob(f"train-*/checkpoint_*/{STATE}"):
        register = state.parents[1] / REGISTER
        if register.is_file() and state.parent.name in register.read_text():
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """The input of a worker."""

    recipe: dict[str, Any]  # resolved, with absolute paths
    recipe_digest: str  # of the recipe as it was written
    model: str
    dataset: Folder
    live: Path  # what rank 0 reports while it trains
    stopped: Path  # why training cannot continue; exists only then
    out: Path
    num_threads: int


def train_loop(config: Mapping[str, TrainJob]) -> None:
    """Train from the last checkpoint, or from the start, to the last epoch."""
    import ray.train
    import torch
    from ray.train import Checkpoint
    from ray.train.torch import get_device, prepare_model

    from components.core import arithmetic
    from components.data.prepared import PreparedDataset
    from components.models.checkpoint import save_model
    from components.train.feed import Feeding, Worker
    from components.train.session import TrainingStoppedError
    from components.train.sharding import shard
    from pipelines.recipe import load as recipes
    from pipelines.runtime.devices import device_name, worker_device
    from pipelines.stages.train.session import make_session

    job = config[JOB]
    torch.set_num_threads(job.num_threads)
    arithmetic.use(arithmetic.TRAINING)
    kind = worker_device()
    device = get_device() if kind == "cuda" else torch.device(kind)
    recipe = recipes.parse(job.recipe, source="recipe")
    context = ray.train.get_context()
    worker = Worker(context.get_world_rank(), context.get_world_size())
    checkpoint = ray.train.get_checkpoint()
    session = make_session(
        recipe,
        job.model,
        PreparedDataset.open(job.dataset),
        worker=worker,
        wrap=shard
        if recipe.cluster.strategy == "fsdp"
        else partial(prepare_model, move_to_device=device),
        device=device,
        fresh=checkpoint is None,
        feeding=Feeding.by_threads(recipe.cluster.feed_threads),
    )
    if checkpoint:
        with checkpoint.as_directory() as folder:
            session.restore(torch.load(Path(folder) / STATE, weights_only=True, map_location="cpu"))
    live = LiveFile(job.live, session, device_name(kind)) if worker.rank == 0 else None

    def report() -> None:
        """Checkpoint on all workers, which wait for each other; rank 0 writes it."""
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
                total=partial(all_reduce, device=device),
                on_step=live.step if live else lambda step, steps: None,
                on_checkpoint=report,
            )
        except TrainingStoppedError as error:
            if live:
                write_text(job.stopped, json.dumps(error.args))
            return  # not a failure: a restart would stop at the same step
        report()
        if live:
            live.update()
    final = session.final_model()
    if live:
        save_model(job.out / "model", final, recipe_digest=job.recipe_digest)
        history = {"rows": session.history, "selected_epoch": session.selected_epoch}
        write_text(job.out / "history.json", json.dumps(history))


def all_reduce(sums: "torch.Tensor", *, device: "torch.device") -> "torch.Tensor":
    """The sums of all workers, in float64; `device` is the one by which they talk."""
    import torch.distributed

    if torch.distributed.is_initialized():
        sums = sums.to(device, torch.float64)
        torch.distributed.all_reduce(sums)
    return sums.cpu()


class LiveFile:
    """`live.json` of rank 0: replaced as a whole, at most about once a second."""

    def __init__(self, path: Path, session: "Session", device: str = "cpu") -> None:
        self.path, self.session, self.device = path, session, device
        self.machine = MachineLog(path.with_name(MACHINE))
        self.since = time.monotonic(), session.num_done  # when and where steps began to count
        self.update()

    def step(self, step: int, num_steps: int) -> None:
        if time.monotonic() - self.last > 1:
            self.update()

    def update(self) -> None:
        session, self.last = self.session, time.monotonic()
        if session.num_done == 0:  # between epochs; validation does not count as time of a step
            self.since = self.last, 0
        began, first = self.since
        images = (session.num_done - first) * session.plan.train.batch_size
        speed = round(images / (self.last - began), 1) if images else None
        state = {"rows": session.history, "fraction": session.progress, "pid": os.getpid()}
        running = session.running() | {"images_per_second": speed}
        state |= {"running": running, "device": self.device}
        write_text(self.path, json.dumps(state), sync=False)
        self.machine.sample()
