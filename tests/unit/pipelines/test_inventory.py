"""What a storage holds: states, sizes and ages of steps and flows, on folders and buckets."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from components.core.errors import CasemateError
from pipelines import api
from pipelines.cli.main import app
from pipelines.runtime.inventory import existing_storage, inventory
from pipelines.runtime.locks import Lock
from pipelines.runtime.manifests import FIRST_FORMAT, MANIFEST
from pipelines.runtime.step_locks import hold
from pipelines.runtime.storage import Storage
from tests.stored_steps import DAY, begin, finish, force, make_older, place_of


def test_steps_have_states_and_sizes_without_second_names(storage):
    done, begun = place_of(storage, "demo", "prepare"), place_of(storage, "demo", "train.main")
    finish(done, {"data/a.bin": bytes(1000), "b.bin": b"1"})
    begin(begun, {"weights.bin": bytes(300)}, stored=True)
    place = place_of(storage, "demo", "certify.l2")
    with hold(storage.store, [place.key]):
        held = inventory(storage)
    steps = {step.step: step for step in held.steps.values()}
    states = {name: step.state for name, step in steps.items()}
    assert states == {"prepare": "finished", "train.main": "unfinished", "certify.l2": "running"}
    manifest = storage.store.get(done.manifest_key(0))
    assert steps["prepare"].sizes.files == 1001 + len(manifest)
    assert steps["prepare"].sizes.total == steps["prepare"].sizes.files
    assert steps["train.main"].sizes.total == 300 + len("part")
    (flow,) = held.flows()
    assert (flow.name, flow.state, flow.num_finished, len(flow.steps)) == ("demo", "running", 1, 3)
    assert inventory(storage).flows()[0].state == "unfinished"  # the lock was released


def test_a_forced_step_has_earlier_files_before_and_after_it_is_finished(storage):
    place = place_of(storage, "demo", "train.main")
    finish(place, {"weights.bin": bytes(1000)})
    force(place)
    (step,) = inventory(storage).steps.values()
    assert (step.state, step.generation, step.sizes.files) == ("unfinished", 1, 0)
    assert step.sizes.earlier > 1000
    finish(place, {"weights.bin": bytes(400)})
    (step,) = inventory(storage).steps.values()
    assert (step.state, step.generation) == ("finished", 1)
    assert 400 < step.sizes.files < 400 + 3000
    assert 1000 < step.sizes.earlier < 1000 + 3000


def test_tables_of_steps_and_flows(storage):
    finish(place_of(storage, "old", "prepare"), {"a.bin": bytes(2500)})
    finish(place_of(storage, "demo", "prepare"), {"a.bin": bytes(10)})
    steps, root = api.steps(storage.root), storage.root
    assert set(steps["recipe"]) == {"old", "demo"}
    assert dict(zip(steps["recipe"], steps["kB"], strict=True)) == {"old": 2, "demo": 0}
    assert str(steps["folder"][0]).startswith(root)
    assert set(api.flows(root)["state"]) == {"finished"}
    assert api.flow_steps("old", root)["step"].tolist() == ["prepare"]
    assert api.results(root).empty
    with pytest.raises(CasemateError, match=r"flow: other is not a flow of .* demo, old"):
        api.flow_steps("other", root)


def test_a_step_of_version_0_1_is_finished(tmp_path):
    place = place_of(Storage.at(tmp_path), "demo", "prepare")
    finish(place, {"weights.bin": b"12345"})
    document = json.loads((place.path / MANIFEST).read_text())
    first = {key: document[key] for key in document if key in FIRST_FORMAT}
    shutil.rmtree(place.path / "files")
    (place.path / f"000000.{MANIFEST}").unlink()
    assert inventory(place.storage).steps[place.key].state == "unfinished"  # a copy, not the claim
    (place.path / MANIFEST).write_text(json.dumps(first))
    step = inventory(place.storage).steps[place.key]
    assert step.state == "finished"
    assert step.sizes.total == 5 + len(json.dumps(first))
    make_older(tmp_path, 100 * DAY)
    assert api.gc(tmp_path, delete=True, older_than=1).num_files == 1  # an entry of its lock
    assert (place.open() / "weights.bin").read_bytes() == b"12345"


def test_folders_like_steps_are_not_steps(tmp_path):
    photo = tmp_path / "photos" / "holiday-202607080900" / "beach.png"
    photo.parent.mkdir(parents=True)
    photo.write_bytes(b"photo")
    assert not inventory(Storage.at(tmp_path)).steps
    assert [listed.key for listed in inventory(Storage.at(tmp_path)).others] == [
        "photos/holiday-202607080900/beach.png"
    ]


def test_a_damaged_manifest_is_named_where_it_is_needed(tmp_path):
    place = place_of(Storage.at(tmp_path), "demo", "prepare")
    finish(place, {"a.bin": b"1"})
    (place.path / f"000000.{MANIFEST}").write_text("{")
    assert api.flows(tmp_path)["state"].tolist() == ["finished"]
    with pytest.raises(CasemateError, match=r"000000\.manifest\.json is damaged"):
        api.steps(tmp_path)


def test_listing_writes_nothing(tmp_path):
    place = place_of(Storage.at(tmp_path), "demo", "prepare")
    begin(place, {})
    lock = Lock(place.store, place.key).acquire()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    api.flows(tmp_path)
    api.gc(tmp_path, older_than=0)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    lock.release()


# -- commands


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_runs_shows_flows_and_steps(tmp_path):
    storage = Storage.at(tmp_path)
    assert run("runs", "--storage", tmp_path).stdout == f"{tmp_path}: no flows\n"
    finish(place_of(storage, "demo", "prepare"), {"a.bin": bytes(150_000)})
    begin(place_of(storage, "demo", "train.main"), {"weights.bin": bytes(3000)})
    finish(place_of(storage, "older", "prepare"), {"a.bin": bytes(2000)})
    make_older(tmp_path / "older", 3 * DAY)
    flows = run("runs", "--storage", tmp_path).stdout.splitlines()
    assert flows[0].split() == ["flow", "state", "steps", "size", "age"]
    assert flows[1].split()[:3] == ["older", "finished", "1/1"]
    assert flows[1].endswith(" 3 d")
    assert flows[2].split()[:5] == ["demo", "unfinished", "1/2", "154", "kB"]
    steps = run("runs", "demo", "--storage", tmp_path).stdout
    assert [line.split()[:3] for line in steps.splitlines()[1:]] == [
        ["demo/prepare-0123456789ab", "finished", "-"],
        ["demo/train.main-0123456789ab", "unfinished", "-"],
    ]
    rows = json.loads(run("runs", "--steps", "--storage", tmp_path, "--json").stdout)
    assert [row["flow"] for row in rows] == ["older", "demo", "demo"]
    assert rows[1]["folder"] == str(tmp_path / "demo" / "prepare-0123456789ab")


def test_the_storage_is_the_one_of_recipes_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(run("runs").exception).startswith("storage: runs is not a folder")
    finish(place_of(Storage.at(api.load_recipe("demo").storage.root), "demo", "prepare"), {})
    assert "demo  finished" in run("runs").stdout


@pytest.mark.parametrize(
    ("place", "message"),
    [("nothing", "nothing is not a folder; run a recipe first"), ("ftp://a/b", "ftp://a/b ")],
)
def test_a_storage_that_cannot_be_read_is_refused(place, message):
    with pytest.raises(CasemateError, match=f"storage: {message}"):
        existing_storage(place)
