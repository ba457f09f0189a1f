"""Step folders: whole files, the manifest last, one writer at a time."""

import hashlib
import json
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.core.errors import CasemateError
from pipelines.runtime.artifacts import (
    MANIFEST,
    StageDir,
    changed_files,
    hold,
    in_turn,
    is_finished,
    is_made_from,
    prepare_storage,
    read_manifest,
)

PRINT = "f" * 64


def new_stage(path: Path, **inputs: Path) -> StageDir:
    path.mkdir(parents=True, exist_ok=True)
    return StageDir(path, "train.standard", PRINT, SimpleNamespace(run_id="mlflow-1"), inputs)


def two_stages(root: Path) -> tuple[StageDir, StageDir]:
    """A finished step, and one that reads it."""
    before = new_stage(root / "prepare")
    before.write_text("dataset.json", "{}")
    before.finish()
    return before, new_stage(root / "train", prepare=before.path)


@pytest.fixture
def finished(tmp_path) -> Path:
    out = new_stage(tmp_path / "step")
    out.write_text("model/model.json", "{}")
    out.write_bytes("weights.bin", b"12345")
    out.finish()
    return out.path


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


def test_a_step_knows_when_its_inputs_were_replaced(tmp_path):
    before, out = two_stages(tmp_path)
    out.write_bytes("weights.bin", b"12345")
    out.finish()
    assert is_made_from(out.path, {"prepare": before.path})
    before.write_text("dataset.json", '{"other": 1}')
    before.finish()
    assert is_finished(before.path, PRINT)  # same fingerprint, other content
    assert not is_made_from(out.path, {"prepare": before.path})


def test_a_change_of_equal_size_is_seen(finished):
    path = finished / "weights.bin"
    assert changed_files(finished) == []
    path.write_bytes(bytes(len(path.read_bytes())))
    assert changed_files(finished) == ["weights.bin"]
    with pytest.raises(CasemateError, match="changed"):
        is_finished(finished, PRINT)


def test_finished_means_manifest_fingerprint_and_files(finished, tmp_path):
    assert is_finished(finished, PRINT)
    assert not is_finished(finished, "0" * 64)
    assert not is_finished(tmp_path / "nowhere", PRINT)
    (finished / MANIFEST).unlink()
    assert not is_finished(finished, PRINT)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_damaged_step_is_refused_by_file(finished, damage):
    path = finished / "weights.bin"
    path.unlink() if damage == "missing" else path.write_bytes(b"123")
    with pytest.raises(CasemateError, match=r"weights\.bin is missing or changed.*--force"):
        is_finished(finished, PRINT)


def test_a_damaged_manifest_is_refused(finished):
    (finished / MANIFEST).write_text('{"files": {')
    with pytest.raises(CasemateError, match=r"manifest\.json is damaged"):
        is_finished(finished, PRINT)


# -- locks


def test_a_step_has_one_writer_and_no_readers_meanwhile(tmp_path):
    demo = tmp_path / "demo"
    with hold(demo, write=["train-1"], read=["prepare-1"]):
        for mine in ({"write": ["train-1"]}, {"read": ["train-1"]}, {"write": ["prepare-1"]}):
            with (
                pytest.raises(CasemateError, match=r"demo/\w+-1 is in use by another run"),
                hold(demo, **mine),
            ):
                pytest.fail("two holders")
        with hold(demo, write=["attack-1"], read=["prepare-1"]):
            pass  # another step of the same inputs
        with hold(tmp_path / "other", write=["train-1"]):
            pass  # another recipe
    with hold(demo, write=["train-1", "prepare-1"]):
        pass  # released


def test_a_refused_lock_leaves_none_behind(tmp_path):
    with hold(tmp_path, write=["b"]):
        with pytest.raises(CasemateError), hold(tmp_path, write=["a", "b"]):
            pytest.fail("two holders")
        with hold(tmp_path, write=["a"]):
            pass


def test_locks_are_released_by_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), hold(tmp_path, write=["a"]):
        1 / 0  # noqa: B018 - the error is the point
    with hold(tmp_path, write=["a"]):
        pass


def _hold(folder, ready):
    with hold(folder, write=["a"]), in_turn(folder, "tracking"):
        ready.set()
        signal.pause()


def test_locks_fall_with_a_killed_process(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready), daemon=True)
    holder.start()
    assert ready.wait(20)
    with pytest.raises(CasemateError, match="in use"), hold(tmp_path, read=["a"]):
        pytest.fail("two holders")
    os.kill(holder.pid, signal.SIGKILL)
    with in_turn(tmp_path, "tracking"):  # waits for the end of the process
        pass
    holder.join(20)
    with hold(tmp_path, write=["a"]):
        pass


# -- storage


def test_storage_is_made_and_left_clean(tmp_path):
    root = prepare_storage(tmp_path / "new" / "runs")
    assert root.is_absolute()
    assert list(root.iterdir()) == []


def test_storage_that_cannot_be_written_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CasemateError, match=r"storage\.root: .* cannot be written .*--storage"):
        prepare_storage(tmp_path / "file" / "runs")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_storage_is_the_users_to_mend(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CasemateError, match=r"storage\.root: .* cannot be written"):
        prepare_storage(tmp_path)
