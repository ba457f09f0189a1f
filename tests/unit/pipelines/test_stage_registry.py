"""The stages of a flow: one folder, one section and one line of the registry each."""

import subprocess
import sys
from pathlib import Path

import pytest

import pipelines.stages
from pipelines.flow.plan import steps_of
from pipelines.recipe.load import load
from pipelines.recipe.schema.recipe import Recipe
from pipelines.stages.registry import STAGES, Stage

FOLDER = Path(pipelines.stages.__file__).parent


def test_every_folder_is_a_stage():
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert folders == set(STAGES)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_has_its_section_and_its_files(name):
    stage = STAGES[name]
    assert stage.name == name
    assert stage.section in Recipe.model_fields
    assert callable(stage.steps().steps)
    assert callable(stage.load().run)
    assert stage.headlines == hasattr(stage.steps(), "headlines")


def test_plans_are_made_without_torch_and_ray():
    code = (
        "import sys; from pathlib import Path; from pipelines.flow.plan import plan;"
        "from pipelines.recipe.load import load; plan(load('demo'), Path('runs'));"
        "print(sorted({'torch', 'ray', 'mlflow', 'timm'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_new_stage_is_a_folder_a_section_and_a_line(tmp_path, monkeypatch):
    folder = tmp_path / "count"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "steps.py").write_text(
        "from pipelines.stages.registry import Step\n"
        "def steps(planning):\n"
        "    return [Step('count', needs=('prepare',), identity={'seed': planning.recipe.seed})]\n"
    )
    monkeypatch.setattr(pipelines.stages, "__path__", [*pipelines.stages.__path__, str(tmp_path)])
    monkeypatch.setitem(STAGES, "count", Stage("count", section="seed", version=1, help="Count."))
    assert [step.name for step in steps_of(load("demo"))][-2:] == ["report", "count"]
