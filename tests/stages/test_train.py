"""Ray Train for real: two workers, one killed inside an epoch, against one undisturbed worker."""

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


STEPS = 62  # of an epoch: 1000 items in batches of 16
EVERY = 10  # steps between checkpoints
ALONE = ("train.variants={}", "attack={}", "certify={}")


def kill_rank_0_inside_an_epoch(storage: Path, seen: list[dict]) -> None:
    """Kill after a checkpoint inside a later epoch; keeps the diary then, and after the restart."""

    def diary() -> dict | None:
        for live in storage.glob("*/train.main-*/unfinished/live.json"):
            return json.loads(live.read_text())
        return None

    def inside() -> bool:
        state = diary()
        if state and state["rows"] and state["fraction"] > (EVERY + 1) / STEPS:
            seen.append(state)
        return bool(seen)

    def back() -> bool:
        state = diary()
        if state and state["pid"] != seen[0]["pid"]:
            seen.append(state)
        return len(seen) > 1

    wait_until(inside, seconds=150)
    os.kill(seen[0]["pid"], signal.SIGKILL)
    wait_until(back, seconds=150)


@pytest.mark.timeout(280)
def test_a_killed_worker_of_two_restarts_and_ends_like_one(ray_session, tmp_path, finished_flow):
    storage = tmp_path / "storage"
    path = tiny_recipe(tmp_path / "tiny.yaml")
    changes = ["cluster.train_workers=2", f"cluster.checkpoint_steps={EVERY}"]
    loaded = recipe.load(str(path), overrides=[*changes, *ALONE])
    seen: list[dict] = []
    killer = threading.Thread(target=kill_rank_0_inside_an_epoch, args=(storage, seen))
    killer.start()
    flow.run_flow(loaded, storage=storage, until="train")
    killer.join()
    before, after = seen
    assert len(after["rows"]) == len(before["rows"])
    assert after["fraction"] >= EVERY / STEPS  # went on inside the epoch
    assert after["running"]["loss"] is not None  # and knows what the lost worker had seen

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
