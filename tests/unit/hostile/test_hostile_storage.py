"""A storage that another person wrote: nothing outside of it is read, written or deleted."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.core.digests import digest_bytes
from pipelines.flow.plan import plan
from pipelines.flow.sharing import shared
from pipelines.recipe.load import loads
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.garbage import OLD_LOCK, remove_garbage
from pipelines.runtime.inventory import inventory
from pipelines.runtime.locks import Lock
from pipelines.runtime.manifests import MANIFEST, manifest_text, parse_manifest, read_manifest
from pipelines.runtime.node_cache import Ref
from pipelines.runtime.storage import Storage, step_at
from pipelines.runtime.store import Store
from tests.e2e.cli import call, mistake_of
from tests.stored_steps import PRINT, begin, finish, place_of, stage_of
from tests.unit.hostile.attacks import DEEP, NAMES, QUITE_DEEP, refusal

ENTRY = {"sha256": digest_bytes(b"secret"), "bytes": 6}


@pytest.fixture
def storage(tmp_path):
    return Storage.at(tmp_path / "storage")


@pytest.fixture
def outside(tmp_path):
    """A file of the victim, which must stay as it is and be alone."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_bytes(b"secret")
    yield folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"file": b"secret"}


def rewritten(path: Path, **changes: object) -> None:
    """A manifest with other values and the right digest of its own."""
    values = {**json.loads(path.read_bytes()), **changes}
    values.pop("manifest_sha256", None)
    path.unlink()
    path.write_text(manifest_text(values))


def without_locks(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "locks" not in path.parts}


@pytest.fixture
def place(storage):
    found = place_of(storage, "demo", "prepare")
    finish(found, {"a.bin": b"first"})
    return found


@pytest.mark.parametrize("name", NAMES)
def test_file_names_that_lead_out_of_a_step(place, name, outside, tmp_path):
    for path in (place.path / MANIFEST, place.path / f"000000.{MANIFEST}"):
        rewritten(path, files={name: ENTRY})
    words = (f"storage: {place}/000000.{MANIFEST} is damaged", "is not below the step")
    refusal(place.open, *words)
    refusal(lambda: place.is_finished(PRINT), *words)
    refusal(lambda: read_manifest(place.path), "is not below the step")
    before = without_locks(tmp_path)
    (step,) = inventory(place.storage).steps.values()
    assert step.state == "damaged"
    gone = remove_garbage(inventory(place.storage), older_than=-5.0).garbage
    assert {entry.reason for entry in gone} <= {OLD_LOCK}
    assert without_locks(tmp_path) == before


@pytest.mark.parametrize(
    "files",
    [
        {"a": {"sha256": "../../../outside", "bytes": 6}}, {"a": {"sha256": "A" * 64, "bytes": 6}},
        {"a": {"sha256": "0" * 64, "bytes": -1}}, {"a": {"sha256": "0" * 64, "bytes": "6"}},
        {"a": {"sha256": "0" * 64}}, {"a": []}, [], 5, {"a": {"sha256": 5, "bytes": True}},
    ],
    ids=str,
)  # fmt: skip
def test_files_that_no_step_lists(files):
    text = manifest_text({"step": "x", "files": files})
    refusal(lambda: parse_manifest(text, source="s/manifest.json"), "s/manifest.json is damaged")


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": {"a": 5}}, {"inputs": {"a": {"content": 5}}}, {"inputs": 5},
        {"input_folders": {"a": 5}}, {"input_folders": 5}, {"generation": "0"}, {"step": []},
    ],
    ids=str,
)  # fmt: skip
def test_other_values_of_another_type(changes):
    text = manifest_text({"step": "x", "files": {}, **changes})
    refusal(lambda: parse_manifest(text, source="s/manifest.json"), "s/manifest.json is damaged")


@pytest.mark.parametrize("text", [DEEP, QUITE_DEEP, b"[]", b"5", b"\xff", b"", b"1" * 5000])
def test_manifests_that_are_none(place, text):
    refusal(lambda: parse_manifest(text, source="s/manifest.json"), "s/manifest.json is damaged")
    (place.path / MANIFEST).write_bytes(text)
    assert "manifest.json is damaged" in refusal(lambda: read_manifest(place.path))


@pytest.mark.parametrize("name", ["/tmp/escape", "../escape"])
def test_a_bucket_whose_manifest_names_files_elsewhere(s3_server, s3_root, tmp_path, name):
    """`fetch` makes links under the names of the manifest: they must stay in the cache."""
    storage = Storage.at(s3_root)
    place = place_of(storage, "demo", "certify.l2")
    finish(place, {"a.bin": b"first"})
    bucket, _, prefix = s3_root.removeprefix("s3://").partition("/")
    key = f"{prefix}/{place.key}/000000.{MANIFEST}"
    values = json.loads(s3_server.read(bucket, key))
    del values["manifest_sha256"]
    text = manifest_text({**values, "files": {name: values["files"]["a.bin"]}})
    s3_server.overwrite(bucket, key, text.encode())
    assert "is not below the step" in mistake_of("verify", str(place))
    refusal(lambda: step_at(str(place)), "is not below the step")
    assert not list(tmp_path.rglob("*escape*"))
    assert not Path("/tmp/escape").exists()


@pytest.mark.parametrize(
    "ref",
    [Ref("../outside/file", **ENTRY), Ref("/etc/passwd", **ENTRY), Ref("a", "../../outside", 6)],
    ids=str,
)
def test_references_that_lead_out_of_the_storage(storage, outside, ref):
    """Workers and resumed trainings read references from files of the storage."""
    refusal(lambda: storage.store.local(ref), "names a file that no step stores")


@pytest.mark.parametrize("name", NAMES)
def test_files_of_workers_with_names_that_lead_out(storage, outside, name):
    stage = stage_of(place_of(storage, "demo", "train.main"))
    refusal(lambda: stage.fetch({name: Ref("a", **ENTRY)}), "names a file outside of it")


def test_gc_follows_no_link_out_of_the_storage(storage, outside):
    """Links where scratch files, generations, steps and recipes are expected."""
    done, begun = place_of(storage, "demo", "prepare"), place_of(storage, "demo", "train.main")
    finish(done, {"a.bin": b"first"})
    begin(begun, {"w.bin": b"half"})
    for link in (
        done.path / "unfinished" / "x", done.path / "files" / "0123456789abcdef0123",
        begun.path / "deep", storage.path / "probes" / ("0" * 32),
        storage.path / "other" / f"report-{PRINT[:12]}", storage.path / "linked",
    ):  # fmt: skip
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside)
    (storage.path / "loop").symlink_to(storage.path)
    with Lock(storage.store, f"linked/train-{PRINT[:12]}"):
        pass
    remove_garbage(inventory(storage), older_than=-5.0)
    assert not begun.path.exists()
    assert (done.open() / "a.bin").read_bytes() == b"first"


def test_keys_below_a_link_are_not_deleted(storage, outside):
    storage.path.mkdir()
    (storage.path / "linked").symlink_to(outside)
    refusal(lambda: storage.store.delete(["linked/file"]), "leads out of the storage")
    with pytest.raises(ValueError, match="not a key"):
        storage.store.delete(["../outside/file"])


def test_removal_of_a_link_to_a_folder_leaves_the_folder(storage, outside):
    storage.path.mkdir()
    (storage.path / "linked").symlink_to(outside)
    storage.store.delete(["linked"])
    assert not (storage.path / "linked").exists()


@pytest.mark.parametrize("content", [DEEP, b"[]", b"{}", b'{"holder": {"x": 1}}', b"\xff"])
def test_locks_that_are_none(storage, content):
    path = storage.path / "locks" / f"demo/train-{PRINT[:12]}" / "000000001.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    said = mistake_of("runs", "--storage", storage.path)
    assert "is not an entry of a lock; delete it" in said


def test_announcements_that_lead_out_of_the_storage(storage, tmp_path, outside):
    """`shared/<fingerprint>/...` names a step, and everyone with write access can write it."""
    recipe = loads("{name: demo, data: {source: digits}}", source="demo")
    step, evil = (plan(recipe, tmp_path / name)[0] for name in ("storage", "elsewhere"))
    stage = StageDir(evil.folder, evil.name, evil.fingerprint, SimpleNamespace(run_id="r"))
    stage.write_text("a.bin", "evil")
    stage.finish()
    for number, target in enumerate(("../elsewhere/demo", str(tmp_path / "elsewhere"), "", "\xff")):
        key = f"shared/{step.fingerprint}/{number:016x}"
        storage.store.put_new(key, f"{target}/{evil.place.name}".encode("latin1"))
    assert shared(step).place == step.place


def test_steps_of_hostile_names_are_shown_as_text(tmp_path):
    """Folders of a storage may have any name."""
    storage = Storage.at(tmp_path / "storage")
    finish(place_of(storage, "\x1b[2Jdemo\u202e", "prepare"), {"a.bin": b"first"})
    said = call("runs", "--storage", storage.path)
    assert said.code == 0
    assert "\\x1b[2Jdemo\\u202e" in said.out
    assert "\x1b" not in said.out
    shutil.rmtree(storage.path)


def test_a_root_that_is_a_link_works(tmp_path):
    """Whoever keeps runs on another disk links the whole folder."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    store = Store(tmp_path / "runs")
    store.put_new("a/b", b"1")
    store.delete(["a/b"])
    assert store.listing("") == []
