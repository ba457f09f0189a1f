"""Help answers at once: nothing heavy is loaded for it, and every command shows an example."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from pipelines.cli.main import app
from tests.e2e.cli import ROOT, call, mistake_of

pytestmark = pytest.mark.e2e
COMMANDS = sorted(n for n, c in typer.main.get_command(app).commands.items() if not c.hidden)
HEAVY = ("torch", "torchvision", "ray", "mlflow", "timm", "pandas", "scipy", "sklearn", "pyarrow")
ASK_EVERYTHING = """
import sys
from pipelines.cli.main import main
for command in sys.argv[2:]:
    sys.argv = ["casemate", *command.split(), "--help"]
    try:
        main()
    except SystemExit as stop:
        assert stop.code in (0, None), (command, stop.code)
loaded = sorted(set(HEAVY) & set(sys.modules))
assert not loaded, loaded
"""


def test_help_of_every_command_loads_nothing_heavy():
    script = f"HEAVY = {HEAVY!r}\n{ASK_EVERYTHING}"
    done = subprocess.run(
        [sys.executable, "-c", script, "commands:", "", *COMMANDS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == 1 + len(COMMANDS)


def test_help_lists_the_commands_and_the_exit_codes():
    told = call("--help")
    assert told.code == 0
    assert told.err == ""
    for command in COMMANDS:
        assert f"\n  {command} " in told.out
    assert "0 ok, 1 failed, 2 bad input" in " ".join(told.out.split())


def test_without_a_command_three_ways_in_are_shown():
    told = call()
    assert (told.code, told.err) == (0, "")
    named = {line.split()[0] for line in told.out.replace("casemate --", "").split("casemate ")[1:]}
    assert named <= set(COMMANDS)
    for way in ("My model", "My cluster", "A paper's table"):
        assert way in told.out


def test_a_word_that_is_no_command_or_option_is_one_line():
    said = call("atack", "--eps", 1)
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        "casemate: command: atack is unknown; did you mean 'attack'? `casemate --help` lists all\n"
    )
    for words, told in {
        ("attack", "--atacks", "fgsm"): "no such option: --atacks",
        ("verify",): "missing argument 'path'",
        ("verify", "x", "--resample", "many"): "invalid value for '--resample'",
    }.items():
        said = call(*words)
        (line,) = said.err.splitlines()
        assert (said.code, said.out) == (2, "")
        assert line.startswith(f"casemate: {told}"), line
        assert line.endswith(f"; casemate {words[0]} --help shows what it takes")


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("certify", ("--band", 3), "--band: 3 needs --patch-sizes"),
        ("certify", ("--patch-sizes", 2, "--radii", "0.5"), "--radii: (0.5,) needs --sigma"),
        ("certify", ("--sigma", 0.2, "--stride", 3), "--stride: 3 needs --patch-sizes"),
        ("analyze", ("--study", "accumulation", "--num-items", 5), "--num-items: 5 does not apply"),
        ("attack", ("--attacks", "fgsm"), "attack: --eps is missing"),
        ("evaluate", ("--suite", "shifts"), "--suite: shifts needs the place of its images"),
    ],
)
def test_an_option_that_says_nothing_alone_is_refused(command, words, said):
    """Before a model or data are opened."""
    assert mistake_of(command, "--model", "m", "--data", "digits", *words).startswith(said)


def test_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = call("--version", "recipes")
    assert (told.code, told.out) == (0, f"casemate {project['version']}\n")


def test_shells_complete_commands_and_recipes():
    def completed(words: str) -> list[str]:
        asked = {"_CASEMATE_COMPLETE": "complete_bash", "COMP_WORDS": words}
        count = str(len(words.split(" ")) - 1)
        env = {**os.environ, **asked, "COMP_CWORD": count}
        command = [Path(sys.executable).parent / "casemate"]
        return subprocess.run(command, env=env, capture_output=True, text=True).stdout.split()

    assert completed("casemate recert") == ["recertify"]
    assert "demo" in completed("casemate run de")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_an_example_of_itself(command):
    told = call(command, "--help")
    assert told.code == 0
    assert told.err == ""
    assert f"Example: casemate {command} " in " ".join(told.out.split())


def test_reading_a_recipe_loads_nothing_heavy():
    code = "import sys; from pipelines.recipe import load; load.load('demo'); print(*sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert not {"torch", "ray", "mlflow", "timm", "scipy"} & set(said.stdout.split())
