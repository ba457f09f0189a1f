"""A network, an attack, an objective and a data source of the user's own, through the CLI."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from pipelines.flow.plan import plan
from pipelines.recipe import load as recipes
from tests.e2e.cli import ROOT, call, check_same_data, step_folder
from tests.e2e.heads import ray_head
from tests.e2e.own_things import RECIPE, write_things

pytestmark = [pytest.mark.e2e, pytest.mark.ray]

LOAD = """
import sys
from pathlib import Path
from components.core.errors import CasemateError
from components.models.checkpoint import load_model
try:
    print(type(load_model(Path(sys.argv[1])).net).__name__)
except CasemateError as error:
    print(error)
"""


def test_own_things_are_trained_attacked_and_certified(tmp_path, ray_session, caplog):
    recipe = write_things(tmp_path / "mine")
    result = call("run", recipe, "--storage", tmp_path / "runs")
    assert result.code == 0, result.err
    assert "runs user code: python:own_things.py:Waves" in caplog.text
    flow = tmp_path / "runs"
    summary = json.loads((step_folder(flow, "attack.linf") / "summary.json").read_text())
    assert "SignNoise" in json.dumps(summary)
    shutil.rmtree(tmp_path / "mine")  # what follows needs the stored artifacts alone
    model = step_folder(flow, "train.main") / "model"
    assert "python:own_things.py@" in (model / "model.json").read_text()
    for name in ("patch", "l2"):
        checked = call("verify", step_folder(flow, f"certify.{name}"))
        assert checked.code == 0, checked.err
    # on a machine that has never seen the code, the model's folder is enough
    env = {**os.environ, "CASEMATE_USER_CODE": str(tmp_path / "empty")}
    command = [sys.executable, "-c", LOAD, str(model)]
    run = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "check": True}
    assert subprocess.run(command, **run).stdout == "Sequential\n"
    shutil.rmtree(model / "code")
    assert "has no code on this machine" in subprocess.run(command, **run).stdout


def fingerprints(recipe, tmp_path):
    return {s.name: s.fingerprint for s in plan(recipes.load(str(recipe)), tmp_path)}


def test_fingerprints_follow_the_code(tmp_path):
    recipe = write_things(tmp_path / "mine")
    before = fingerprints(recipe, tmp_path)
    elsewhere = write_things(tmp_path / "copy")
    assert fingerprints(elsewhere, tmp_path) == before
    stored = recipes.load(str(recipe)).to_yaml()
    with (tmp_path / "mine" / "own_waves.py").open("a") as helper:
        helper.write("\n# another state of the file\n")
    after = fingerprints(recipe, tmp_path)
    assert all(before[name] != after[name] for name in before)
    again = recipes.loads(stored, source="stored")  # names the state that it was made with
    assert {s.name: s.fingerprint for s in plan(again, tmp_path)} == before


def test_stored_recipes_are_opened_without_running_their_code(tmp_path):
    recipe = write_things(tmp_path / "mine")
    (tmp_path / "mine" / "own_things.py").write_text("raise SystemExit('was run')")
    opened = recipes.load(str(recipe), user_code=False)
    assert (
        opened.resolved()["attack"]["linf"]["attacks"][0] == RECIPE["attack"]["linf"]["attacks"][0]
    )
    assert opened.model.architecture == RECIPE["model"]["architecture"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "attack.linf.attacks.0.num_try=3",
            "attacks.0.num_try: 3 is unknown; did you mean 'num_tr",
        ),
        ("attack.linf.attacks.0.num_tries=0", "attacks.0.num_tries: 0 must be at least 1"),
        ("train.objective.gamma=-1", "train.objective.gamma: -1 must be"),
        ("model.options.widht=3", "model.options.widht: 3 is unknown; did you mean 'width'"),
        ("data.options.num_itms=3", "data.options.num_itms: 3 is unknown; did you mean 'num_items"),
        ("model.architecture=python:nowhere.py:build", "model.architecture: 'python:nowhere.py"),
        ("data.source=python:own_things.py:Wave", "Wave is unknown; did you mean 'Waves'?"),
        ("train.objective.kind=python:own_things.py:build", "has no settings"),
    ],
)
def test_mistakes_are_one_line(tmp_path, change, words):
    recipe = write_things(tmp_path / "mine")
    result = call("lint", recipe, "--set", change)
    assert result.code == 2, result.err
    *_, complaint = result.err.splitlines()
    assert words in complaint
    assert "Traceback" not in result.err


@pytest.fixture
def head():
    with ray_head() as found:
        yield found


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_drivers_and_jobs_take_the_users_own_code_along(cli, tmp_path, head):
    recipe = write_things(tmp_path / "mine", train=None, attack={}, certify={})
    here = {"CASEMATE_USER_CODE": str(tmp_path / "cache")}  # which the cluster does not look into
    driver = ("prepare", recipe, "--storage", tmp_path / "driver", "--address")
    dashboard = head.dashboard.removeprefix("http://")
    wrong = cli(*driver, dashboard, env=here)
    assert wrong.code == 2
    assert f"{dashboard} is the port of the dashboard; name that of the head" in wrong.err
    joined = cli(*driver, head.address, env=here)
    assert joined.code == 0, joined.err
    place = ("--storage", tmp_path / "job", "--address", head.dashboard)
    job = cli("submit", recipe, *place, "--wait", env=here)
    assert job.code == 0, job.out + job.err
    check_same_data(tmp_path / "driver", tmp_path / "job")
