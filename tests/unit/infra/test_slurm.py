"""The Slurm script with stand-ins for srun and ray: arguments, token, exit codes; shellcheck."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cli import ROOT

SCRIPT = ROOT / "infra" / "slurm" / "casemate.sbatch"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
RAY = """#!/bin/bash
printf '%s\\n' "$@" >"$NOTES/ray"
env | grep ^RAY_ >"$NOTES/env"
[[ $RAY_FAILS ]] && exit 0  # as `ray symmetric-run` does
while [[ $1 != -- ]]; do shift; done
shift
"$@"
"""
CASEMATE = """#!/bin/bash
printf '%s\\n' "$@" >"$NOTES/casemate"
exit "$FLOW_ENDS"
"""


@pytest.fixture
def job(tmp_path):
    """Runs the script as a job of Slurm would; returns its exit code."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "temporary").mkdir()
    for name, text in (("srun", SRUN), ("ray", RAY), ("casemate", CASEMATE)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (programs / "python3").symlink_to(sys.executable)

    def run(*arguments: str, flow_ends: int = 0, ray_fails: bool = False) -> int:
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "4", "CASEMATE_HEAD_IP": "10.0.0.7",
            "SLURM_SUBMIT_DIR": str(tmp_path), "NOTES": str(tmp_path),
            "TMPDIR": str(tmp_path / "temporary"), "FLOW_ENDS": str(flow_ends),
            "RAY_FAILS": "yes" if ray_fails else "",
        }  # fmt: skip
        return subprocess.run(["bash", SCRIPT, *arguments], env=env, check=False).returncode

    return run


def words(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_one_ray_over_all_nodes_with_a_token_and_the_flow_on_it(job, tmp_path):
    assert job("demo", "--set", "name=a b", "--storage", "/shared/runs") == 0
    flow = ["run", "demo", "--set", "name=a b", "--storage", "/shared/runs"]
    assert words(tmp_path / "casemate") == [*flow, "--address", "10.0.0.7:23456"]
    ray = words(tmp_path / "ray")
    start = ["symmetric-run", "--address", "10.0.0.7:23456", "--min-nodes", "4"]
    assert ray[: ray.index("--")] == [*start, "--disable-usage-stats"]
    env = dict(line.split("=", 1) for line in words(tmp_path / "env"))
    assert env["RAY_AUTH_MODE"] == "token"
    assert len(env["RAY_AUTH_TOKEN"]) == 64
    assert not any(env["RAY_AUTH_TOKEN"] in word for word in ray)
    assert list((tmp_path / "temporary").iterdir()) == []  # the note of the exit code


@pytest.mark.parametrize(("flow_ends", "ray_fails", "code"), [(2, False, 2), (0, True, 1)])
def test_the_job_ends_as_the_flow_does(job, flow_ends, ray_fails, code):
    assert job("demo", flow_ends=flow_ends, ray_fails=ray_fails) == code


def test_without_a_recipe_it_says_how_it_is_used(job):
    assert job() != 0


def test_ray_has_the_command_with_these_options():
    from ray.scripts.symmetric_run import symmetric_run

    assert {"--address", "--min-nodes"} <= {o for p in symmetric_run.params for o in p.opts}


def test_shellcheck_finds_nothing():
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([program, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
