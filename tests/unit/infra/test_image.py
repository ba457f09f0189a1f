"""The Dockerfile: valid, in step with the project and its lock, small where code changes."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "infra" / "image" / "Dockerfile"
HADOLINT = Path(sys.executable).parent / "hadolint"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKED = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.M))
METADATA = {PROJECT["project"]["readme"], "LICENSE", "pyproject.toml"}


def instructions(text: str) -> list[list[str]]:
    """Words of every instruction, comments removed, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [line.split() for line in joined.splitlines() if line.strip()]


def stages(text: str) -> dict[str, list[list[str]]]:
    """Instructions of every stage, by its name; what stands before the first is under `''`."""
    found: dict[str, list[list[str]]] = {"": []}
    for words in instructions(text):
        if words[0] == "FROM":
            found[words[-1]] = []
        found[list(found)[-1]].append(words)
    return found


STAGES = stages(DOCKERFILE.read_text())


def copied(stage: str) -> set[str]:
    """What a stage copies out of the checkout."""
    copies = [words[1:-1] for words in STAGES[stage] if words[0] in ("COPY", "ADD")]
    return {path for paths in copies if not paths[0].startswith("--from=") for path in paths}


def defaults() -> dict[str, str]:
    """Defaults of the build's arguments."""
    every = (words for stage in STAGES.values() for words in stage)
    given = (shlex.split(" ".join(words[1:]))[0] for words in every if words[0] == "ARG")
    return dict(argument.split("=", 1) for argument in given if "=" in argument)


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing():
    found = hadolint(DOCKERFILE.read_text())
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("\nCOPY components", "\nCOPPY components"),
        ("--from=code", "--form=code"),
        ("USER 1000:1000", "USER root"),
    ],
)
def test_hadolint_sees_a_mistake(right, wrong):
    text = DOCKERFILE.read_text()
    assert text.count(right) == 1
    assert hadolint(text.replace(right, wrong)).returncode == 1


def test_code_is_the_packages_of_the_project():
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert copied("code") == {*packages, *METADATA}
    targets = {words[1]: words[2] for words in STAGES["code"] if words[0] == "COPY"}
    assert all(targets[name] == name for name in packages)  # a folder alone would lose its name


def test_packages_are_installed_without_sight_of_the_code():
    assert copied("lock") == {"pyproject.toml", "requirements.lock"}
    assert copied("tools") == copied("runtime") == set()
    layers = [words for words in STAGES["runtime"] if words[0] in ("COPY", "RUN")]
    code, packages = (
        next(i for i, words in enumerate(layers) if name in words)
        for name in ("--from=code", "sync")
    )
    assert packages < code == len(layers) - 1  # a change of the code repeats the last layer alone


def test_the_context_is_what_is_copied():
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in ignore if line.startswith("!")}
    assert ignore.index("*") < min(ignore.index(f"!{name}") for name in let_in)
    assert let_in == set().union(*(copied(stage) for stage in STAGES))
    assert all((ROOT / name).exists() for name in let_in)


def test_the_base_has_the_locked_ray_and_names_no_registry():
    image, tag = defaults()["BASE"].split(":")
    version, python, platform = tag.split("-")
    assert version == LOCKED["ray"]
    assert PROJECT["project"]["requires-python"] == ">=3.11,<3.12"
    assert python == "py311"
    assert platform == "cu" + LOCKED["cuda-toolkit"].replace(".", "")[:3]
    assert "." not in image.split("/")[0]


def test_extras_of_the_image_are_locked():
    extras = PROJECT["project"]["optional-dependencies"]
    for extra in defaults()["EXTRAS"].split():
        for requirement in extras[extra]:
            assert re.split(r"[\[<>=~ ]", requirement)[0] in LOCKED, requirement


def test_the_image_is_labelled_and_runs_without_root():
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", DOCKERFILE.read_text()))
    assert labels >= {"title", "version", "revision", "source", "licenses"}
    users = [words[1] for words in STAGES["runtime"] if words[0] == "USER"]
    assert users[-1].split(":")[0].isdigit()
    assert int(users[-1].split(":")[0]) > 0


def test_make_fills_in_version_and_revision():
    command = ["make", "--dry-run", "image", "BUILDER=docker", "BASE=debian:12"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    given = dict(re.findall(r"--build-arg (\w+)=(\S+)", out))
    assert given["VERSION"] == PROJECT["project"]["version"]
    assert given["BASE"] == "debian:12"
    assert set(given) <= set(defaults())
    assert re.fullmatch(r"([0-9a-f]{40}(-dirty)?)?", given.get("REVISION", ""))
