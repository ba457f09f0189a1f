"""`make bench`: what reading a dataset costs in memory, whole and shard by shard.

A dataset of noise images, which compress to nothing less, is read for one epoch by a fresh process
that holds it whole, and by one that holds two shards of it. Compared is the growth of the peak
resident memory over a process that reads a single item: its libraries are loaded too.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from components.data.fitting import Fitting
from components.data.prepared import ImageSplit, LazySplit, PreparedDataset
from components.data.shards import describe_dataset, open_job, plan_shards, write_shard
from components.data.sources.base import Entry
from tests.benchmarks.table import promise

SIDE, SHARD, NUM_SHARDS = 192, 64, 16  # 113 MB of pixels
CACHE_SHARDS = 2
LIMIT = 0.5  # of the memory that the whole dataset takes
KINDS = ("one item", "lazy", "whole")


class Noise:
    """Images that follow from their number."""

    classes = ("a", "b")

    def entries(self) -> list[Entry]:
        return [Entry(f"noise-{i}", i % 2, None, str(i)) for i in range(SHARD * NUM_SHARDS)]

    def decode(self, entry: Entry) -> np.ndarray:
        rng = np.random.default_rng(int(entry.locator))
        return rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def write_dataset(folder: Path) -> None:
    source = Noise()
    entries = source.entries()
    job = open_job(source, entries, folder=folder, fitting=Fitting(), on_error="fail")
    plans = plan_shards({"train": entries}, shard_size=SHARD)
    text = describe_dataset(
        [write_shard(job, plan) for plan in plans],
        classes=source.classes, shape=job.shape, split_names=("train",), source={},
    )  # fmt: skip
    (folder / "dataset.json").write_text(text)


def read(folder: Path, kind: str) -> dict[str, float]:
    """One epoch in training order; this process's peak and its images per second."""
    import torch

    dataset = PreparedDataset.open(folder)
    dataset.load("train", limit=1)
    began, count = time.perf_counter(), 0
    if kind != "one item":
        split: ImageSplit | LazySplit
        lazy = dataset.lazy("train", cache_shards=CACHE_SHARDS)
        split = dataset.load("train") if kind == "whole" else lazy
        order = split.order(torch.Generator().manual_seed(0))
        for index in order.split(32):
            count += len(split.rows(index))
    seconds = time.perf_counter() - began
    # VmHWM, not ru_maxrss: the latter remembers the parent that started us
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {"peak_mb": int(peak[1]) / 1024, "images_per_second": count / seconds}


def main() -> int:
    if len(sys.argv) == 3:
        print(json.dumps(read(Path(sys.argv[1]), sys.argv[2])))
        return 0
    with tempfile.TemporaryDirectory() as name:
        write_dataset(Path(name))
        command = [sys.executable, "-m", "tests.benchmarks.memory", name]
        found = {
            kind: json.loads(
                subprocess.run([*command, kind], capture_output=True, check=True).stdout
            )
            for kind in KINDS
        }
    growth = {kind: found[kind]["peak_mb"] - found["one item"]["peak_mb"] for kind in KINDS[1:]}
    ratio = growth["lazy"] / growth["whole"]
    print(json.dumps({
        "benchmark": "memory of reading",
        "dataset_mb": round(SHARD * NUM_SHARDS * SIDE**2 * 3 / 2**20),
        "cached_shards": f"{CACHE_SHARDS} of {NUM_SHARDS}",
        "growth_mb": {kind: round(value, 1) for kind, value in growth.items()},
        "images_per_second": {kind: round(found[kind]["images_per_second"]) for kind in KINDS[1:]},
        "ratio": round(ratio, 3), "limit": LIMIT,
    }))  # fmt: skip
    return int(not promise(
        "memory of reading, shard by shard / whole", ratio=ratio, at_most=LIMIT,
        peer=f"whole {growth['whole']:.0f} MB", ours=f"{growth['lazy']:.0f} MB",
    ))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
