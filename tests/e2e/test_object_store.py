"""A small flow whose storage is an S3 server: interrupted, resumed, damaged and mended.

The same flow in a folder is the reference. One bucket goes through all of it: a second driver, a
SIGKILL, a server that is away for seconds; in the tier `cluster` also damaged objects, expired
credentials and two drivers at the same moment.
"""

import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.runtime.locks import newest_entry
from pipelines.runtime.storage import Storage, step_at
from tests.e2e.cli import Result, call, mistake_of, step_folder, tiny_recipe, wait_until
from tests.object_store import Fault, FaultyProxy, S3Server
from tests.published import published

pytestmark = pytest.mark.e2e
METHODS = ("GET", "PUT", "HEAD", "POST", "DELETE")
PREFIX = "runs"


@dataclass(frozen=True)
class Place:
    """A flow on S3: what a command needs to work on it."""

    server: S3Server
    proxy: FaultyProxy
    bucket: str
    recipe: Path
    tracking: str

    @property
    def root(self) -> str:
        return f"s3://{self.bucket}/{PREFIX}"

    @property
    def storage(self) -> Storage:
        return Storage.at(self.root)

    def words(self, command: str = "run") -> tuple[str, ...]:
        own = ("--set", f"tracking.uri={self.tracking}", "--set", "cluster.num_actors=1")
        return (command, str(self.recipe), "--storage", self.root, *own)

    def listed(self, inside: str) -> list[str]:
        """Keys of objects; Ray also leaves empty ones in place of folders."""
        return [entry.key for entry in self.storage.store.listing(inside) if entry.bytes]

    def step(self, name: str) -> str:
        """The key of a step."""
        found = {
            key.split("/")[1] for key in self.listed("tiny") if key.startswith(f"tiny/{name}-")
        }
        (folder,) = found
        return f"tiny/{folder}"

    def uri(self, name: str) -> str:
        return f"{self.root}/{self.step(name)}"

    def manifests(self) -> dict[str, bytes]:
        found = [key for key in self.listed("tiny") if key.endswith(".manifest.json")]
        return {key: self.storage.store.get(key) for key in found}

    def parts(self) -> list[str]:
        """Objects with votes of a certificate that is not finished."""
        return [key for key in self.listed("tiny") if is_part(key)]

    def overwrite(self, key: str, content: bytes) -> None:
        self.server.overwrite(self.bucket, f"{PREFIX}/{key}", content)


def is_part(key: str) -> bool:
    return re.search(r"certify\.l2-\w+/unfinished/votes/", key) is not None


def units_of(keys: list[str]) -> set[int]:
    """Ordinals of the units in these objects, by their names."""
    found = [re.search(r"/(\d{9})-(\d{9})-\d{6}-\w+\.arrow", key) for key in keys]
    return {unit for one in found if one for unit in range(int(one[1]), int(one[2]) + 1)}


@pytest.fixture(scope="module")
def place(s3_server, tmp_path_factory) -> Iterator[Place]:
    """An empty bucket behind a proxy."""
    home, proxy = tmp_path_factory.mktemp("s3"), FaultyProxy(s3_server.endpoint)
    with proxy.running() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_REGION"):
            patch.delenv(name, raising=False)
        for name, value in {**s3_server.env, "AWS_ENDPOINT_URL": endpoint}.items():
            patch.setenv(name, value)
        patch.setenv("CASEMATE_CACHE", str(home / "cache"))
        bucket, recipe = s3_server.new_bucket(), tiny_recipe(home / "tiny.yaml")
        yield Place(s3_server, proxy, bucket, recipe, f"sqlite:///{home}/mlflow.db")


def copy_step(folder: Path, place: Place) -> None:
    """Copy a finished step to the bucket: the keys are those of the folder."""
    for path in [*folder.glob("files/**/*"), *folder.glob("*.manifest.json")]:
        if path.is_file():
            place.overwrite(f"tiny/{folder.name}/{path.relative_to(folder)}", path.read_bytes())


@contextmanager
def faults(proxy: FaultyProxy, status: int, code: str) -> Iterator[None]:
    """Every request is answered by this status."""
    proxy.faults = [Fault(method, times=10**9, status=status, code=code) for method in METHODS]
    try:
        yield
    finally:
        proxy.faults = []


def ended(process: "subprocess.Popen[str]") -> Result:
    out, err = process.communicate(timeout=800)
    return Result(process.returncode, out, err)


def last_line(result: Result) -> str:
    """The line of a command that was refused; what it said before is progress."""
    assert result.code == 2, result.err
    assert "Traceback" not in result.err
    *before, line = result.err.splitlines()
    assert not any("casemate: " in one for one in before), result.err
    return line.removeprefix("casemate: ")


@dataclass
class Resumed:
    """What was seen on the way to a finished flow."""

    second: str  # what a second driver is told
    finished: dict[str, bytes]  # manifests at the time of the kill
    kept: list[str]  # objects with votes at the time of the kill
    written: list[str]  # keys that were written after it
    result: Result


@pytest.fixture(scope="module")
def resumed(place, finished_flow, cli) -> Resumed:
    for step in ("prepare", "train.columns"):  # one training is enough
        copy_step(step_folder(finished_flow, step), place)
    certified = f"tiny/{step_folder(finished_flow, 'certify.l2').name}"

    process = cli.start(*place.words())
    try:
        wait_until(lambda: is_locked(place, certified) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        second = mistake_of(*place.words())
        wait_until(lambda: len(place.parts()) >= 2 or process.poll() is not None)
        assert process.poll() is None, process.communicate()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    finished, kept = place.manifests(), place.parts()
    assert kept
    assert not any("certify.l2" in key for key in finished)

    place.proxy.requests.clear()
    process = cli.start(*place.words())
    outage = threading.Event()
    wait_until(lambda: bool(written_parts(place)) or process.poll() is not None)
    with faults(place.proxy, 503, "ServiceUnavailable"):
        outage.wait(4)  # longer than obstore repeats a request by itself
    result = ended(process)
    written = [path for method, path in place.proxy.requests if method == "PUT"]
    return Resumed(second, finished, kept, written, result)


def is_locked(place: Place, step: str) -> bool:
    entry = newest_entry(place.storage.store, step)
    return entry is not None and entry.is_held


def written_parts(place: Place) -> list[str]:
    return [key for method, key in list(place.proxy.requests) if method == "PUT" and is_part(key)]


def test_a_second_driver_is_refused_in_one_line(resumed, place):
    assert f"storage: {place.root}/tiny/" in resumed.second
    assert "is in use by another run: host" in resumed.second


def test_finished_steps_and_groups_are_not_repeated(resumed, place):
    assert resumed.result.code == 0, resumed.result.err
    now = place.manifests()
    assert {key: now.get(key) for key in resumed.finished} == resumed.finished
    again = units_of([key for key in resumed.written if is_part(key)])
    assert again
    assert not units_of(resumed.kept) & again
    assert not any("/unfinished/" in key for key in place.listed("tiny"))


def test_the_files_are_those_of_the_same_flow_in_a_folder(resumed, place, finished_flow):
    ours, theirs = (
        published(storage, without="recipe_digest")  # theirs has more certificates
        for storage in (place.storage, Storage.at(finished_flow))
    )
    compared = {name for name in ours if "/report-" not in name}
    assert {name for name in compared if ours[name] != theirs.get(name)} == set()
    assert {name.split("/")[1].partition("-")[0] for name in compared} == {
        *("prepare", "train.main", "train.columns", "evaluate.clean"),
        *("attack.linf", "certify.patch", "certify.l2"),
    }


def test_commands_take_the_uri_of_a_step(resumed, place, tmp_path):
    l2, patch, report = (place.uri(name) for name in ("certify.l2", "certify.patch", "report"))
    for uri in (l2, patch):
        checked = call("verify", uri, "--json")
        assert (checked.code, checked.json["problems"]) == (0, []), checked.err
    again = call("verify", l2, "--resample", 2)
    assert "votes of 2 items repeated" in again.out, again.err
    narrower = call("recertify", l2, "--radii", "0.05", "--out", tmp_path / "again", "--json")
    assert narrower.code == 0, narrower.err
    assert call("verify", tmp_path / "again").code == 0
    claims = pq.read_table(step_at(l2) / "certificates.parquet").num_rows
    table = call("export-tsv", l2, "--out", tmp_path / "radii.tsv", "--json")
    assert table.json["num_items"] == claims
    assert "<html" in (step_at(report) / "report.html").read_text()
    finished = call(*place.words(), "--json")
    assert finished.json["steps"]["certify.l2"] == l2


def test_a_node_cache_that_is_too_small_is_one_line(resumed, place, monkeypatch, tmp_path):
    monkeypatch.setenv("CASEMATE_CACHE", str(tmp_path))
    monkeypatch.setenv("CASEMATE_CACHE_GB", "0.000001")
    line = mistake_of("verify", place.uri("certify.l2"))
    assert line.startswith(f"cache: {tmp_path} needs ")
    assert line.endswith("raise CASEMATE_CACHE_GB")


def test_a_storage_that_is_a_bucket_needs_a_place_for_mlflow(place):
    line = mistake_of("run", place.recipe, "--storage", f"{place.root}/other")
    expected = f"storage.root: {place.root}/other cannot hold MLflow's database; set tracking.uri"
    assert line.startswith(expected)


def test_a_store_that_overwrites_is_refused_at_the_start(rclone_root, tmp_path):
    recipe = tiny_recipe(tmp_path / "tiny.yaml")
    line = mistake_of("run", recipe, "--storage", rclone_root)
    assert line.startswith(f"storage: {rclone_root} overwrites a key that it was asked to create")


@dataclass
class Mended:
    """What was said about damaged objects, and on the way to mend them."""

    verified: str  # by verify, of a file whose bytes were changed
    run: str  # by run, of a file that was cut
    expired: Result
    both: list[Result]  # of two drivers that started together


@pytest.fixture(scope="module")
def mended(resumed, place, cli) -> Mended:
    """Damage two files of a finished step, then redo it."""
    opened = step_at(place.uri("certify.patch"))
    votes, table = (opened.files[name].key for name in ("votes.parquet", "certificates.parquet"))
    whole = place.storage.store.get(votes)
    place.overwrite(votes, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.MonkeyPatch.context() as patch:  # this node has the file already
        patch.setenv("CASEMATE_CACHE", str(place.recipe.parent / "another node"))
        verified = mistake_of("verify", place.uri("certify.patch"))
    place.overwrite(table, place.storage.store.get(table)[:-10])
    run = mistake_of(*place.words())

    place.proxy.requests.clear()
    process = cli.start(*place.words("certify"), "--force")
    wait_until(lambda: bool(written_parts(place)) or process.poll() is not None)
    with faults(place.proxy, 403, "ExpiredToken"):
        expired = ended(process)

    drivers = [cli.start(*place.words()) for _ in range(2)]
    return Mended(verified, run, expired, [ended(driver) for driver in drivers])


@pytest.mark.cluster
def test_damaged_objects_are_named(mended, place):
    step = f"{place.root}/{place.step('certify.patch')}"
    assert re.fullmatch(
        rf"storage: {step}/files/\w+/votes.parquet is damaged; redo its step with --force",
        mended.verified,
    )
    assert re.fullmatch(
        rf"storage: {step}/files/\w+/certificates.parquet is missing or changed; restore it or "
        "redo the step with --force",
        mended.run,
    )


@pytest.mark.cluster
def test_expired_credentials_end_a_run_in_one_line(mended, place):
    line = last_line(mended.expired)
    assert line.startswith(f"storage: {place.root} refuses expired credentials; renew AWS_")


@pytest.mark.cluster
def test_of_two_drivers_one_wins_and_the_result_is_whole(mended, resumed, place):
    codes = sorted(result.code for result in mended.both)
    assert codes in ([0, 0], [0, 2]), [result.err for result in mended.both]
    for result in mended.both:
        if result.code:
            assert "is in use by another run" in last_line(result)
    for step in ("certify.patch", "certify.l2"):
        key = place.step(step)
        first = json.loads(resumed.finished.get(f"{key}/000000.manifest.json", b"{}"))
        manifest = place.storage.step(*key.split("/")).manifest()
        assert manifest.generation == 1
        assert f"{key}/000000.manifest.json" in place.manifests()  # the old one stays readable
        if first:
            assert manifest.files == first["files"]
        assert call("verify", place.uri(step)).code == 0


@pytest.mark.cluster
def test_workers_whose_disk_is_too_small_end_the_flow_in_one_line(place, cli, tmp_path):
    words = ("run", place.recipe, "--storage", f"{place.root} of small nodes")
    cache = {"CASEMATE_CACHE": str(tmp_path), "CASEMATE_CACHE_GB": "0.00002"}
    line = last_line(cli(*words, env={**cache, "MLFLOW_TRACKING_URI": place.tracking}))
    assert line.startswith("cache: ")
    assert "for files in use and train-00000.parquet" in line


@pytest.mark.cluster
def test_data_of_a_bucket_are_shown(resumed, place, cli):
    shown = cli("data", place.uri("prepare"), "--json")  # Ray reads every shard
    assert shown.code == 0, shown.err
    assert shown.json["splits"]["test"]["num_items"] == 24
