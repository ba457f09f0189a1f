"""`make bench`: small parts through the store, on a folder and on an S3 server, against files.

Parts of the size that a lease of certify leaves are written and read by one process: as plain
files (written, synced, renamed: `components.core.files`), through the store on a folder of the same
disk, and through the store on a moto server of this machine. The three take turns in rounds; ratios
are medians over the rounds. moto is a Python server: its ratio bounds what the protocol costs, it
does not predict a real bucket.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from components.core.files import write_atomic
from pipelines.runtime.store import Store
from tests.benchmarks.table import promise
from tests.object_store import S3Server, free_port, moto_command, serving

LIMIT = 3.0  # times as long as plain files, writing to a folder
PART_BYTES = 18_000  # a group of 26 units
NUM_PARTS = 100
ROUNDS = 7

Writer = Callable[[str, bytes], object]
Reader = Callable[[str], bytes]


def seconds_per_part(work: Callable[[str], object], names: list[str]) -> float:
    began = time.perf_counter()
    for name in names:
        work(name)
    return (time.perf_counter() - began) / len(names)


def write_one(write: Writer, contents: dict[str, bytes], name: str) -> None:
    write(name, contents[name])


def measure(places: dict[str, tuple[Writer, Reader]]) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a write and of a read per place and round, in turns."""
    found: dict[str, list[tuple[float, float]]] = {place: [] for place in places}
    for turn in range(ROUNDS):
        names = [f"round-{turn}/part-{i:04d}" for i in range(NUM_PARTS)]
        contents = {name: os.urandom(PART_BYTES) for name in names}
        for place, (write, read) in places.items():
            written = seconds_per_part(partial(write_one, write, contents), names)
            got = seconds_per_part(read, names)
            assert all(read(name) == contents[name] for name in names[:3])
            found[place].append((written, got))
    return found


def plain_files(folder: Path) -> tuple[Writer, Reader]:
    def write(name: str, content: bytes) -> object:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        return write_atomic(folder / name, content)

    return write, lambda name: (folder / name).read_bytes()


def report(found: dict[str, list[tuple[float, float]]]) -> float:
    """Print medians and ratios; returns the ratio of writes to a folder."""
    plain = found["plain files"]
    for place, rounds in found.items():
        write, read = (statistics.median(r[i] for r in rounds) * 1e3 for i in (0, 1))
        ratios = [
            statistics.median(r[i] / p[i] for r, p in zip(rounds, plain, strict=True))
            for i in (0, 1)
        ]
        print(
            f"storage: {place:11} write {write:.3f} ms ({ratios[0]:.2f} x), "
            f"read {read:.3f} ms ({ratios[1]:.2f} x) per part of {PART_BYTES} bytes"
        )
    folder = found["folder"]
    return statistics.median(f[0] / p[0] for f, p in zip(folder, plain, strict=True))


def main() -> int:
    port = free_port()
    with tempfile.TemporaryDirectory() as name, serving(moto_command(port), port):
        server = S3Server(f"http://127.0.0.1:{port}")
        os.environ.update(server.env)
        folder, bucket = Store(Path(name) / "store"), Store(f"s3://{server.new_bucket()}/runs")
        places: dict[str, tuple[Writer, Reader]] = {
            "plain files": plain_files(Path(name) / "plain"),
            "folder": (folder.put_new, folder.get),
            "S3 (moto)": (bucket.put_new, bucket.get),
        }
        ratio = report(measure(places))
    print(f"storage: writing to a folder takes {ratio:.2f} x plain files (limit {LIMIT})")
    what = "writes to a storage in a folder, over plain files"
    return int(not promise(what, ratio=ratio, at_most=LIMIT, peer="plain files"))


if __name__ == "__main__":
    sys.exit(main())
