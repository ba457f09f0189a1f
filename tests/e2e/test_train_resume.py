"""`casemate train --resume` goes on with an unfinished training, or says that there is none."""

import json
from pathlib import Path

import pytest

from pipelines.cli import flow as cli
from pipelines.flow.plan import plan
from pipelines.recipe import load as recipe
from pipelines.stages.train.worker import REGISTER, STATE
from tests.e2e.cli import call, tiny_recipe

pytestmark = pytest.mark.e2e


@pytest.fixture
def started(monkeypatch):
    """What the command would run, in place of running it."""
    flows = []
    monkeypatch.setattr(cli, "run_and_show", lambda loaded, **_: flows.append(loaded.name))
    return flows


def leave_checkpoint(path: Path, storage: Path) -> Path:
    """The files of a training that was killed: a checkpoint, and Ray's list that names it."""
    steps = {step.name: step.folder for step in plan(recipe.load(str(path)), storage)}
    run = steps["train.columns"] / "unfinished" / "train-0"
    (run / "checkpoint_1").mkdir(parents=True)
    (run / "checkpoint_1" / STATE).write_bytes(b"")
    register = run / REGISTER
    register.write_text(json.dumps({"latest": {"checkpoint_dir_name": "checkpoint_1"}}))
    return register


def test_nothing_to_resume_is_one_line_with_the_command_that_starts(tmp_path, started):
    path, storage = tiny_recipe(tmp_path / "tiny.yaml"), tmp_path / "my runs"
    told = call("train", path, "--resume", "--storage", storage)
    assert (told.code, told.out, started) == (2, "", [])
    assert told.err == (
        f"casemate: --resume: {storage}/tiny has no checkpoint of these trainings; "
        f"start without it: casemate train {path} --storage '{storage}'\n"
    )
    assert not storage.exists()


def test_a_registered_checkpoint_of_any_model_is_gone_on_with(tmp_path, started):
    path, storage = tiny_recipe(tmp_path / "tiny.yaml"), tmp_path / "storage"
    register = leave_checkpoint(path, storage)
    command = ("train", path, "--storage", storage, "--resume")
    assert call(*command).code == 0
    assert started == ["tiny"]
    other = call(*command, "--set", "train.epochs=7", "--set", "train.variants={}")
    assert (other.code, started) == (2, ["tiny"])  # a checkpoint of another training
    register.unlink()  # killed before Ray had written down what it could go on from
    assert call(*command).code == 2
    told = call(*command, "--force")
    assert told.code == 2
    assert told.err == "casemate: --resume: --force starts from scratch; leave out one of the two\n"
    assert started == ["tiny"]


def test_finished_trainings_are_not_resumed(tmp_path, started):
    path, storage = tiny_recipe(tmp_path / "tiny.yaml"), tmp_path / "storage"
    leave_checkpoint(path, storage)
    for step in plan(recipe.load(str(path)), storage):
        step.folder.mkdir(parents=True, exist_ok=True)
        manifest = {"fingerprint": step.fingerprint, "files": {}}
        (step.folder / "manifest.json").write_text(json.dumps(manifest))
    told = call("train", path, "--storage", storage, "--resume")
    assert (told.code, started) == (2, [])
    assert "has only finished trainings; start without it: casemate train" in told.err
