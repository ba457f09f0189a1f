"""The function that every Ray Train worker runs.

Rank 0 keeps `live.json` (finished epochs, position inside the running one) on the storage. Light to
import: Ray's controller loads this module too, without torch and timm.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from components.core.files import write_text
from components.core.folders import Folder
from pipelines.runtime.machine import MACHINE, MachineLog
from pipelines.runtime.notes import Notes
from pipelines.runtime.storage import SCRATCH, StepPlace

if TYPE_CHECKING:
    import torch

    from components.train.session import Session

JOB = "job"  # key of the only entry of the config: Ray passes mappings
STATE = "state.pt"
LIVE = "live.json"
STOPPED = "stopped.json"  # why training cannot continue; exists only then
STORED = "stored.json"  # files that the worker has stored; exists only without a shared disk
UPLOAD_SECONDS = 20.0  # between checkpoints on an object store: an epoch may take less than one
REGISTER = "checkpoint_manager_snapshot.json"  # Ray's list of checkpoints to resume from


def has_checkpoint(place: StepPlace) -> bool:
    """Whether a restarted training resumes: Ray must have registered the written checkpoint."""
    keys = {PurePosixPath(e.key) for e in place.store.listing(f"{place.key}/{SCRATCH}")}
    for state in (key for key in keys if key.match(f"train-*/checkpoint_*/{STATE}")):
        register = place.store.find(str(state.parents[1] / REGISTER))
        if register and state.parent.name.encode() in register:
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """The input of a worker."""

    recipe: dict[str, Any]  # resolved, with absolute paths
    recipe_digest: str  # of the recipe as it was written
    model: str
    dataset: Folder
    notes: Notes  # `LIVE` and others: what rank 0 reports while it trains
    out: Path
    place: StepPlace
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
    from components.train.passes import arithmetic_on
    from components.train.session import TrainingStoppedError
    from components.train.sharding import shard
    from pipelines.recipe import load as recipes
    from pipelines.runtime.devices import device_name, worker_device
    from pipelines.stages.train.session import make_session

    job = config[JOB]
    torch.set_num_threads(job.num_threads)
    kind = worker_device()
    device = get_device() if kind == "cuda" else torch.device(kind)
    recipe = recipes.parse(job.recipe, source="recipe")
    assert recipe.train is not None
    arithmetic.use(arithmetic_on(recipe.train, kind))
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
        feeding=Feeding.by_threads(recipe.cluster.num_feed_threads),
    )
    if checkpoint:
        with checkpoint.as_directory() as folder:
            session.restore(torch.load(Path(folder) / STATE, weights_only=True, map_location="cpu"))
    live = LiveFile(job.notes, session, device_name(kind)) if worker.rank == 0 else None

    saved_at = time.monotonic()

    def is_due() -> bool:
        """Whether the end of an epoch is worth a checkpoint; rank 0 decides for all workers."""
        if job.place.storage.is_local:
            return True
        waited = time.monotonic() - saved_at > UPLOAD_SECONDS
        decision = torch.tensor([float(waited and worker.rank == 0)])
        return bool(all_reduce(decision, device=device).item())

    def report() -> None:
        """Checkpoint on all workers, which wait for each other; rank 0 writes it."""
        nonlocal saved_at
        state = session.state()
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if live:
                torch.save(state, Path(folder) / STATE)
                saved = Checkpoint.from_directory(folder)
            ray.train.report({"epoch": session.next_epoch}, checkpoint=saved)
        saved_at = time.monotonic()

    while not session.finished:
        try:
            session.run_epoch(
                total=partial(all_reduce, device=device),
                on_step=live.step if live else lambda step, steps: None,
                on_checkpoint=report,
            )
        except TrainingStoppedError as error:
            if live:
                write_text(job.notes.path(STOPPED), json.dumps(error.args))
                job.notes.send(STOPPED)
            return  # not a failure: a restart would stop at the same step
        if is_due():
            report()
        if live:
            live.update()
    final = session.final_model()
    if live:
        with outputs(job) as folder:
            save_model(folder / "model", final, recipe_digest=job.recipe_digest)
            history = {
                "rows": session.history,
                "selected_epoch": session.selected_epoch,
                "passes": session.passes.to_dict(),
            }
            write_text(folder / "history.json", json.dumps(history))


@contextmanager
def outputs(job: TrainJob) -> Iterator[Path]:
    """A folder for the results: the step's own, or one whose files are stored afterwards."""
    if job.place.storage.is_local:
        yield job.out
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield folder
        written = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in written]
        refs = {name: job.place.put_file(name, folder / name)._asdict() for name in names}
        write_text(job.notes.path(STORED), json.dumps(refs))
        job.notes.send(STORED)


def all_reduce(sums: "torch.Tensor", *, device: "torch.device") -> "torch.Tensor":
    """The sums of all workers, in float64; `device` is the one by which they talk."""
    import torch.distributed

    if torch.distributed.is_initialized():
        sums = sums.to(device, torch.float64)
        torch.distributed.all_reduce(sums)
    return sums.cpu()


class LiveFile:
    """`live.json` of rank 0: replaced as a whole, at most about once a second."""

    def __init__(self, notes: Notes, session: "Session", device: str = "cpu") -> None:
        self.notes, self.session, self.device = notes, session, device
        self.machine = MachineLog(notes.path(MACHINE))
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
        state |= {"running": running, "device": self.device, "passes": session.passes.to_dict()}
        write_text(self.notes.path(LIVE), json.dumps(state), sync=False)
        self.machine.sample()
        self.notes.send(LIVE, MACHINE)
