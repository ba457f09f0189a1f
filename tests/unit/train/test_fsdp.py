"""Weights shared out over two processes: the same training as with whole ones, also resumed."""

import shutil
from collections.abc import Callable
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
from components.train.averaging import AverageSettings
from components.train.epoch import EpochSettings
from components.train.feed import Worker
from components.train.objectives.aas import AasTraining
from components.train.objectives.ablation import AblationTraining
from components.train.objectives.adversarial import AdversarialTraining
from components.train.objectives.awp import Awp
from components.train.objectives.inner import InnerAttack, predictions
from components.train.objectives.standard import Standard
from components.train.objectives.trades import Trades
from components.train.optim import OptimizerSettings
from components.train.selection import Selection
from components.train.session import Session, initial_model
from components.train.sharding import check_shardable, shard
from components.train.validation import ValidationAttack
from pipelines.recipe.load import loads
from pipelines.stages.train.stage import make_session
from pipelines.stages.train.worker import train_loop

ATTACK = InnerAttack(eps=0.1)
# Every way in which an objective passes: attack and probe, two passes with gradients, ablations.
OBJECTIVES = {
    "at": AdversarialTraining(ATTACK, clean_every=1),
    "trades": Trades(ATTACK, passes="separate"),
    "columns": AblationTraining(3),
}

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
    def make(objective, *, optimizer="sgd", precision="float32", **placement) -> Session:
        return Session(
            initial_model(toy_spec, seed=5),
            objective,
            train=train_split,
            val=val_split,
            # clipped at every step, and in two passes per step
            settings=EpochSettings(5, 1, 6, 0.5, 0, 0.05, micro_batch=2, precision=precision),
            optimizer=OptimizerSettings(optimizer),
            average=AverageSettings("ema", 0.5),
            selection=Selection("best"),
            val_items=6,
            val_attack=ValidationAttack(0.1, 1),
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
    settings = {"optimizer": "adamw", "precision": "fp16", "wrap": shard}

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
    dataset = SimpleNamespace(
        classes=("dark", "bright"),
        channels=1,
        height=8,
        width=8,
        open_split=lambda split, memory_mb: {"train": train_split, "val": val_split}[split],
    )
    files = {name: str(tmp_path / name) for name in ("live", "stopped", "out")}
    config = {"recipe": recipe.resolved(), "model": "main", "dataset": "", "num_threads": 1}

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
        told = files | {"out": str(tmp_path / out), "recipe_digest": ""}
        train_loop(config | told)

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
        (Awp(OBJECTIVES["at"]), {}, "train.objective.awp"),
        (AasTraining(Standard()), {}, "train.objective.aas"),
        (AblationTraining(3, position="image"), {}, "position: image"),
        (Standard(), {"architecture": "resnet18", "token_policy": "mask", "options": {}}, "batch"),
        (Standard(), {"architecture": "beit_base_patch16_224"}, "BEiT"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(toy_spec, objective, changes, told):
    values = {field: getattr(toy_spec, field) for field in toy_spec.__dataclass_fields__}
    with torch.device("meta"):
        model = PixelModel(type(toy_spec)(**values | changes))
    with pytest.raises(CasemateError, match=rf"cluster.strategy: fsdp does not fit.*{told}.*ddp"):
        check_shardable(model, objective)
    check_shardable(PixelModel(toy_spec), AblationTraining(3))
