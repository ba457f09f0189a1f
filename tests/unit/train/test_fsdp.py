"""Weights shared out over two processes: the same training as with whole ones, also resumed."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
import ray.train.torch
import torch
from torch import distributed, multiprocessing
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from components.attacks.gradients import attack_mode
from components.core.errors import CasemateError
from components.data.prepared import PreparedDataset
from components.models.checkpoint import load_model
from components.models.pixels import PixelModel
from components.train.epoch import EpochPlan
from components.train.feed import Worker
from components.train.objectives import settings as s
from components.train.objectives.base_settings import AasTrainingSettings, AwpSettings
from components.train.objectives.inner import predictions
from components.train.objectives.make import make_objective
from components.train.session import Session, initial_model
from components.train.settings import AdamWSettings, EmaSettings, SgdSettings, TrainSettings
from components.train.sharding import check_shardable, shard
from pipelines.recipe.load import loads
from pipelines.runtime.notes import Notes
from pipelines.runtime.storage import Storage
from pipelines.stages.train.session import make_session
from pipelines.stages.train.worker import JOB, TrainJob, train_loop

new_objective = partial(make_objective, label_smoothing=0.0)
ATTACK = s.FgsmTrainingSettings(eps=0.1, clean_every=1)
STANDARD = new_objective(s.StandardSettings())
# Every way in which an objective passes: attack and probe, two passes with gradients, ablations.
OBJECTIVES = {
    "at": new_objective(ATTACK),
    "trades": new_objective(s.TradesSettings(eps=0.1, num_steps=1, passes="separate")),
    "columns": new_objective(s.ColumnsTrainingSettings(band=3)),
}

SETTINGS = TrainSettings(
    batch_size=6,
    learning_rate=0.5,
    warmup_epochs=0,
    clip_norm=0.05,  # at every step
    micro_batch=2,  # two passes per step
    average=EmaSettings(decay=0.5),
    select="best",
    val_items=6,
    val_eps=0.1,
    val_steps=1,
    stop_on_leak=False,
)

RECIPE = """
name: toy
data: {source: digits}
model: {options: {patch_size: 4, embed_dim: 8, depth: 1, num_heads: 2}}
train:
  objective: {kind: fgsm, eps: 0.1}
  optimizer: {kind: sgd}
  average: {kind: ema, decay: 0.5}
  epochs: 1
  batch_size: 6
  val_items: 4
  val_steps: 1
cluster: {strategy: fsdp, train_workers: 2, checkpoint_steps: 2}
"""


def side_by_side(folder: Path, work: Callable[[Worker], None]) -> None:
    """Run `work` in two processes of one group; forked, so nothing is imported again."""

    meeting = f"file://{folder}/{uuid4()}"

    def start(rank: int) -> None:
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
        work(Worker(rank, 2))
        distributed.destroy_process_group()

    multiprocessing.start_processes(start, nprocs=2, start_method="fork")


def total(sums: torch.Tensor) -> torch.Tensor:
    sums = sums.clone()
    distributed.all_reduce(sums)
    return sums


@pytest.fixture
def new_session(toy_spec, train_split, val_split):
    def make(objective, *, optimizer=SgdSettings(), precision="float32", **placement) -> Session:  # noqa: B008
        return Session(
            initial_model(toy_spec, seed=5),
            objective,
            train=train_split,
            val=val_split,
            plan=EpochPlan(
                replace(SETTINGS, optimizer=optimizer, precision=precision),
                seed=5,
                epochs=1,
                image_size=8,
            ),
            checkpoint_steps=2,
            **placement,
        )

    return make


def finish(session: Session, summed=total) -> dict:
    """Train to the end; what came of it, whole."""
    while not session.finished:
        session.run_epoch(total=summed)
    return {
        "rows": session.history,
        "state": session.state(),
        "final": session.final_model().state_dict(),
    }


def assert_same(found: dict, expected: dict) -> None:
    for row, other in zip(found["rows"], expected["rows"], strict=True):
        for key in ("loss", "train_accuracy", "val_accuracy", "val_robust_accuracy"):
            assert row[key] == pytest.approx(other[key], abs=1e-5), key
    for part in ("final", "model", "average"):
        ours, theirs = (one.get(part) or one["state"][part] for one in (found, expected))
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert torch.allclose(value, theirs[name], atol=1e-5), (part, name)


def test_shared_out_weights_train_like_whole_ones(new_session, tmp_path):
    def work(worker: Worker) -> None:
        for name, objective in OBJECTIVES.items():
            session = new_session(objective, wrap=shard, worker=worker)
            assert all(isinstance(weight, DTensor) for weight in session.model.parameters())
            keep(worker, finish(session), name)
        copied = new_session(OBJECTIVES["at"], wrap=DistributedDataParallel, worker=worker)
        keep(worker, finish(copied), "ddp")

    def keep(worker: Worker, result: dict, name: str) -> None:
        if worker.rank == 0:
            torch.save(result, tmp_path / f"{name}.pt")

    side_by_side(tmp_path, work)
    found = {name: torch.load(tmp_path / f"{name}.pt") for name in [*OBJECTIVES, "ddp"]}
    assert_same(found["at"], found["ddp"])
    for name, objective in OBJECTIVES.items():
        assert_same(found[name], finish(new_session(objective), lambda sums: sums))


def test_a_checkpoint_goes_on_with_or_without_sharing(new_session, tmp_path):
    objective = OBJECTIVES["at"]
    alone = new_session(objective)
    alone.run_epoch(on_checkpoint=partial(_save_first, alone, tmp_path / "alone.pt"))
    expected = finish(alone, lambda sums: sums)

    def work(worker: Worker) -> None:
        first = new_session(objective, wrap=shard, worker=worker)
        first.run_epoch(
            total=total, on_checkpoint=partial(_save_first, first, tmp_path / "shared.pt")
        )
        distributed.barrier()
        for start in ("alone.pt", "shared.pt"):
            session = new_session(objective, wrap=shard, worker=worker)
            session.restore(torch.load(tmp_path / start, weights_only=True))
            assert session.num_done == 2
            result = finish(session)
            if worker.rank == 0:
                torch.save(result, tmp_path / f"from-{start}")

    side_by_side(tmp_path, work)
    single = new_session(objective)
    single.restore(torch.load(tmp_path / "shared.pt", weights_only=True))
    assert_same(finish(single, lambda sums: sums), expected)
    for start in ("alone.pt", "shared.pt"):
        assert_same(torch.load(tmp_path / f"from-{start}"), expected)


def _save_first(session: Session, path: Path) -> None:
    """The first checkpoint of a training, as the first worker sees it; all workers must call."""
    state = session.state()
    if session.worker.rank == 0 and not path.exists():
        torch.save(state, path)


def test_both_moments_and_the_scale_survive_a_checkpoint(new_session, tmp_path):
    """fp16 with AdamW; also, an overflow in one worker's part stops the step of both."""
    settings = {"optimizer": AdamWSettings(), "precision": "fp16", "wrap": shard}

    def work(worker: Worker) -> None:
        session = new_session(OBJECTIVES["at"], worker=worker, **settings)
        session.run_epoch(total=total)
        saved = [session.state()]
        distributed.broadcast_object_list(saved)
        again = new_session(OBJECTIVES["at"], worker=worker, **settings)
        again.restore(saved[0])
        kept = again.state()["updater"]
        if worker.rank == 0:
            torch.testing.assert_close(kept, saved[0]["updater"], rtol=0, atol=0)

        updater = again.updater
        before = [weight.to_local().clone() for weight in again.model.parameters()]
        updater.backward(again.wrapped(torch.rand(2, 1, 8, 8)).sum())
        if worker.rank == 1:
            again.model.net.head.weight.grad.to_local().fill_(torch.inf)
        updater.step(0.1)
        after = [weight.to_local() for weight in again.model.parameters()]
        assert all(map(torch.equal, before, after))
        assert updater.scaler.get_scale() == kept["scaler"]["scale"] / 2

    side_by_side(tmp_path, work)


def test_a_frozen_pass_leaves_trainable_weights_behind(toy_spec, tmp_path, new_batch):
    def work(worker: Worker) -> None:
        model, batch = shard(initial_model(toy_spec, seed=5)), new_batch()
        with attack_mode(model):
            predictions(model, batch.images)
        model(batch.images).sum().backward()
        missing = [name for name, w in model.named_parameters() if w.grad is None]
        assert not missing, missing

    side_by_side(tmp_path, work)


def test_what_a_worker_runs_saves_whole_models_and_goes_on(tmp_path, train_split, val_split):
    """The loop of Ray Train's workers, with the few calls that it makes to Ray answered here."""
    recipe = loads(RECIPE, source="toy")
    splits = {"train": train_split, "val": val_split}
    dataset = SimpleNamespace(
        classes=("dark", "bright"),
        channels=1,
        height=8,
        width=8,
        open_split=lambda split, **_: splits[split],
    )

    def work(worker: Worker, start: str | None, out: str) -> None:
        kept = iter(range(9))

        def report(_, checkpoint) -> None:
            if worker.rank == 0:
                shutil.copytree(checkpoint.path, tmp_path / f"{out}-{next(kept)}")

        ranks = {"get_world_rank": lambda: worker.rank, "get_world_size": lambda: worker.world}
        ray.train.get_context = lambda: SimpleNamespace(**ranks)
        ray.train.get_checkpoint = lambda: start and ray.train.Checkpoint(str(tmp_path / start))
        ray.train.report = report
        ray.train.torch.get_device = lambda: torch.device("cpu")
        PreparedDataset.open = staticmethod(lambda path: dataset)
        job = TrainJob(
            recipe=recipe.resolved(),
            recipe_digest="",
            model="main",
            dataset=Path(),
            notes=Notes(tmp_path),
            out=tmp_path / out,
            place=Storage.at(tmp_path).step("test", out),
            num_threads=1,
        )
        train_loop({JOB: job})

    side_by_side(tmp_path, lambda worker: work(worker, None, "first"))
    side_by_side(tmp_path, lambda worker: work(worker, "first-0", "second"))  # inside an epoch
    session = make_session(recipe, "main", dataset)
    while not session.finished:
        session.run_epoch()
    expected = session.final_model().state_dict()
    for out in ("first", "second"):
        weights = load_model(tmp_path / out / "model").state_dict()
        assert all(torch.allclose(weights[n], w, atol=1e-5) for n, w in expected.items()), out


@pytest.mark.parametrize(
    ("objective", "changes", "told"),
    [
        (new_objective(replace(ATTACK, awp=AwpSettings())), {}, "train.objective.awp"),
        (new_objective(replace(ATTACK, aas=AasTrainingSettings())), {}, "train.objective.aas"),
        (
            new_objective(s.AblationTrainingSettings(size=3, position="image")),
            {},
            "position: image",
        ),
        (STANDARD, {"architecture": "resnet18", "token_policy": "mask", "options": {}}, "batch"),
        (STANDARD, {"architecture": "beit_base_patch16_224"}, "BEiT"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(toy_spec, objective, changes, told):
    values = {field: getattr(toy_spec, field) for field in toy_spec.__dataclass_fields__}
    with torch.device("meta"):
        model = PixelModel(type(toy_spec)(**values | changes))
    with pytest.raises(CasemateError, match=rf"cluster.strategy: fsdp does not fit.*{told}.*ddp"):
        check_shardable(model, objective)
    check_shardable(PixelModel(toy_spec), OBJECTIVES["columns"])
