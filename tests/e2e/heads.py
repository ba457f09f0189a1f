"""Real Ray clusters on this machine: `ray start --head`, and further nodes beside it."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.e2e.cli import wait_until

RAY = Path(sys.executable).with_name("ray")
HEAD_SECONDS = 200.0


class Head(NamedTuple):
    """Where a cluster is reached: by drivers, and by job submission."""

    address: str
    dashboard: str
    process: subprocess.Popen
    home: Path

    def processes(self, word: str) -> list[psutil.Process]:
        """Its processes with a word in their command line."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [p for p in found if word in " ".join(p.cmdline())]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def ray_head(
    *, num_cpus: int = 2, options: Sequence[str] = (), env: dict[str, str] | None = None
) -> Iterator[Head]:
    """`ray start --head` with a home of its own; ended at once with all its processes."""
    gcs, port = free_port(), free_port()
    with home_folder("cmh-") as home:
        command = [
            *(RAY, "start", "--head", "--block", f"--num-cpus={num_cpus}", f"--port={gcs}"),
            *(f"--dashboard-port={port}", f"--temp-dir={home}", "--disable-usage-stats"),
            *(f"--ray-client-server-port={free_port()}", "--object-store-memory=134217728"),
            f"--dashboard-agent-listen-port={free_port()}",  # 52365 may be another Ray's
            *options,
        ]
        with running(command, env={"RAY_TMPDIR": home, **(env or {})}) as process:
            wait_until(lambda: answers(port) or process.poll() is not None, seconds=HEAD_SECONDS)
            assert process.poll() is None, "the head has ended"
            yield Head(f"127.0.0.1:{gcs}", f"http://127.0.0.1:{port}", process, Path(home))


@contextmanager
def ray_node(
    head: Head,
    *,
    options: Sequence[str] = (),
    env: dict[str, str] | None = None,
    before: str = "",
) -> Iterator[subprocess.Popen]:
    """Another node of a head's cluster.

    `before` are shell commands in a mount namespace of its own, e.g. to hide a folder.
    """
    with home_folder("cmn-") as home:
        command = [
            *(str(RAY), "start", "--block", f"--address={head.address}", "--num-cpus=1"),
            *("--object-store-memory=80000000", "--disable-usage-stats"),
            f"--dashboard-agent-listen-port={free_port()}",
            *options,
        ]
        if before:
            script = f'{before} && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
        with running(command, env={"RAY_TMPDIR": home, **(env or {})}) as process:
            log = Path(home, "start.log")  # nodes that start together block each other
            wait_until(lambda: "Ray runtime started" in log.read_text(), seconds=HEAD_SECONDS)
            yield process


@contextmanager
def home_folder(prefix: str) -> Iterator[str]:
    """A short place for sockets and logs; what a killed process still writes is left."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as home:
        yield home


@contextmanager
def running(command: Sequence[object], *, env: dict[str, str]) -> Iterator[subprocess.Popen]:
    """A process in a session of its own, killed in the end with all below it."""
    with Path(env["RAY_TMPDIR"], "start.log").open("w") as log:
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **env},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            for part in psutil.Process(process.pid).children(recursive=True):  # it drains for 30 s
                with suppress(psutil.NoSuchProcess):
                    part.kill()
        process.kill()
        process.wait(timeout=60)
