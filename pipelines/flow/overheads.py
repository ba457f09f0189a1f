"""Fixed times of a flow on this machine, from a real flow that computes next to nothing.

`casemate run` on a few digits and a network of a few weights, in a process of its own, with one
core, so that its steps follow each other: what they take is starts of processes, imports, files and
the tracking store.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from components.core.errors import CasemateError
from pipelines.recipe.costs import OWN_WORKERS, Seconds, Speed, StepCost
from pipelines.runtime.shipping import ROOT

FEW = {"eps": 0.1, "num_items": 4, "sanity": None, "attacks": [{"kind": "fgsm"}]}
FLOW: Mapping[str, object] = {
    "name": "overheads",
    "data": {"source": "digits", "limits": {"train": 32, "val": 16, "test": 16}},
    "model": {
        "architecture": "tiny_vit",
        "options": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 1},
    },
    "train": {"epochs": 1, "batch_size": 16},
    "attack": {"first": FEW, "second": FEW},
    "evaluate": None,
    "cluster": {"num_cpus": 1},
}
DONE = re.compile(r"^(\S+)\s+(?:\d+ min )?[\d.]+ s\s+\S+-[0-9a-f]{12}$")
KEPT = "kept"  # a sharded step whose workers were started by the one before it
STEPS = {
    **{"prepare": "prepare", "train": "train.main", "report": "report"},
    **{"attack": "attack.first", KEPT: "attack.second"},
}
LIKE = {"tune": "train"}  # stages that start what another one does; all others: attack
SAMPLES = 0.25  # seconds
ELSEWHERE = ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")  # the flow stays on this machine


class ProcessorTime:
    """Of a process and of all that it starts, also of those that have ended."""

    def __init__(self, pid: int) -> None:
        self._root, self._spent = psutil.Process(pid), dict[tuple[int, float], float]()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    @property
    def total(self) -> float:
        """Seconds so far; those of a process's last quarter of a second may be missing."""
        self._look()
        return sum(self._spent.values())

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stopped.wait(SAMPLES):
            self._look()

    def _look(self) -> None:
        try:
            found = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in found:
            try:
                times, key = process.cpu_times(), (process.pid, process.create_time())
            except psutil.NoSuchProcess:
                continue
            self._spent[key] = times.user + times.system


def timed_flow(command: list[str]) -> dict[str, Speed]:
    """Seconds of every step of a flow on one core: from the end of the step before to its own."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ELSEWHERE},
    )
    spent, began, before = ProcessorTime(process.pid), time.monotonic(), 0.0
    found: dict[str, Speed] = {}
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line.rstrip())
        if step := DONE.match(said[-1]):
            now, total = time.monotonic(), spent.total
            found[step[1]] = Speed(now - began, total - before)
            began, before = now, total
    spent.stop()
    if process.wait():
        last = next((text for text in reversed(said) if text), "no word of why")
        raise CasemateError("--measure", "a small flow", f"does not run here: {last}")
    return found


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds by the clock and of the processor, of one step of a stage."""

    stages: Mapping[str, Speed]

    def of_step(self, cost: StepCost, num_workers: int, *, kept: bool) -> Seconds:
        """What a step takes besides its passes; its workers start at once."""
        name = LIKE.get(cost.stage, cost.stage)
        if cost.stage not in OWN_WORKERS:
            name = KEPT if kept else "attack"
        own = self.stages[name]
        count = 1 if cost.stage in ("prepare", "report") else num_workers
        return Seconds(own.wall, own.wall, count * own.cpu, count * own.cpu)


def measured_overheads() -> Overheads:
    """Those of this machine, now."""
    with tempfile.TemporaryDirectory(prefix="casemate-") as name:
        recipe = Path(name) / "overheads.yaml"
        kept = {
            "storage": {"root": f"{name}/runs"},
            "tracking": {"uri": f"sqlite:///{name}/runs.db"},
        }
        values = {**FLOW, **kept}
        recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
        found = timed_flow([sys.executable, "-m", "pipelines.cli", "run", str(recipe)])
    missing = [step for step in STEPS.values() if step not in found]
    if missing:
        raise CasemateError("--measure", "a small flow", f"has told nothing of {missing[0]}")
    return Overheads({stage: found[step] for stage, step in STEPS.items()})
