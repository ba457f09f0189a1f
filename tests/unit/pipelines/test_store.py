"""The store on a folder and on a real S3 server: create-only writes, faults, one-line errors."""

import os
import pickle
import signal

import pytest

from components.core.digests import digest_file
from pipelines.runtime import bucket_backend
from pipelines.runtime import store as store_module
from pipelines.runtime.bucket_backend import BucketBackend
from pipelines.runtime.store import DamagedError, MissingError, Ref, Store, StoreError, open_store
from pipelines.runtime.store_errors import UnavailableError, bucket_error
from tests.object_store import Fault, FaultyProxy
from tests.store_processes import create, die_in_put, killed, together

NAMES = ["a.json", "shards/test-0000.npz", "with space.bin", "ü%20#1?+&=[x]~.bin"]


@pytest.fixture(params=["folder", "s3"])
def root(request, tmp_path):
    return request.getfixturevalue("s3_root") if request.param == "s3" else str(tmp_path / "runs")


@pytest.fixture
def proxy(s3_server, s3_root, monkeypatch):
    """A faulty proxy in front of the server, which the environment names."""
    proxy = FaultyProxy(s3_server.endpoint)
    with proxy.running() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield proxy


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


def test_a_key_is_created_once(root):
    store = Store(root)
    assert store.put_new("a/b", b"1")
    assert store.put_new("a/b", b"1")  # the same content is a success
    assert not store.put_new("a/b", b"2")
    store.put_same("a/b", b"1")
    with pytest.raises(DamagedError, match="other content"):
        store.put_same("a/b", b"2")
    assert store.get("a/b") == b"1"
    assert store.find("a/c") is None
    assert store.find("a/b/c") is None
    with pytest.raises(MissingError, match="a/c is missing"):
        store.get("a/c")
    with pytest.raises(MissingError, match="a/c is missing"):
        store.get_range("a/c", 0, 1)


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.hidden"])
def test_keys_are_relative_paths(tmp_path, key):
    with pytest.raises(ValueError, match="not a key"):
        Store(tmp_path).put_new(key, b"")


def test_listings_are_sorted_and_folder_like(root):
    store = Store(root)
    assert store.listing("") == []
    for name in ("b/2", "b/10", "b/c/1", "bb/1", "a"):
        store.put_new(name, name.encode())
    assert [listed.key for listed in store.listing("b")] == ["b/10", "b/2", "b/c/1"]
    assert [listed.key for listed in store.listing("b/")] == ["b/10", "b/2", "b/c/1"]
    assert [listed.key for listed in store.listing("")] == ["a", "b/10", "b/2", "b/c/1", "bb/1"]
    assert store.listing("")[1].bytes == 4
    store.delete(["b/2", "b/none", "none"])
    store.delete([])
    assert [listed.key for listed in store.listing("b")] == ["b/10", "b/c/1"]


def test_files_are_named_by_content_and_come_back(root, tmp_path):
    store = Store(root)
    for name in NAMES:
        path = tmp_path / "file"
        path.write_bytes(name.encode() * 1000)
        ref = store.put_file("demo/train-123", name, path)
        digest = digest_file(path)
        assert ref == Ref(f"demo/train-123/files/{digest[:20]}/{name}", digest, path.stat().st_size)
        assert store.put_file("demo/train-123", name, path) == ref
        found = store.local(ref)
        assert found.read_bytes() == path.read_bytes()
        assert found.name == name.rpartition("/")[2]
        assert store.get_range(ref.key, 3, 5) == path.read_bytes()[3:8]
        assert store.get_range(ref.key, ref.bytes - 2, 50) == path.read_bytes()[-2:]
        path.unlink()
    assert len(store.listing("demo")) == len(NAMES)


def test_a_large_file_goes_in_parts(s3_root, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_backend, "ONE_PUT", 2**20)
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(2**20 * 18 + 5))
    store = Store(s3_root)
    ref = store.put_file("demo", "weights", path)
    assert store.put_file("demo", "weights", path) == ref
    assert digest_file(store.local(ref)) == ref.sha256


def test_a_folder_links_files_and_copies_across_disks(tmp_path, monkeypatch):
    path = tmp_path / "model"
    path.write_bytes(b"weights")
    store = Store(tmp_path / "runs")
    assert store.local(store.put_file("a", "model", path)).samefile(path)
    link = os.link

    def other_disk(source, target):
        if source == path:
            raise OSError(18, "Invalid cross-device link")
        link(source, target)

    monkeypatch.setattr(os, "link", other_disk)
    copy = store.local(store.put_file("b", "model", path))
    assert not copy.samefile(path)
    assert copy.read_bytes() == b"weights"


def test_of_eight_processes_one_creates_a_key(root):
    rounds = 12
    seen = together(create, root, rounds, number=8)
    for index in range(rounds):
        assert sum(first for first, _ in (one[index] for one in seen)) == 1
        winner = next(content for first, content in (one[index] for one in seen) if first)
        assert {one[index][1] for one in seen} == {winner}


def test_a_killed_writer_leaves_no_key(tmp_path):
    killed(die_in_put, str(tmp_path), "a/b")
    store = Store(tmp_path)
    assert store.listing("") == []
    (rest,) = (tmp_path / ".writing").iterdir()
    assert store.put_new("a/b", b"another")
    store.check_create_only()
    assert rest.exists()  # its writer may be alive
    os.utime(rest, (0, 0))
    store.check_create_only()
    assert not rest.exists()


def test_a_store_is_pickled_by_its_root(root):
    store = Store(root)
    store.put_new("a", b"1")
    assert open_store(root) is open_store(root)
    copy = pickle.loads(pickle.dumps(store))
    assert copy is open_store(root)  # one per process, whatever comes in pickles
    assert copy.get("a") == b"1"
    assert (copy.root, copy.is_local) == (store.root, "://" not in root)
    error = pickle.loads(pickle.dumps(MissingError("x", "is missing")))
    assert str(error) == "storage: x is missing"


def test_a_pickled_store_uses_the_cache_of_the_machine_that_opens_it(root, monkeypatch, tmp_path):
    pickled = pickle.dumps(open_store(root)), pickle.dumps(open_store(root, cache_bytes=10**6))
    monkeypatch.setenv("CASEMATE_CACHE", str(tmp_path / "another disk"))
    monkeypatch.setenv("CASEMATE_CACHE_GB", "3")
    default, limited = (pickle.loads(store).cache for store in pickled)
    assert (default.folder, default.limit) == (tmp_path / "another disk", 3 * 10**9)
    assert (limited.folder, limited.limit) == (tmp_path / "another disk", 10**6)


def test_a_fork_is_refused_instead_of_hanging(s3_root):
    store = Store(s3_root)
    store.put_new("a", b"1")
    child = os.fork()
    if not child:
        signal.alarm(20)  # a hang of the child would also block this process
        try:
            store.get("a")
        except StoreError as error:
            os._exit(7 if "spawn" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert store.get("a") == b"1"


def test_other_clouds_are_opened_without_network(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for url, kind in [("gs://bucket/a/b", "GCSStore"), ("az://container/a/b", "AzureStore")]:
        opened = Store(url)._backend.raw
        assert (type(opened).__name__, opened.prefix) == (kind, "a/b")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(StoreError, match="AZURE_STORAGE_ACCOUNT_NAME") as error:
        Store("az://container/runs").get("a")
    one_line(error)


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "s3://", "s3:/bucket", "file:///tmp", "https://h/x"]
)
def test_other_urls_are_refused(url):
    with pytest.raises(StoreError, match=r"names no bucket|cannot be read|too few slashes"):
        Store(url)


# -- faults ----------------------------------------------------------------------------------------


def test_a_write_whose_reply_is_lost_was_first(proxy, s3_root):
    proxy.faults = [Fault("PUT", lose=True)]
    assert Store(s3_root).put_new("a", b"mine")
    assert [method for method, _ in proxy.requests] == ["PUT", "PUT", "GET"]
    proxy.faults = [Fault("PUT", lose=True), Fault("PUT", status=500)]
    assert Store(s3_root).put_new("b", b"mine")
    assert not Store(s3_root).put_new("b", b"yours")


def test_a_storage_that_is_unavailable_for_a_while(proxy, s3_root, monkeypatch):
    monkeypatch.setattr(bucket_backend, "PAUSES", (0.01,))
    store = Store(s3_root)
    proxy.faults = [Fault("PUT", times=7, status=503, code="SlowDown")]  # obstore tries 5 times
    assert store.put_new("a", b"1")
    proxy.faults = [Fault("GET", times=7, status=503, code="ServiceUnavailable")]
    assert store.get("a") == b"1"


def test_a_storage_that_stays_unavailable_is_one_line(proxy, s3_root, monkeypatch):
    monkeypatch.setattr(bucket_backend, "FIRST_PATIENCE", 0.0)
    monkeypatch.setattr(bucket_backend, "PATIENCE", 0.0)
    proxy.faults = [Fault("GET", times=1000, status=503)]
    with pytest.raises(UnavailableError, match=r"is unavailable \(503\)") as error:
        Store(s3_root).get("a")
    one_line(error)


def test_a_conflict_that_passes_and_one_that_stays(proxy, s3_root, monkeypatch):
    monkeypatch.setattr(store_module, "CONFLICT_PAUSES", (0.0, 0.01, 0.01))
    conflict = {"status": 409, "code": "ConditionalRequestConflict"}
    proxy.faults = [Fault("PUT", times=2, **conflict)]
    assert Store(s3_root).put_new("a", b"1")
    proxy.faults = [Fault("PUT", times=1000, **conflict)]
    with pytest.raises(StoreError, match=r"/b can be neither created nor read") as error:
        Store(s3_root).put_new("b", b"1")
    one_line(error)


def test_a_download_that_breaks_off_continues(proxy, s3_root, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_backend, "CHUNK", 2**16)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(300_000))
    store = Store(s3_root)
    ref = store.put_file("demo", "file", path)
    proxy.faults = [Fault("GET", cut=100_000), Fault("GET", cut=10), Fault("GET", status=503)]
    assert store.local(ref).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"\1" + c[1:], lambda c: c + b"1"])
def test_damage_is_found_and_mended(root, s3_server, tmp_path, damage):
    path = tmp_path / "file"
    path.write_bytes(b"\0" * 1000)
    store = Store(root)
    ref = store.put_file("demo/train-1", "file", path)
    damaged = damage(b"\0" * 1000)
    if store.is_local:
        path.unlink()  # a hard link
        stored = store.local(ref)
        path.write_bytes(b"\0" * 1000)
        stored.write_bytes(damaged)
    else:
        s3_server.overwrite(root.split("/")[2], f"runs/{ref.key}", damaged)
    with pytest.raises(DamagedError, match=f"{ref.key}.*--force") as error:
        store.local(ref)
    one_line(error)
    assert not list((tmp_path / "node-cache").glob("*/content"))
    assert store.put_file("demo/train-1", "file", path) == ref  # as --force does
    assert store.local(ref).read_bytes() == path.read_bytes()


def test_a_store_that_overwrites_is_refused(rclone_root):
    with pytest.raises(StoreError, match="asked to create only") as error:
        Store(rclone_root).check_create_only()
    one_line(error)


def test_wrong_credentials_are_one_line(rclone_root, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-words")
    with pytest.raises(StoreError, match="refuses the secret key") as error:
        Store(rclone_root).put_new("a", b"1")
    assert "wrong-words" not in one_line(error)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stranger")
    with pytest.raises(StoreError, match="does not know the access key") as error:
        Store(rclone_root).put_new("a", b"1")
    one_line(error)


@pytest.mark.parametrize(
    ("code", "status", "remedy"),
    [
        ("ExpiredToken", 400, "expired credentials; renew AWS_SESSION_TOKEN"),
        ("RequestTimeTooSkewed", 403, "the time of this machine; set its clock"),
        ("AccessDenied", 403, "denies access"),
    ],
)
def test_refused_credentials_are_one_line(proxy, s3_root, code, status, remedy):
    for method in ("PUT", "GET"):
        proxy.faults = [Fault(method, times=100, status=status, code=code)]
        with pytest.raises(StoreError, match=remedy) as error:
            Store(s3_root).put_new("a", b"1") if method == "PUT" else Store(s3_root).get("a")
        assert len(proxy.requests) == 1  # not repeated
        proxy.requests.clear()
        one_line(error)


def test_no_bucket_no_endpoint_no_credentials(s3_root, s3_server, monkeypatch):
    monkeypatch.setattr(bucket_backend, "FIRST_PATIENCE", 0.0)
    with pytest.raises(StoreError, match="create the bucket") as error:
        Store("s3://no-such-bucket/runs").get("a")
    one_line(error)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(UnavailableError, match="refuses connections; check AWS_ENDPOINT_URL"):
        Store(s3_root).get("a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match="has no credentials; set AWS_ACCESS_KEY_ID") as error:
        Store(s3_root).get("a")
    one_line(error)


def test_an_unknown_error_is_shortened():
    error = bucket_error(ValueError("first " + "x" * 5000 + "\nsecond\nthird"), "s3://b")
    assert "\n" not in str(error)
    assert len(str(error)) < 300


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="Not a directory") as error:
        Store(tmp_path / "file" / "runs").put_new("a", b"1")
    one_line(error)


def test_a_first_answer_makes_the_store_patient(s3_root):
    store = Store(s3_root)
    assert not store._backend.answered
    store.find("a")
    copy = pickle.loads(pickle.dumps(store))
    assert isinstance(copy._backend, BucketBackend)
    assert copy._backend.answered
