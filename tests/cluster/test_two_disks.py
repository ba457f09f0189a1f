"""Two Ray nodes with a disk of their own each: what they share is an S3 server.

Each node lives in a mount namespace with an empty disk (tmpfs) over the folder of the node cache
and of temporary files. The driver sees the machine's own disk there. So a path of the driver or of
the other node leads nowhere.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from pipelines.runtime.storage import Storage
from tests.e2e.cli import Result
from tests.e2e.heads import ray_head, ray_node
from tests.object_store import FaultyProxy
from tests.published import published

can_unshare = subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not can_unshare, reason="unshare --mount is not permitted here"),
]
# ASHA decides in the order in which results come, which is that of the machine.
DEMO = ("run", "demo", "--smoke", "--set", "cluster.num_actors=2")
DEMO += ("--set", "tune.scheduler={kind: none}")


@dataclass
class Flow:
    """A finished flow of two nodes, and what was seen of it."""

    result: Result
    storage: Storage
    caches: dict[str, set[str]]  # digests on each disk
    downloads: Counter[str]  # of published files, by key


@pytest.fixture(scope="module")
def flow(cli, s3_server) -> Iterator[Flow]:
    proxy = FaultyProxy(s3_server.endpoint)
    with ExitStack() as stack:
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cm-disk-")))
        (disk / "tmp").mkdir()
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        endpoint = stack.enter_context(proxy.running())
        for name, value in {
            **s3_server.env,
            "AWS_ENDPOINT_URL": endpoint,
            "CASEMATE_CACHE": str(disk / "cache"),
        }.items():
            patch.setenv(name, value)
        own_disk = f"mount -t tmpfs -o size=600m tmpfs '{disk}' && mkdir '{disk}/tmp'"
        cluster = stack.enter_context(ray_head(num_cpus=0))
        nodes = {
            name: stack.enter_context(
                ray_node(
                    cluster,
                    options=[f"--node-name={name}"],
                    env={"TMPDIR": str(disk / "tmp")},
                    before=own_disk,
                )
            )
            for name in ("a", "b")
        }
        root = f"s3://{s3_server.new_bucket()}/two disks"
        tracking = {"MLFLOW_TRACKING_URI": f"sqlite:///{disk}/mlflow.db"}
        words = (*DEMO, "--storage", root, "--address", cluster.address)
        result = cli(*words, env=tracking)
        places = {"driver": Path("/"), **{n: seen_by(p) for n, p in nodes.items()}}
        caches = {name: cached(place / disk.relative_to("/")) for name, place in places.items()}
        downloads = Counter(
            path for method, path in proxy.requests if method == "GET" and "/files/" in path
        )
        yield Flow(result, Storage.at(root), caches, downloads)


def seen_by(process: subprocess.Popen) -> Path:
    """The file system as a node sees it."""
    raylet = next(
        part
        for part in psutil.Process(process.pid).children(recursive=True)
        if "raylet/raylet" in part.cmdline()[0]
    )
    return Path(f"/proc/{raylet.pid}/root")


def cached(disk: Path) -> set[str]:
    """Digests of the files in the node cache on a disk."""
    return {path.parent.name for path in (disk / "cache").glob("*/content")}


def test_the_demo_leaves_the_bytes_that_it_leaves_in_a_folder(flow, cli, tmp_path):
    assert flow.result.code == 0, flow.result.err
    alone = cli(*DEMO, "--storage", tmp_path / "runs")
    assert alone.code == 0, alone.err
    ours, theirs = published(flow.storage), published(Storage.at(tmp_path / "runs"))
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == set()
    stages = {name.split("/")[1].split("-")[0].partition(".")[0] for name in ours}
    assert stages == {"prepare", "train", "tune", "attack", "certify", "report"}


def test_both_nodes_worked_from_a_cache_of_their_own(flow):
    """A model is read from a cache by workers that attack or certify it, not by its training."""
    needed = {
        entry["sha256"]
        for step in ("train.main", "train.columns", "train.noisy")
        for name, entry in manifest_of(flow.storage, step).files.items()
        if name.endswith("model.safetensors")
    }
    assert len(needed) == 3
    for name in ("a", "b"):
        assert needed & flow.caches[name], name


def test_each_file_is_fetched_once_per_node(flow):
    fetched = Counter(digest[:20] for digests in flow.caches.values() for digest in digests)
    assert max(fetched.values()) >= 2
    read = {path for path in flow.downloads if path.endswith((".parquet", ".safetensors"))}
    assert any("/prepare-" in path for path in read)
    for path in read:
        digest = re.search(r"/files/(\w{20})/", path)[1]
        assert flow.downloads[path] == fetched[digest], path


def manifest_of(storage: Storage, step: str):
    keys = [entry.key for entry in storage.store.listing("demo")]
    (folder,) = {key.split("/")[1] for key in keys if key.startswith(f"demo/{step}-")}
    return storage.step("demo", folder).manifest()
