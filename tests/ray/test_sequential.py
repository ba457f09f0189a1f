"""Draws that stop when decided, on real actors: kills and their number do not show in the votes."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from components.certify.header import VotesHeader
from components.certify.l2.draws import DrawLedger
from components.certify.l2.evidence import declare
from components.certify.l2.settings import GaussianSettings
from components.certify.vote_rows import SCHEMA
from components.certify.votes import write_votes
from components.core.noise_streams import noise_impl
from pipelines.recipe.schema.place import ClusterSection
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import ShardFailedError, release_workers, run_units

pytestmark = pytest.mark.ray
TRUTH = (0.99, 0.9, 0.82, 0.5)  # easy, close, closer, hopeless at radius 0.25 of sigma 0.3
SECTION = GaussianSettings(
    kind="gaussian", sigma=0.3, method="sequential", radii=[0.25], num_estimate=2000,
    num_select=16, block_size=400, micro_batch=50,
)  # fmt: skip
HEADER = {
    "kind": "gaussian", "run_id": "r", "model_digest": "a", "dataset_digest": "d",
    "num_classes": 2, "image": {"channels": 1, "height": 4, "width": 4},
    "settings": {
        "sigma": 0.3, "num_select": 16, "num_estimate": 2000, "run_seed": 0,
        "method": "sequential",
        "declared": declare(radii=[0.25], failure_prob=0.001, look_every=64, futility_prob=0.01),
    },
    "noise_impl": noise_impl("sequential"), "num_items": len(TRUTH), "software": {},
}  # fmt: skip


def draw(item, stream, index):
    key = 1_000_000 * item + 100_000 * (stream == "select") + index
    return np.random.Generator(np.random.Philox(key=key)).random() < TRUTH[item]


def row(b):
    votes = [int(draw(b.item, b.stream, i)) for i in range(b.start, b.stop)]
    return {
        "item_id": f"item-{b.item}", "label": 1, "image_sha256": "0" * 64, "stream": b.stream,
        "start": b.start, "stop": b.stop, "predictions": votes,
    }  # fmt: skip


def make_coins(folder):
    """Coins instead of a network; where a mark waits, the process dies in the middle of a block."""

    def toss(blocks):
        if blocks[-1].start >= 100:
            for mark in Path(folder).glob("kill-*"):
                mark.unlink(missing_ok=True)
                time.sleep(0.5)  # what was computed before is on its way to the driver
                os.kill(os.getpid(), signal.SIGKILL)
        return pa.Table.from_pylist([row(b) for b in blocks], schema=SCHEMA)

    return toss


def make_broken(folder):
    def toss(blocks):
        if blocks[0].item == 1 and blocks[-1].start >= 100:
            raise ArithmeticError("a coin on its edge")
        return make_coins(folder)(blocks)

    return toss


@pytest.fixture(scope="module", autouse=True)
def _give_cpus_back(ray_session):
    yield
    release_workers()


def certify(folder: Path, *, num_actors: int, make=make_coins) -> bytes:
    folder.mkdir(exist_ok=True)
    ledger, parts = (
        DrawLedger(SECTION, VotesHeader.from_dict(HEADER)),
        PartStore.in_folder(folder / "parts", run_id="r"),
    )
    run_units(
        [], make=make, config=str(folder), parts=parts, source=ledger,
        cluster=ClusterSection(num_actors=num_actors), label=f"{make.__name__}-{folder}",
    )  # fmt: skip
    tables = (table for _, table in parts.all_tables())
    write_votes(folder / "votes.parquet", ledger.votes(tables), HEADER)
    return (folder / "votes.parquet").read_bytes()


@pytest.mark.cluster
def test_kills_workers_and_resumes_do_not_show_in_the_votes(ray_session, tmp_path):
    alone = certify(tmp_path / "one", num_actors=1)
    killed = tmp_path / "killed"
    killed.mkdir()
    for number in range(2):
        (killed / f"kill-{number}").write_text("")
    assert certify(killed, num_actors=2) == alone
    assert not list(killed.glob("kill-*"))  # two processes did die
    stopped = tmp_path / "stopped"
    with pytest.raises(ShardFailedError, match="a coin on its edge"):
        certify(stopped, num_actors=2, make=make_broken)
    kept = {path: path.stat().st_mtime_ns for path in (stopped / "parts").glob("*/*.arrow")}
    assert kept
    assert certify(stopped, num_actors=2) == alone
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items())
