"""Equal steps of several recipes in one storage: made once, and never at the cost of another."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.core.errors import CasemateError
from pipelines.flow.plan import PlannedStep, plan
from pipelines.flow.run import _placed
from pipelines.flow.sharing import announce, is_own
from pipelines.recipe.load import loads
from pipelines.recipe.schema.recipe import RESERVED_NAMES
from pipelines.runtime.artifacts import StageDir

TEXT = "{name: NAME, data: {source: digits}, train: {epochs: EPOCHS}}"


def planned(storage: Path, name: str, *, epochs: int = 1, forced: tuple[str, ...] = ()):
    text = TEXT.replace("NAME", name).replace("EPOCHS", str(epochs))
    steps = _placed(plan(loads(text, source=name), storage), set(forced))
    return {step.name: step for step in steps}


def finish(step: PlannedStep, content: str = "1", **inputs: PlannedStep) -> None:
    step.folder.mkdir(parents=True, exist_ok=True)
    folders = {name.replace("_", "."): made.contents() for name, made in inputs.items()}
    run = SimpleNamespace(run_id="r")
    out = StageDir(step.folder, step.name, step.fingerprint, run, folders)
    out.write_text("content", content)
    out.finish()
    announce(step)


@pytest.fixture
def first(tmp_path):
    """A recipe whose dataset and model are finished."""
    steps = planned(tmp_path, "first")
    finish(steps["prepare"])
    finish(steps["train.main"], prepare=steps["prepare"])
    return steps


def test_another_recipe_uses_what_is_finished(first, tmp_path):
    second = planned(tmp_path, "second")
    assert second["prepare"].place == first["prepare"].place
    assert second["train.main"].place == first["train.main"].place
    assert second["train.main"].finished
    third = planned(tmp_path, "third", epochs=2)  # the same data, another model
    assert third["prepare"].place == first["prepare"].place
    assert is_own(third["train.main"])
    assert is_own(second["report"])  # of each recipe


def test_an_own_step_goes_before_that_of_another_recipe(first, tmp_path):
    alone = planned(tmp_path, "second", forced=("prepare", "train.main"))
    finish(alone["prepare"])
    second = planned(tmp_path, "second")
    assert is_own(second["prepare"])
    assert second["train.main"].place == first["train.main"].place  # the same content


def test_forced_steps_are_made_in_the_own_folder(first, tmp_path):
    second = planned(tmp_path, "second", forced=("prepare",))
    assert is_own(second["prepare"])
    assert not second["prepare"].finished
    assert first["prepare"].finished
    assert is_own(second["train.main"])  # what it would be made from is not there yet


def test_a_model_of_other_data_than_now_is_not_used(first, tmp_path):
    first["prepare"].place.renew("test")
    finish(first["prepare"], "2")
    second = planned(tmp_path, "second")
    assert second["prepare"].place == first["prepare"].place
    assert is_own(second["train.main"])


@pytest.mark.parametrize("loss", ["removed", "damaged"])
def test_what_is_gone_or_damaged_is_made_again(first, tmp_path, loss):
    folder = first["prepare"].folder
    if loss == "removed":
        shutil.rmtree(folder)
    else:
        next(folder.glob("files/*/content")).write_text("x")
    assert is_own(planned(tmp_path, "second")["prepare"])


def test_names_that_storages_keep_for_themselves_are_refused():
    for name in RESERVED_NAMES:
        with pytest.raises(CasemateError, match=f"name: {name} is a name that storages use"):
            loads(TEXT.replace("NAME", name).replace("EPOCHS", "1"), source="x")
