"""The Slurm script on two nodes: namespaces of this machine, and a stand-in for srun.

Each node has an address of its own, and `ray stop` at the end sees the processes of its node only.
"""

import os
import shutil
import subprocess

import pytest

from tests.e2e.cli import ROOT, TINY, step_folder, tiny_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
NODES = (f"cm{os.getpid()}a", f"cm{os.getpid()}b")
SRUN = f"""#!/bin/bash
# Runs its command on both nodes; the second ends with the first, as with --wait.
wanted=""
while [[ $1 == --* ]]; do [[ $1 == --wait=* ]] && wanted=yes; shift; done
[[ $wanted ]] || {{ echo "srun: no --wait" >&2; exit 9; }}
on() {{
  ip netns exec "$1" unshare --pid --mount --fork --kill-child --mount-proc sh -c '
    mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && exec "$@"' sh "${{@:2}}"
}}
on {NODES[1]} "$@" &
second=$!
on {NODES[0]} "$@"
ended=$?
kill "$second"
exit "$ended"
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def nodes():
    """Two network namespaces with a cable between them: 10.77.0.1 and 10.77.0.2."""
    if os.getuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip (iproute2) and unshare")
    try:
        for node in NODES:
            ip("netns", "add", node)
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces are not allowed here")
    first, second = NODES
    ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "eth0", "netns", second)
    for number, node in enumerate(NODES, start=1):
        ip("-n", node, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", node, "link", "set", device, "up")
    yield NODES
    for node in NODES:
        ip("netns", "del", node)


def test_a_flow_runs_on_both_nodes_and_ends_with_them(nodes, tmp_path):
    recipe = tiny_recipe(
        tmp_path / "tiny.yaml",
        data={**TINY["data"], "limits": {"train": 200, "val": 40, "test": 24}},
        train={key: v for key, v in TINY["train"].items() if key != "variants"} | {"epochs": 1},
        attack={"linf": {"eps": 0.05, "attacks": [{"kind": "fgsm"}], "sanity": None}},
        certify={}, report={}, cluster={"num_actors": 2},
    )  # fmt: skip
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    own = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env = {
        **own, "PATH": f"{srun.parent}:{own['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": "2",
    }  # fmt: skip
    script = ROOT / "infra" / "slurm" / "casemate.sbatch"
    done = subprocess.run(
        ["ip", "netns", "exec", nodes[0], "bash", script, recipe, "--storage", tmp_path / "runs"],
        env=env, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "On head node" in done.stdout
    assert "On worker node. Connecting to Ray cluster at 10.77.0.1" in done.stdout
    assert (step_folder(tmp_path / "runs", "attack.linf") / "attacks.parquet").exists()
    assert (step_folder(tmp_path / "runs", "report") / "report.html").exists()
