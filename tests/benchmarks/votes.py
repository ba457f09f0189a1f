"""`make bench`: votes files of a large certificate: merging, reading and verifying them.

Synthetic votes of 1,000 classes (one with probability 0.5 to 1, the others equally likely) arrive
as the results of a cluster do: tables of 26 blocks of 1,000 draws, shuffled, some of them twice.
Printed: seconds of the merge without those of making the votes, of `write_certificate` and of
`verify`, and the growth of the peak resident memory of a process over that of one that did the
same with a single item.

The default is a large job, 10,000 items x 100,000 draws: 10^9 predictions, two or three minutes on
two idle cores, 2.5 GB of temporary files. `--items` makes it smaller.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from components.certify.certificate import write_certificate
from components.certify.header import ImageShape, VotesHeader
from components.certify.verify import verify
from components.certify.vote_rows import SCHEMA, VOTES_NAME
from components.certify.votes import read_votes, write_votes
from components.core.noise_streams import NOISE_IMPL
from tests.benchmarks.table import promise

DRAWS, BLOCK, SELECT, CLASSES = 100_000, 1_000, 100, 1_000
GROUP, TWICE = 26, 50  # units in a table; every 50th table arrives twice
LIMIT_MB, LIMIT_SECONDS = 300, 180  # seconds of the merge, memory of all phases
CLAIM = {"failure_prob": 0.001, "radii": [0.5, 1.0]}
PHASES = ("merge", "claim", "verify")


def header_of(num_items: int) -> VotesHeader:
    settings = {"sigma": 0.5, "num_select": SELECT, "num_estimate": DRAWS, "run_seed": 0}
    return VotesHeader(
        kind="gaussian", run_id="bench", model_digest="", dataset_digest="", num_classes=CLASSES,
        image=ImageShape(3, 224, 224), settings={**settings, "method": "fixed"},
        noise_impl=NOISE_IMPL, num_items=num_items, software={},
    )  # fmt: skip


class Tables:
    """Tables of the units of all items; `seconds` is the time that it took to make them."""

    def __init__(self, num_items: int) -> None:
        self.num_units, self.seconds = num_items * (DRAWS // BLOCK), 0.0

    def __iter__(self) -> Iterator[pa.Table]:
        groups = range(0, self.num_units, GROUP)
        order = np.random.default_rng(1).permutation(len(groups))
        for number, place in enumerate(order.tolist()):
            for _ in range(2 if number % TWICE == 0 else 1):
                began = time.perf_counter()
                table = self.table(groups[place])
                self.seconds += time.perf_counter() - began
                yield table

    def table(self, first: int) -> pa.Table:
        """The rows of GROUP units: the first block of an item comes with its selecting draws."""
        rows = []
        rng = np.random.default_rng(first)
        for unit in range(first, min(first + GROUP, self.num_units)):
            item, block = divmod(unit, DRAWS // BLOCK)
            spans = [("estimate", block * BLOCK, BLOCK)]
            rows += [(item, *span) for span in [("select", 0, SELECT)] * (not block) + spans]
        sizes = np.array([size for *_, size in rows])
        items = np.repeat([item for item, *_ in rows], sizes)
        top = rng.random(sizes.sum(), np.float32) < 0.5 + 0.5 * (items * 0.618 % 1)
        others = rng.integers(0, CLASSES, sizes.sum(), np.uint16)
        votes = np.where(top, (items % CLASSES).astype(np.uint16), others)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        columns = {
            "item_id": [f"test-{item:08d}" for item, *_ in rows],
            "label": [item % CLASSES for item, *_ in rows],
            "image_sha256": [f"{item:064x}" for item, *_ in rows],
            "stream": [stream for _, stream, *_ in rows],
            "start": [start for *_, start, _ in rows],
            "stop": [start + size for *_, start, size in rows],
            "predictions": pa.ListArray.from_arrays(offsets, votes),
        }
        return pa.table(columns, SCHEMA)


def work(folder: Path, phase: str, num_items: int) -> dict[str, float]:
    """Seconds of a phase, and the peak of this process."""
    tables, began = Tables(num_items), time.perf_counter()
    if phase == "merge":
        write_votes(folder / VOTES_NAME, tables, header_of(num_items).to_dict())
    elif phase == "claim":
        write_certificate(folder, read_votes(folder / VOTES_NAME), CLAIM)
    else:
        report = verify(folder)
        assert report.ok, report.problems[:3]
        assert report.num_items == num_items
    seconds = time.perf_counter() - began - tables.seconds
    # VmHWM, not ru_maxrss: the latter remembers the parent that started us
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {"seconds": seconds, "made_in": tables.seconds, "peak_mb": int(peak[1]) / 1024}


def measure(folder: Path, num_items: int) -> dict[str, dict[str, float]]:
    """All phases, each in a fresh process."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.benchmarks.votes", "--items", str(num_items)]
    found = {}
    for phase in PHASES:
        done = subprocess.run([*command, "--phase", phase, folder], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        found[phase] = json.loads(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--phase", choices=PHASES)
    parser.add_argument("folder", nargs="?", type=Path)
    given = parser.parse_args()
    if given.phase:
        print(json.dumps(work(given.folder, given.phase, given.items)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        one = measure(Path(name) / "one", 1)
        found = measure(Path(name) / "all", given.items)
        megabytes = (Path(name) / "all" / VOTES_NAME).stat().st_size / 2**20
    growth = {phase: found[phase]["peak_mb"] - one[phase]["peak_mb"] for phase in PHASES}
    print(json.dumps({
        "benchmark": "votes files", "items": given.items, "draws": DRAWS,
        "file_mb": round(megabytes),
        "seconds": {phase: round(found[phase]["seconds"], 1) for phase in PHASES},
        "seconds_of_making_votes": round(found["merge"]["made_in"], 1),
        "growth_mb": {phase: round(growth[phase]) for phase in PHASES},
        "peak_mb": {phase: round(found[phase]["peak_mb"]) for phase in PHASES},
        "limits": {"growth_mb": LIMIT_MB, "seconds": LIMIT_SECONDS},
    }))  # fmt: skip
    merge, most = found["merge"]["seconds"], max(growth.values())
    kept = [
        promise(
            f"seconds to merge votes of {given.items} items", ratio=merge, at_most=LIMIT_SECONDS,
            ours=f"{merge:.1f} s",
        ),
        promise("MB of memory that votes files add", ratio=most, at_most=LIMIT_MB),
    ]  # fmt: skip
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
