"""`make bench`: a whole flow whose storage is an S3 server, against the same flow on a folder.

The demo in smoke size and the small recipe of the tests run through the command line, in turns and
each time into an empty storage with its own tracking database and an empty node cache. The server
is moto, a Python program on the same cores as the flow: what it computes counts as the flow's time.
The ratio is that of the median wall times. Seconds of processors, of the flow with its Ray and the
server, are a second measure, for a machine that does other work beside; the seconds of each step
show a slow one. The requests of the flow are counted by their method in one further run on S3.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.benchmarks.table import promise
from tests.e2e.cli import ROOT, tiny_recipe
from tests.object_store import FaultyProxy, S3Server, free_port, moto_command, serving

LIMIT = 1.25  # times as long as on a folder
STEP = re.compile(r"^(\S+) +([\d.]+) s  ", re.MULTILINE)
PLACES = ("folder", "S3")


class Spent:
    """Seconds of processors of a process and all below it, looked at until it ends."""

    def __init__(self, pid: int) -> None:
        self.seen: dict[tuple[int, float], float] = {}
        self.top = psutil.Process(pid)

    def look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for process in [self.top, *self.top.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    self.seen[process.pid, process.create_time()] = times.user + times.system

    @property
    def seconds(self) -> float:
        return sum(self.seen.values())


class Measured(NamedTuple):
    """One run of a flow."""

    wall: float
    processors: float
    steps: dict[str, float]


def run_flow(words: Sequence[str], storage: str, scratch: Path) -> Measured:
    """Run a flow in a process of its own."""
    env = {
        **os.environ,
        "CASEMATE_CACHE": str(scratch / "cache"),
        "RAY_worker_niceness": "0",  # other work of the machine slows both storages alike
        "MLFLOW_TRACKING_URI": f"sqlite:///{scratch}/mlflow.db",
    }
    command = [sys.executable, "-m", "pipelines.cli", "run", *words, "--storage", storage]
    began = time.monotonic()
    with (scratch / "said").open("w+") as said:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said)
        spent = Spent(process.pid)
        while process.poll() is None:
            spent.look()
            time.sleep(0.25)
        wall = time.monotonic() - began
        said.seek(0)
        text = said.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {text}")
    steps = {name: float(took) for name, took in STEP.findall(text)}
    return Measured(wall, spent.seconds, steps)


def measure(name: str, words: Sequence[str], *, rounds: int, server: S3Server, pid: int) -> float:
    """Run a flow on both storages in turns, print what was found; returns the ratio."""
    found: dict[str, list[Measured]] = {place: [] for place in PLACES}
    for turn in range(rounds):
        for place in PLACES if turn % 2 == 0 else reversed(PLACES):
            moto = Spent(pid)
            moto.look()
            with tempfile.TemporaryDirectory() as folder:
                storage = f"{folder}/storage"
                if place == "S3":
                    storage = f"s3://{server.new_bucket()}/runs"
                one, before = run_flow(words, storage, Path(folder)), moto.seconds
            moto.look()
            one = one._replace(processors=one.processors + moto.seconds - before)
            found[place].append(one)
            print(
                f"storage_flow: {name} round {turn} {place:6} {one.wall:6.1f} s, "
                f"{one.processors:.1f} s of processors ({moto.seconds - before:.1f} s of moto)",
                flush=True,
            )
    for step in found["folder"][0].steps:
        shown = " ".join(
            f"{place} {statistics.median(one.steps[step] for one in found[place]):6.1f} s"
            for place in PLACES
        )
        print(f"storage_flow: {name} {step:<16} {shown}")
    ratios = []
    for what in ("wall", "processors"):
        medians = {p: statistics.median(getattr(one, what) for one in found[p]) for p in PLACES}
        ratios.append(medians["S3"] / medians["folder"])
        print(
            f"storage_flow: {name} {what}: folder {medians['folder']:.1f} s, "
            f"S3 {medians['S3']:.1f} s, ratio {ratios[-1]:.2f} (limit {LIMIT}, {rounds} rounds)",
            flush=True,
        )
    return ratios[0]


def count_requests(words: Sequence[str], server: S3Server) -> Counter[str]:
    """The requests of one flow by method."""
    proxy = FaultyProxy(server.endpoint)
    with proxy.running() as endpoint, tempfile.TemporaryDirectory() as folder:
        before = os.environ["AWS_ENDPOINT_URL"]
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        try:
            run_flow(words, f"s3://{server.new_bucket()}/runs", Path(folder))
        finally:
            os.environ["AWS_ENDPOINT_URL"] = before
    return Counter(method for method, _ in proxy.requests)


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--flow", choices=["tiny", "demo"], action="append")
    asked = options.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, serving(moto_command(port), port) as moto:
        server = S3Server(f"http://127.0.0.1:{port}")
        os.environ.update(server.env)
        flows = {
            "tiny": [str(tiny_recipe(Path(folder) / "tiny.yaml"))],
            "demo": ["demo", "--smoke"],
        }
        kept = []
        for name in asked.flow or flows:
            ratio = measure(name, flows[name], rounds=asked.rounds, server=server, pid=moto.pid)
            title = f"flow {name}, storage on S3 (moto) / folder"
            kept.append(promise(title, ratio=ratio, at_most=LIMIT, peer="folder"))
            requests = count_requests(flows[name], server)
            shown = ", ".join(f"{count} {method}" for method, count in requests.most_common())
            print(f"storage_flow: {name}: {requests.total()} requests on S3: {shown}", flush=True)
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
