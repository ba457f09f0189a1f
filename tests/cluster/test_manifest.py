"""A RayJob's command on a real cluster, sent as KubeRay's submitter sends it."""

import os
import subprocess
import time
from contextlib import suppress

import psutil
import pytest

from pipelines import api
from tests.e2e.cli import TINY, step_folder, wait_until, write_recipe
from tests.e2e.heads import RAY, ray_head, ray_node

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


PATH = f"{RAY.parent}{os.pathsep}{os.environ['PATH']}"


def ray(command: str) -> subprocess.Popen:
    """A command of Ray, read by a shell as in the submitter's pod."""
    return subprocess.Popen(
        ["bash", "-c", f"ray {command}"],
        env={**os.environ, "PATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_command_of_a_rayjob_runs_on_its_cluster(tmp_path):
    """The head has no CPU: work that does not leave it would wait for ever."""
    storage, mount = tmp_path / "runs", tmp_path / "mount"
    elsewhere = {"cluster": {"address": "192.0.2.1:6379", "object_store_mb": 100}}
    recipe = write_recipe(tmp_path / "tiny.yaml", {**TINY, **elsewhere})
    made = api.manifest(str(recipe), image="casemate:0.1.0", claim=[f"runs:{storage}"])
    mount.mkdir()
    stored = next(d for d in made.documents if d["kind"] == "ConfigMap")
    (mount / "recipe.yaml").write_text(stored["data"]["recipe.yaml"])
    entrypoint = made.documents[-1]["spec"]["entrypoint"].replace("/etc/casemate", str(mount))
    # On Kubernetes the image sets PATH, for the head and so for its jobs.
    with (
        ray_head(num_cpus=0, env={"PATH": PATH}) as head,
        ray_node(head, options=["--num-cpus=2"]),
    ):
        at = f"--address {head.dashboard}"
        send = f"job submit {at} --submission-id tiny --no-wait -- {entrypoint}"
        wait_until(lambda: ray(send).wait() == 0, seconds=300)  # its agent starts late
        log, raylets = ray(f"job logs {at} --follow tiny"), set()
        while log.poll() is None:
            with suppress(psutil.NoSuchProcess):
                raylets |= {process.pid for process in head.processes("raylet/raylet ")}
            time.sleep(0.5)
        state = ray(f"job status {at} tiny").communicate()[0]
        assert "succeeded" in state, log.communicate()[0] + state
        assert len(raylets) == 1  # that of the head: the job started no Ray of its own
    assert (step_folder(storage, "report") / "report.html").is_file()
