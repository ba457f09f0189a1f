"""Files of a bucket on one node's disk: fetched once, checked, pinned, evicted, never wrong."""

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.core.errors import CasemateError
from pipelines.runtime.node_cache import NodeCache, default_limit
from pipelines.runtime.store import DamagedError, Ref, Store
from tests.object_store import FaultyProxy
from tests.store_processes import die_in_fill, killed, read_local, together


class Source:
    """Contents by key; counts what is fetched."""

    def __init__(self):
        self.contents, self.fetched = {}, []

    def add(self, name, size):
        content = name.encode() * size
        self.contents[name] = content
        return Ref(name, hashlib.sha256(content).hexdigest(), len(content))

    def fetch(self, key):
        self.fetched.append(key)
        content = self.contents[key]
        yield from (content[start : start + 1000] for start in range(0, len(content), 1000))


@pytest.fixture
def source():
    return Source()


def get(cache, source, ref):
    return cache.path(ref, source.fetch, where=f"s3://bucket/{ref.key}")


def held(cache):
    return {path.read_bytes()[:1].decode() for path in cache.folder.glob("*/content")}


def test_a_file_is_fetched_once_and_checked_when_it_changes(tmp_path, source):
    cache, ref = NodeCache(tmp_path, 10**6), source.add("a", 5000)
    path = get(cache, source, ref)
    assert path.name == "a"
    assert get(cache, source, ref) == path
    assert get(NodeCache(tmp_path, 10**6), source, ref) == path
    assert source.fetched == ["a"]
    same = Ref("other/name.npz", ref.sha256, ref.bytes)
    assert get(cache, source, same).samefile(path)
    assert source.fetched == ["a"]
    path.write_bytes(b"b" + b"a" * 4999)
    assert get(cache, source, ref).read_bytes() == b"a" * 5000
    assert source.fetched == ["a", "a"]
    empty = source.add("b", 0)
    assert get(cache, source, empty).read_bytes() == b""


@pytest.mark.parametrize("wrong", [b"a" * 4999, b"b" + b"a" * 4999, b"a" * 5001, b""])
def test_wrong_content_is_never_handed_out(tmp_path, source, wrong):
    cache, ref = NodeCache(tmp_path, 10**6), source.add("a", 5000)
    source.contents["a"] = wrong
    with pytest.raises(DamagedError, match=r"s3://bucket/a .*redo its step with --force"):
        get(cache, source, ref)
    assert list(tmp_path.glob("*/*")) == [
        *(tmp_path / ".pins").iterdir(),
        tmp_path / ".fills" / ref.sha256,
    ]
    source.contents["a"] = b"a" * 5000
    assert get(cache, source, ref).read_bytes() == b"a" * 5000


def test_the_longest_unused_file_makes_room_unless_it_is_pinned(tmp_path, source):
    refs = {name: source.add(name, 4000) for name in "abcd"}
    for name in "abc":
        before = NodeCache(tmp_path, 13_000)
        get(before, source, refs[name])
        before.close()
        os.utime(tmp_path / refs[name].sha256, (ord(name), ord(name)))
    cache = NodeCache(tmp_path, 13_000)
    get(cache, source, refs["a"])  # used again: b is the oldest now
    get(cache, source, refs["d"])
    assert held(cache) == {"a", "c", "d"}
    other = NodeCache(tmp_path, 13_000)
    get(other, source, refs["c"])
    with pytest.raises(CasemateError, match=r"limit is .* GB; raise CASEMATE_CACHE_GB") as error:
        get(other, source, refs["b"])
    assert "\n" not in str(error.value)
    assert held(cache) == {"a", "c", "d"}
    cache.release(refs["d"])
    assert get(other, source, refs["b"]).read_bytes() == b"b" * 4000
    assert held(cache) == {"a", "b", "c"}
    with pytest.raises(CasemateError, match="raise CASEMATE_CACHE_GB"):
        get(other, source, source.add("e", 14_000))


def test_folder_and_limit_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("CASEMATE_CACHE", raising=False)
    assert str(os.getuid()) in NodeCache().folder.name
    monkeypatch.setenv("CASEMATE_CACHE", str(tmp_path))
    monkeypatch.setenv("CASEMATE_CACHE_GB", "1.5")
    assert (NodeCache().folder, NodeCache().limit) == (tmp_path, 1_500_000_000)
    for wrong in ("much", "-1", "0", "nan", "inf"):
        monkeypatch.setenv("CASEMATE_CACHE_GB", wrong)
        with pytest.raises(CasemateError, match="CASEMATE_CACHE_GB"):
            default_limit()


def test_eight_processes_fetch_once_also_after_a_kill(s3_server, s3_root, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3_000_000))
    store = Store(s3_root)
    ref = store.put_file("demo", "file.npz", path)
    cache = Path(os.environ["CASEMATE_CACHE"])
    killed(die_in_fill, s3_root, ref)
    assert (cache / ref.sha256 / "partial").stat().st_size == ref.bytes  # reserved
    assert not (cache / ref.sha256 / "content").exists()
    proxy = FaultyProxy(s3_server.endpoint)
    with proxy.running() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        found = together(read_local, s3_root, ref, number=8)
    assert {name for name, _ in found} == {cache / ref.sha256 / "named" / "file.npz"}
    assert all(content == path.read_bytes() for _, content in found)
    assert [method for method, _ in proxy.requests] == ["GET"]
    assert sorted(p.name for p in (cache / ref.sha256).iterdir()) == ["content", "named"]


def test_a_full_disk_evicts_and_then_is_one_line(tmp_path, source, monkeypatch):
    """The disk has 9,000 bytes, less than the limit."""
    reserve = os.posix_fallocate

    def small_disk(handle, start, size):
        used = sum(p.stat().st_size for p in tmp_path.glob("*/content"))
        if used + size > 9000:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(handle, start, size)

    monkeypatch.setattr(os, "posix_fallocate", small_disk)
    refs = [source.add(name, 4000) for name in "abc"]
    for ref in refs[:2]:
        before = NodeCache(tmp_path, 10**9)
        get(before, source, ref)
        before.close()
    cache = NodeCache(tmp_path, 10**9)
    get(cache, source, refs[2])
    assert held(cache) == {"b", "c"}
    with pytest.raises(CasemateError, match=r"is on a full disk.*CASEMATE_CACHE") as error:
        get(cache, source, source.add("e", 6000))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("*/partial"))
    assert get(cache, source, refs[2]).read_bytes() == b"c" * 4000


FULL = """
import hashlib, sys
from pathlib import Path
from components.core.errors import CasemateError
from pipelines.runtime.node_cache import NodeCache
from pipelines.runtime.store import Ref
cache = NodeCache(Path(sys.argv[1]), 10**9)
def get(letter, size):
    content = letter * size
    ref = Ref("x", hashlib.sha256(content).hexdigest(), size)
    return cache.path(ref, lambda key: iter([content]), where="")
assert get(b"a", 600_000).stat().st_size == 600_000
try:
    get(b"b", 600_000)
except CasemateError as error:
    print(error)
assert get(b"c", 200_000).stat().st_size == 200_000
"""


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tmp_path):
    mount = f'mount -t tmpfs -o size=1m tmpfs "{tmp_path}" && exec "$0" -c "$1" "{tmp_path}/cache"'
    words = ["unshare", "-m", "sh", "-c", mount, sys.executable, FULL]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert done.returncode == 0, done.stderr
    assert "is on a full disk; free some space" in done.stdout
    assert len(done.stdout.splitlines()) == 1
