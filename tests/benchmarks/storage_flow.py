"""`make bench`: a whole flow whose storage is an S3 server, against the same flow on a folder.

The demo in smoke size and the small recipe of the tests run through the command line, in turns and
each time into an empty storage with its own tracking database and an empty node cache. The server
is moto, a Python program on the same cores as the flow: what it computes counts as the flow's time.
The ratio is that of the median wall times; the seconds of each step are printed, so that a slow
step is found. Every request of the flow is counted by its method in one further run on S3.
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
from pathlib import Path

from tests.e2e.cli import ROOT, tiny_recipe
from tests.object_store import FaultyProxy, S3Server, free_port, serving

LIMIT = 1.25  # times as long as on a folder
STEP = re.compile(r"^(\S+) +([\d.]+) s  ", re.MULTILINE)
PLACES = ("folder", "S3")


def run_flow(words: Sequence[str], storage: str, scratch: Path) -> tuple[float, dict[str, float]]:
    """Run a flow in a process of its own; returns its seconds, and those of its steps."""
    env = {
        **os.environ,
        "CASEMATE_CACHE": str(scratch / "cache"),
        "RAY_worker_niceness": "0",  # other work of the machine slows both storages alike
        "MLFLOW_TRACKING_URI": f"sqlite:///{scratch}/mlflow.db",
    }
    command = [sys.executable, "-m", "pipelines.cli", "run", *words, "--storage", storage]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, check=False)
    seconds = time.monotonic() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    steps = {name: float(took) for name, took in STEP.findall(done.stderr + done.stdout)}
    return seconds, steps


def measure(name: str, words: Sequence[str], *, rounds: int, server: S3Server) -> float:
    """Run a flow on both storages in turns, print what was found; returns the ratio."""
    totals: dict[str, list[float]] = {place: [] for place in PLACES}
    steps: dict[str, list[dict[str, float]]] = {place: [] for place in PLACES}
    for turn in range(rounds):
        for place in PLACES if turn % 2 == 0 else reversed(PLACES):
            with tempfile.TemporaryDirectory() as folder:
                storage = f"{folder}/storage"
                if place == "S3":
                    storage = f"s3://{server.new_bucket()}/runs"
                seconds, own = run_flow(words, storage, Path(folder))
            totals[place].append(seconds)
            steps[place].append(own)
            print(f"storage_flow: {name} round {turn} {place:6} {seconds:6.1f} s", flush=True)
    for step in steps["folder"][0]:
        shown = " ".join(
            f"{place} {statistics.median(one[step] for one in steps[place]):6.1f} s"
            for place in PLACES
        )
        print(f"storage_flow: {name} {step:<16} {shown}")
    medians = {place: statistics.median(found) for place, found in totals.items()}
    ratio = medians["S3"] / medians["folder"]
    print(
        f"storage_flow: {name}: folder {medians['folder']:.1f} s, S3 {medians['S3']:.1f} s, "
        f"ratio {ratio:.2f} (limit {LIMIT}, {rounds} rounds)",
        flush=True,
    )
    return ratio


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
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryDirectory() as folder, serving(command, port):
        server = S3Server(f"http://127.0.0.1:{port}")
        os.environ.update(server.env)
        flows = {
            "tiny": [str(tiny_recipe(Path(folder) / "tiny.yaml"))],
            "demo": ["demo", "--smoke"],
        }
        ratios = []
        for name in asked.flow or flows:
            ratios.append(measure(name, flows[name], rounds=asked.rounds, server=server))
            found = count_requests(flows[name], server)
            shown = ", ".join(f"{count} {method}" for method, count in found.most_common())
            print(f"storage_flow: {name}: {found.total()} requests on S3: {shown}", flush=True)
    return int(max(ratios) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
