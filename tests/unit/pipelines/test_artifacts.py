"""Step folders: whole files, the manifest last, one writer at a time."""

import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.core.errors import CasemateError
from components.core.folders import Folder, fetched, within
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.manifests import (
    FIRST_FORMAT,
    MANIFEST,
    changed_files,
    other_manifests,
    read_manifest,
)
from pipelines.runtime.step_locks import hold, in_turn
from pipelines.runtime.storage import StepPlace, Storage, open_storage
from pipelines.runtime.store import open_store

PRINT = "f" * 64


def new_stage(path: Path, at: StepPlace | None = None, **inputs: Path) -> StageDir:
    path.mkdir(parents=True, exist_ok=True)
    run = SimpleNamespace(run_id="mlflow-1")
    return StageDir(path, "train.standard", PRINT, run, inputs, at)


def two_stages(root: Path) -> tuple[StageDir, StageDir]:
    """A finished step, and one that reads it."""
    before = new_stage(root / "prepare")
    before.write_text("dataset.json", "{}")
    before.finish()
    return before, new_stage(root / "train", prepare=before.path)


@pytest.fixture
def finished(tmp_path) -> StageDir:
    out = new_stage(tmp_path / "step")
    out.write_text("model/model.json", "{}")
    out.write_bytes("weights.bin", b"12345")
    out.finish()
    return out


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    out = new_stage(tmp_path / "step")
    out.write_json("a/b.json", {"z": 1, "a": [1.5]})
    assert json.loads((out.path / "a/b.json").read_text()) == {"z": 1, "a": [1.5]}
    write = Path.write_bytes

    def torn(path, content):
        write(path, content[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", torn)
    with pytest.raises(OSError, match="No space"):
        out.write_text("a/b.json", "something else")
    with pytest.raises(OSError, match="No space"):
        out.write_text("new.txt", "something")
    assert json.loads((out.path / "a/b.json").read_text()) == {"z": 1, "a": [1.5]}
    assert not (out.path / "new.txt").exists()


def test_json_files_hold_no_nan(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        new_stage(tmp_path).write_json("x.json", {"loss": float("nan")})


def test_the_part_of_a_step_is_what_follows_the_dot(tmp_path):
    assert new_stage(tmp_path).part == "standard"


def test_the_manifest_lists_every_file_with_its_digest(tmp_path):
    _, out = two_stages(tmp_path)
    out.write_bytes("model/weights.bin", b"12345")
    (out.scratch / "checkpoint").write_text("only for a resumed step")
    (out.path / "model" / ".weights.bin.0a1b.tmp").write_text("left by a killed start")
    out.finish()
    manifest = read_manifest(out.path)
    digest = hashlib.sha256(b"12345").hexdigest()
    assert manifest.files == {"model/weights.bin": {"sha256": digest, "bytes": 5}}
    assert manifest.step == "train.standard"
    assert manifest.fingerprint == PRINT
    assert manifest.mlflow_run_id == "mlflow-1"
    assert manifest.input_folders == {"prepare": "../prepare"}  # the storage may move
    (source,) = manifest.inputs.values()
    assert source["fingerprint"] == PRINT
    assert source["mlflow_run_id"] == "mlflow-1"
    assert out.provenance()["software"].keys() >= {"torch", "timm", "ray", "casemate"}
    assert not (out.path / "unfinished").exists()


def test_a_change_of_equal_size_is_seen(finished):
    path = finished.path / "weights.bin"
    assert changed_files(finished.path) == []
    path.write_bytes(bytes(len(path.read_bytes())))
    assert changed_files(finished.path) == ["weights.bin"]
    with pytest.raises(CasemateError, match="changed"):
        finished.place.is_finished(PRINT)


def test_finished_means_manifest_fingerprint_and_files(finished, tmp_path):
    assert finished.place.is_finished(PRINT)
    assert not finished.place.is_finished("0" * 64)
    assert not new_stage(tmp_path / "other").place.is_finished(PRINT)


def test_what_people_see_may_be_deleted_and_is_not_what_counts(finished):
    (finished.path / "weights.bin").unlink()
    (finished.path / MANIFEST).unlink()
    assert finished.place.is_finished(PRINT)  # which shows them again
    assert changed_files(finished.path) == []
    assert (finished.place.open() / "weights.bin").read_bytes() == b"12345"


def test_a_changed_copy_of_the_manifest_is_refused(finished):
    shown = finished.path / MANIFEST
    shown.write_bytes(shown.read_bytes().replace(b"standard", b"stendard"))
    with pytest.raises(CasemateError, match=r"/manifest\.json is missing or changed"):
        finished.place.is_finished(PRINT)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_damaged_step_is_refused_by_file(finished, damage):
    (path,) = finished.path.glob("files/*/weights.bin")
    path.unlink() if damage == "missing" else path.write_bytes(b"123")
    with pytest.raises(CasemateError, match=r"weights\.bin is missing or changed.*--force"):
        finished.place.is_finished(PRINT)


def test_every_flipped_bit_of_a_manifest_is_seen(finished):
    path = finished.path / f"000000.{MANIFEST}"
    content = path.read_bytes()
    assert (finished.path / MANIFEST).read_bytes() == content
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        with pytest.raises(CasemateError, match=r"manifest\.json is damaged .*--force"):
            finished.place.manifest()


def test_a_manifest_of_version_0_1_is_read(finished):
    document = json.loads((finished.path / MANIFEST).read_text())
    first = {key: document[key] for key in document if key in FIRST_FORMAT}
    shutil.rmtree(finished.path / "files")
    (finished.path / f"000000.{MANIFEST}").unlink()
    (finished.path / MANIFEST).write_text(json.dumps(first))
    assert finished.place.is_finished(PRINT)
    assert (finished.place.open() / "weights.bin") == finished.path / "weights.bin"


def test_a_new_generation_leaves_the_files_of_the_last_one_to_their_readers(finished):
    reader = finished.place.open()
    finished.place.renew("test")
    assert not finished.place.is_finished(PRINT)
    assert (finished.place.open() / "weights.bin").read_bytes() == b"12345"  # until the new one
    assert changed_files(finished.path) == []
    again = new_stage(finished.place.work, at=finished.place)
    again.write_bytes("weights.bin", b"other")
    assert (finished.path / "weights.bin").read_bytes() == b"12345"
    again.finish()
    assert not (finished.path / "model").exists() or not list((finished.path / "model").iterdir())
    assert finished.place.manifest().generation == 1
    assert (finished.path / "weights.bin").read_bytes() == b"other"
    assert (finished.place.open() / "weights.bin").read_bytes() == b"other"
    assert (reader / "weights.bin").read_bytes() == b"12345"


def test_the_first_manifest_counts_whoever_comes_later(finished):
    late = new_stage(finished.place.work, at=finished.place)
    late.write_bytes("weights.bin", b"other")
    late.finish()
    assert (finished.path / "weights.bin").read_bytes() == b"12345"
    assert changed_files(finished.path) == []


def test_a_stored_folder_gives_files_folders_and_paths_where_nothing_is(finished, tmp_path):
    folder = pickle.loads(pickle.dumps(finished.place.open()))
    assert (folder / "model/model.json").read_text() == "{}"
    assert (folder / "model" / "model.json").read_text() == "{}"
    assert (within(folder, "model") / "model.json").read_text() == "{}"
    assert not (folder / "nothing.txt").exists()
    assert str(folder) == str(finished.path)
    assert isinstance(folder, Folder)


# -- locks


def test_a_step_has_one_writer(tmp_path):
    store = open_store(tmp_path)
    with hold(store, ["demo/train-1"]):
        with (
            pytest.raises(CasemateError, match=r"demo/train-1 is in use by another run: host"),
            hold(store, ["demo/train-1"]),
        ):
            pytest.fail("two holders")
        with hold(store, ["demo/attack-1"]):
            pass  # another step
        with hold(store, ["other/train-1"]):
            pass  # another recipe
    with hold(store, ["demo/train-1", "demo/prepare-1"]):
        pass  # released


def test_a_refused_lock_leaves_none_behind(tmp_path):
    store = open_store(tmp_path)
    with hold(store, ["b"]):
        with pytest.raises(CasemateError), hold(store, ["a", "b"]):
            pytest.fail("two holders")
        with hold(store, ["a"]):
            pass


def test_locks_are_released_by_an_error(tmp_path):
    store = open_store(tmp_path)
    with pytest.raises(ZeroDivisionError), hold(store, ["a"]):
        1 / 0  # noqa: B018 - the error is the point
    with hold(store, ["a"]):
        pass


def _hold(folder, ready):
    store = open_store(folder)
    with hold(store, ["a"]), in_turn(store, "tracking"):
        ready.set()
        signal.pause()


def test_locks_fall_with_a_killed_process(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready), daemon=True)
    holder.start()
    assert ready.wait(20)
    store = open_store(tmp_path)
    with pytest.raises(CasemateError, match="in use"), hold(store, ["a"]):
        pytest.fail("two holders")
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(20)
    with in_turn(store, "tracking"), hold(store, ["a"]):
        pass


# -- storage


def test_storage_is_made_and_left_clean(tmp_path):
    root = open_storage(tmp_path / "new" / "runs")
    assert root.path.is_absolute()
    assert [path for path in root.path.rglob("*") if path.is_file()] == []


def test_storage_that_cannot_be_written_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CasemateError, match=r"storage\.root: .* cannot be written .*--storage"):
        open_storage(tmp_path / "file" / "runs")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_storage_is_the_users_to_mend(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CasemateError, match=r"storage\.root: .* cannot be written"):
        open_storage(tmp_path)


@pytest.mark.parametrize("root", ["s3://bucket/my rüns", "s3://bucket/my%20r%C3%BCns"])
def test_ray_gets_the_uri_of_its_checkpoints_as_pyarrow_reads_it(tmp_path, root):
    folder = tmp_path / "tiny" / "train.main-0123456789ab"
    run = SimpleNamespace(run_id="mlflow-1")
    place = Storage.at(root).step("tiny", folder.name)
    out = StageDir(folder, "train.main", PRINT, run, at=place)
    expected = "s3://bucket/my%20r%C3%BCns/tiny/train.main-0123456789ab/unfinished"
    assert out.ray_storage == expected


def test_a_manifest_of_the_storage_that_people_do_not_see_is_named(finished):
    assert other_manifests(finished.path) == []
    kept = finished.path / f"000000.{MANIFEST}"
    content = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(content.replace(b"12", b"13", 1))
    assert other_manifests(finished.path) == [kept.name]


def test_a_fetched_folder_is_that_of_its_storage_and_mends_its_links(tmp_path, monkeypatch):
    monkeypatch.setenv("CASEMATE_CACHE", str(tmp_path / "cache"))
    folders = []
    for name in ("first", "second"):
        out = new_stage(tmp_path / name / "demo" / "step")
        out.write_text("model/model.json", "{}")
        out.finish()
        folders.append(fetched(within(out.place.open(), "model")))
    shutil.rmtree(tmp_path / "first")  # the same content is still in the other one
    assert (folders[1] / "model.json").read_text() == "{}"
    (folders[1] / "model.json").unlink()
    (folders[1] / "model.json").symlink_to(tmp_path / "nowhere")
    assert (fetched(within(out.place.open(), "model")) / "model.json").read_text() == "{}"
