"""Ray Train for real: two workers, one killed in the middle, against one undisturbed worker."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from components.models.checkpoint import load_model
from pipelines import flow, recipe
from tests.e2e.cli import step_folder, tiny_recipe, wait_until

pytestmark = pytest.mark.ray


def kill_rank_0_after_first_epoch(storage: Path, killed: list[int]) -> None:
    def first_epoch_done() -> bool:
        for live in storage.glob("*/train.main-*/unfinished/live.json"):
            state = json.loads(live.read_text())
            if len(state["rows"]) == 1:
                killed.append(state["pid"])
                return True
        return False

    wait_until(first_epoch_done, seconds=150)
    os.kill(killed[0], signal.SIGKILL)


@pytest.mark.timeout(280)
def test_a_killed_worker_of_two_restarts_and_ends_like_one(ray_session, tmp_path, finished_flow):
    storage = tmp_path / "storage"
    path = tiny_recipe(tmp_path / "tiny.yaml")
    loaded = recipe.load(
        str(path), overrides=["cluster.train_workers=2", "train.variants={}", "certify={}"]
    )
    killed: list[int] = []
    killer = threading.Thread(target=kill_rank_0_after_first_epoch, args=(storage, killed))
    killer.start()
    flow.run_flow(loaded, storage=storage, until="train")
    killer.join()

    ours, theirs = (step_folder(root, "train.main") for root in (storage, finished_flow))
    rows = json.loads((ours / "history.json").read_text())["rows"]
    expected = json.loads((theirs / "history.json").read_text())["rows"]
    assert [row["epoch"] for row in rows] == list(range(6))  # no epoch lost, none doubled
    for row, other in zip(rows[:2], expected[:2], strict=True):  # later, float noise has grown
        assert row["loss"] == pytest.approx(other["loss"], abs=2e-3)
        assert row["eps"] == other["eps"]
    assert rows[-1]["val_accuracy"] == pytest.approx(expected[-1]["val_accuracy"], abs=0.2)
    assert load_model(ours / "model").spec == load_model(theirs / "model").spec
    assert ours.name == theirs.name  # the number of workers is not part of the identity
