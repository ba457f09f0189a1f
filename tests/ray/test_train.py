"""Ray Train for real: two workers, one killed inside an epoch, against one that never saw Ray."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from components.data.prepared import PreparedDataset
from components.models.checkpoint import load_model
from pipelines.flow import run as flow
from pipelines.flow.plan import plan
from pipelines.recipe import load as recipe
from pipelines.runtime.storage import Storage
from pipelines.stages.train import stage as train
from pipelines.stages.train.failures import MistakesEndTraining
from pipelines.stages.train.session import make_session
from pipelines.stages.train.worker import has_checkpoint
from tests.e2e.cli import step_folder, tiny_recipe, wait_until

pytestmark = pytest.mark.ray


STEPS = 62  # of an epoch: 1000 items in batches of 16
EVERY = 10  # steps between checkpoints
ALONE = (
    "train.variants={}",
    "attack={}",
    "certify={}",
    "train.epochs=2",
    "train.optimizer.kind=sgd",  # adam blows float noise up to whole steps
)


def kill_rank_0_inside_an_epoch(storage: Path, seen: list[dict]) -> None:
    """Kill after a checkpoint inside the last epoch; keeps the diary then, and after the start."""

    def diary() -> dict | None:
        for live in storage.glob("*/train.main-*/unfinished/live.json"):
            return json.loads(live.read_text())
        return None

    def inside() -> bool:
        state = diary()
        if state and state["rows"] and state["fraction"] > (EVERY + 1) / STEPS:
            (step,) = storage.glob("*/train.main-*")
            place = Storage.at(storage).step(step.parent.name, step.name)
            assert has_checkpoint(place)  # what `--resume` looks for
            seen.append(state)
        return bool(seen)

    def back() -> bool:
        state = diary()
        if state and state["pid"] != seen[0]["pid"]:
            seen.append(state)
        return len(seen) > 1

    wait_until(inside)
    os.kill(seen[0]["pid"], signal.SIGKILL)
    wait_until(back)


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_killed_worker_of_two_restarts_and_ends_like_one(ray_session, tmp_path):
    storage = tmp_path / "storage"
    path = str(tiny_recipe(tmp_path / "tiny.yaml"))
    changes = ["cluster.train_workers=2", f"cluster.checkpoint_steps={EVERY}"]
    loaded = recipe.load(path, overrides=[*changes, *ALONE])
    seen: list[dict] = []
    killer = threading.Thread(target=kill_rank_0_inside_an_epoch, args=(storage, seen))
    killer.start()
    flow.run_flow(loaded, storage=storage, until="train")
    killer.join()
    before, after = seen
    assert len(after["rows"]) == len(before["rows"])
    assert after["fraction"] >= EVERY / STEPS  # went on inside the epoch
    assert after["running"]["loss"] is not None  # and knows what the lost worker had seen

    # One worker has the same identity and, step for step, the same training.
    plain = recipe.load(path, overrides=ALONE)
    ours = step_folder(storage, "train.main")
    assert {step.name: step.folder for step in plan(plain, storage)}["train.main"] == ours
    session = make_session(plain, "main", PreparedDataset.open(step_folder(storage, "prepare")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    while not session.finished:
        session.run_epoch()
    torch.set_num_threads(threads)
    rows = json.loads((ours / "history.json").read_text())["rows"]
    assert [row["epoch"] for row in rows] == [0, 1]  # no epoch lost, none doubled
    for row, expected in zip(rows, session.history, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert row["eps"] == expected["eps"]
    trained, expected = load_model(ours / "model"), session.final_model()
    assert trained.spec == expected.spec
    for name, weight in expected.state_dict().items():
        assert torch.allclose(trained.state_dict()[name], weight, atol=1e-4), name


def test_a_training_starts_without_companions(ray_session, monkeypatch):
    """They are left out by a private method: this fails when Ray no longer asks it."""
    started = {}

    def start(self, **settings):
        started.update(settings)
        return type("Result", (), {"error": None})

    monkeypatch.setattr(train.DataParallelTrainer, "_initialize_and_run_controller", start)
    train.FailFastTrainer(lambda: None).fit()
    assert started["callbacks"]
    companions = DatasetsCallback | PlacementGroupCleanerCallback
    assert not any(isinstance(callback, companions) for callback in started["callbacks"])
    assert isinstance(started["failure_policy"], MistakesEndTraining)
