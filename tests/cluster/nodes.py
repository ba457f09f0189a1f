"""Real Ray clusters of several nodes on this machine, each with a home of its own.

Ray's own `AutoscalingCluster` needs a file that is not in the wheel, and begins and ends with
`ray stop --force`, which kills every Ray of the machine. Here the same autoscaler and the same
provider of nodes start, and only our own processes are ended.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.cli import wait_until

RAY = Path(sys.executable).with_name("ray")
QUICK = {  # a lost node is noticed after a second or two, not twelve
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}

LISTS = (  # keys of an autoscaler's configuration that must be there
    *("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands"),
    *("setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands"),
)


@dataclass
class Node:
    """A `ray start --block` and everything below it."""

    process: subprocess.Popen[bytes]

    def children(self, name: str) -> list[psutil.Process]:
        found = []
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if name in " ".join(child.cmdline()[:1]):
                        found.append(child)
        return found

    def kill_raylet(self) -> None:
        """kill -9: what a power cut looks like to the others."""
        for raylet in self.children("raylet/raylet"):
            raylet.kill()

    def end(self) -> None:
        """End all processes of this node, and of nodes that it started."""
        parts: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            parts = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        for part in parts:
            with suppress(psutil.NoSuchProcess):
                part.kill()
        self.process.wait(timeout=60)


@dataclass
class Head(Node):
    """The head: where drivers connect."""

    port: int
    home: str

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ray(home: str, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [RAY, "start", "--block", "--disable-usage-stats", "--object-store-memory=134217728",
         f"--dashboard-agent-listen-port={free_port()}", *words],
        env={**os.environ, **QUICK, "RAY_TMPDIR": home, "AUTOSCALER_UPDATE_INTERVAL_S": "1",
             "RAY_FAKE_CLUSTER": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


@contextmanager
def head(*words: str, num_cpus: int = 0, port: int | None = None) -> Iterator[Head]:
    """A head with its own home; everything below it is ended."""
    home, port = tempfile.mkdtemp(prefix="cmc-"), port or free_port()
    process = start_ray(
        home, "--head", f"--port={port}", f"--temp-dir={home}", f"--num-cpus={num_cpus}",
        "--include-dashboard=false", f"--ray-client-server-port={free_port()}", *words,
    )  # fmt: skip
    try:
        wait_until(lambda: answers(port))
        yield Head(process, port, home)
    finally:
        Node(process).end()
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def node(of: Head, *words: str, num_cpus: int = 1) -> Iterator[Node]:
    """A further node of a cluster."""
    process = start_ray(of.home, f"--address={of.address}", f"--num-cpus={num_cpus}", *words)
    try:
        yield Node(process)
    finally:
        Node(process).end()


@contextmanager
def autoscaled(node_types: dict[str, Any], **config: Any) -> Iterator[Head]:
    """A head without CPUs and an autoscaler that starts nodes of these types on demand."""
    port = free_port()
    first = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    made = {
        "cluster_name": "fake_multinode",
        "provider": {
            "type": "fake_multinode",
            "gcs_address": f"127.0.0.1:{port}",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {**node_types, "ray.head.default": first},
        "max_workers": 8,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{key: [] for key in LISTS},
        **config,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(made, file)
        file.flush()
        with head(f"--autoscaling-config={file.name}", port=port) as started:
            yield started


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
