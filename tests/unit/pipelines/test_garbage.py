"""What gc removes and what it never touches: by example, by race, and for random histories."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pipelines.cli.amounts import size
from pipelines.cli.main import app
from pipelines.runtime import garbage
from pipelines.runtime.garbage import find_garbage, remove_garbage
from pipelines.runtime.inventory import inventory
from pipelines.runtime.locks import Lock
from pipelines.runtime.manifests import MANIFEST
from pipelines.runtime.storage import Storage
from pipelines.runtime.store import Store
from tests.stored_steps import (
    DAY,
    PRINT,
    begin,
    finish,
    force,
    make_older,
    place_of,
    write_and_publish,
)

AT_ONCE = -5.0  # seconds: everything is old, also by stamps in whole seconds


def reasons(found) -> dict[str, str]:
    return {entry.place: entry.reason for entry in found.garbage}


def keys(storage: Storage) -> set[str]:
    return {listed.key for listed in storage.store.listing("")}


def clean(storage: Storage, older_than: float = AT_ONCE):
    return remove_garbage(inventory(storage), older_than=older_than)


def test_all_kinds_of_garbage_go_and_finished_steps_stay(storage):
    store = storage.store
    done, lost = place_of(storage, "demo", "prepare"), place_of(storage, "demo", "train.lost")
    forced, begun = place_of(storage, "demo", "train.main"), place_of(storage, "demo", "attack.a")
    finish(done, {"a.bin": b"first"})
    store.put_new(f"{done.key}/unfinished/votes/1", b"part")
    finish(lost, {"a.bin": b"first"})
    write_and_publish(lost, {"a.bin": b"loser"})
    finish(forced, {"same.bin": b"same", "model/w.bin": b"old"})
    force(forced)
    finish(forced, {"same.bin": b"same", "model/w.bin": b"new"})
    begin(begun, {"w.bin": b"half"}, stored=True)
    others = ["storage-id", "mlflow.db", "demo/notes.txt", "probes/mine", "mlartifacts/1/a"]
    for key in others:
        store.put_new(key, b"mine")
    expected = {
        done.key: garbage.LEFT,
        lost.key: garbage.UNNAMED,
        forced.key: garbage.EARLIER,
        begun.key: garbage.GIVEN_UP,
    }
    assert reasons(find_garbage(inventory(storage), older_than=AT_ONCE)) == expected
    planned = {
        k for g in find_garbage(inventory(storage), older_than=AT_ONCE).garbage for k in g.keys
    }
    before = keys(storage)
    removed = clean(storage)
    assert {k for g in removed.garbage for k in g.keys} == planned
    gone = {key for key in before - keys(storage) if not key.startswith("locks/")}
    assert planned <= gone
    assert not [key for key in keys(storage) if key.startswith((begun.key, f"locks/{begun.key}"))]
    for place, files in (
        (done, {"a.bin": b"first"}),
        (lost, {"a.bin": b"first"}),
        (forced, {"same.bin": b"same", "model/w.bin": b"new"}),
    ):
        assert place.is_finished(PRINT)
        assert {name: (place.open() / name).read_bytes() for name in files} == files
    assert {store.get(key) for key in others} == {b"mine"}
    assert not find_garbage(inventory(storage), older_than=AT_ONCE).garbage
    finish(begun, {"w.bin": b"whole"})  # from the start again
    assert (begun.open() / "w.bin").read_bytes() == b"whole"


def test_young_unfinished_work_stays(storage):
    begin(place_of(storage, "demo", "train.main"), {"w.bin": b"half"}, stored=True)
    before = keys(storage)
    assert clean(storage, older_than=DAY).garbage == ()
    assert keys(storage) == before


def test_a_step_in_use_is_left_alone(storage):
    place = place_of(storage, "demo", "train.main")
    begin(place, {"w.bin": b"half"}, stored=True)
    finish(place_of(storage, "demo", "prepare"), {"a.bin": b"1"})
    seen = inventory(storage)
    with Lock(storage.store, place.key):
        before = keys(storage)
        found = clean(storage)
        assert f"{place.key}: in use" in found.kept
        assert place.key not in reasons(found)
        late = remove_garbage(seen, older_than=AT_ONCE)  # begun again after the look
        assert f"{place.key}: in use" in late.kept
        assert {key for key in before if key.startswith(place.key)} <= keys(storage)


def test_a_step_that_was_used_since_the_look_is_left_alone(storage):
    place = place_of(storage, "demo", "train.main")
    begin(place, {"w.bin": b"half"}, stored=True)
    seen = inventory(storage)
    finish(place, {"w.bin": b"whole"})
    assert f"{place.key}: in use" in remove_garbage(seen, older_than=AT_ONCE).kept
    assert (place.open() / "w.bin").read_bytes() == b"whole"


def test_earlier_generations_stay_for_running_flows(tmp_path):
    storage = Storage.at(tmp_path)
    place, reader = place_of(storage, "demo", "prepare"), place_of(storage, "other", "train.main")
    finish(place, {"a.bin": b"old"})
    opened = place.open()
    force(place)
    finish(place, {"a.bin": b"new"})
    with Lock(storage.store, reader.key):
        kept = clean(storage).kept
        assert f"{place.key}: earlier generations, which running flows may read" in kept
        assert (opened / "a.bin").read_bytes() == b"old"
    assert reasons(clean(storage))[place.key] == garbage.EARLIER
    assert (place.open() / "a.bin").read_bytes() == b"new"


def test_a_generation_that_a_finished_step_was_made_from_stays(storage):
    place, other = place_of(storage, "demo", "train.main"), place_of(storage, "other", "certify.l2")
    finish(place, {"w.bin": b"first", "same.bin": b"same"})
    finish(other, {"votes.bin": b"votes"}, train=place.open())
    first = place.open()
    for content in (b"second", b"third"):
        force(place)
        finish(place, {"w.bin": content, "same.bin": b"same"})
    found = clean(storage)
    assert f"{place.key}: generation 0, an input of finished steps" in found.kept
    stored = {key.split("/")[-1] for key in keys(storage) if key.startswith(place.key)}
    assert {"000000.manifest.json", "000002.manifest.json"} <= stored
    assert "000001.manifest.json" not in stored
    assert (first / "w.bin").read_bytes() == b"first"
    assert (place.open() / "w.bin").read_bytes() == b"third"
    assert not find_garbage(inventory(storage), older_than=AT_ONCE).garbage
    force(place)  # unfinished for long: what it was to replace counts
    assert place.key not in reasons(clean(storage))
    begin(place, {"w.bin": b"fourth"})
    assert reasons(clean(storage))[place.key] == garbage.LEFT
    assert (place.open() / "w.bin").read_bytes() == b"third"


def test_announcements_of_steps_that_are_gone_go(tmp_path):
    storage = Storage.at(tmp_path)
    place = place_of(storage, "demo", "prepare")
    finish(place, {"a.bin": b"1"})
    for number, key in enumerate((place.key, "gone/prepare-0123456789ab")):
        storage.store.put_new(f"shared/{PRINT}/{number:016x}", key.encode())
    assert not clean(storage, older_than=DAY).garbage
    make_older(tmp_path, 2 * DAY)
    assert garbage.NO_STEP in reasons(clean(storage, older_than=DAY)).values()
    assert [one.key for one in storage.store.listing("shared")] == [f"shared/{PRINT}/{0:016x}"]


def test_a_step_with_a_damaged_manifest_is_left_alone(tmp_path):
    place = place_of(Storage.at(tmp_path), "demo", "prepare")
    finish(place, {"a.bin": b"1"})
    (place.path / f"000000.{MANIFEST}").write_text("{")
    before = keys(place.storage)
    found = clean(place.storage, older_than=DAY)
    assert found.kept == (f"{place.key}: its manifest is damaged",)
    assert keys(place.storage) == before


def test_what_killed_processes_left_goes_after_a_day(tmp_path):
    store = Storage.at(tmp_path).store
    store.put_new("probes/" + 32 * "a", b"first")
    store.put_new("probes/doctor-" + 12 * "b" + "/driver", b"token")
    Lock(store, "demo/tracking").acquire().release()
    (tmp_path / ".writing" / "torn").write_bytes(b"half")
    assert not find_garbage(inventory(Storage.at(tmp_path)), older_than=DAY).garbage
    make_older(tmp_path, 2 * DAY)
    assert reasons(find_garbage(inventory(Storage.at(tmp_path)), older_than=DAY)) == {
        "locks/demo/tracking": garbage.OLD_LOCK,
        "probes": garbage.PROBE,
        ".writing": garbage.TORN,
    }
    clean(Storage.at(tmp_path), older_than=DAY)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_hidden_files_of_given_up_work_go_with_it(tmp_path):
    place = place_of(Storage.at(tmp_path), "demo", "train.main")
    begin(place, {"w.bin": b"half"})
    (place.path / "unfinished" / ".ray").write_text("hidden")
    clean(place.storage)
    assert not place.path.exists()


# -- random histories

NAMES = ("a.bin", "model/w.bin")
FILES = st.dictionaries(st.sampled_from(NAMES), st.binary(min_size=1, max_size=3), min_size=1)
EVENT = st.one_of(
    st.tuples(st.just("finish"), FILES),
    st.tuples(st.just("lose"), FILES),
    st.tuples(st.just("kill"), FILES),
    st.tuples(st.just("kill before the manifest"), FILES),
    st.tuples(st.just("force"), st.just({})),
)
HISTORY = st.lists(st.tuples(st.integers(0, 2), EVENT), max_size=8)


def happen(place, event, files):
    if event == "force":
        force(place)
    elif event == "lose":
        write_and_publish(place, files)
    elif event == "finish":
        finish(place, files)
    else:
        begin(place, files, stored=event != "kill")


def contents(place):
    """Files of a finished step, as readers get them; None for one that never was."""
    if place.published() is None:
        return None
    assert place.manifest() is None or place.is_finished(PRINT)
    folder = place.open()
    return {name: (folder / name).read_bytes() for name in folder.files}


class Killed(BaseException):
    """The end of a process between two deletions."""


def dying(patch, num_deletions):
    """Let a store delete so many keys and no more."""
    delete, left = Store.delete, [num_deletions]

    def delete_some(store, some):
        for key in some:
            if not left[0] and not key.startswith("locks/"):
                raise Killed
            left[0] -= not key.startswith("locks/")
            delete(store, [key])

    patch.setattr(Store, "delete", delete_some)


FORCED = [(0, ("finish", {"a.bin": b"1"})), (0, ("force", {}))]


@settings(max_examples=60, deadline=None)
@example(FORCED, set(), 1, True)
@example([*FORCED, (0, ("finish", {"a.bin": b"2"}))], set(), 1, True)
@given(HISTORY, st.sets(st.integers(0, 2), max_size=1), st.integers(0, 12), st.booleans())
def test_whatever_happened_finished_steps_stay_whole(history, in_use, num_deletions, is_old):
    older_than = AT_ONCE if is_old else DAY
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # the disk is not the subject
        storage = Storage.at(folder)
        places = [place_of(storage, recipe, "train.main") for recipe in "abc"]
        for number, (event, files) in history:
            happen(places[number], event, files)
        (Path(folder) / "mlflow.db").write_bytes(b"mine")
        locks = [Lock(storage.store, places[number].key).acquire() for number in in_use]
        before = [contents(place) for place in places]
        with patch.context() as killing:
            dying(killing, num_deletions)
            try:
                clean(storage, older_than)
            except Killed:
                assert [contents(place) for place in places] == before
                for step in inventory(storage).steps.values():
                    for manifest in step.earlier.values():
                        assert step.files_of(manifest) <= step.names.keys()
        used = {number: keys_of(places[number]) for number in in_use}
        clean(storage, older_than)
        assert [contents(place) for place in places] == before
        assert used == {number: keys_of(places[number]) for number in in_use}
        assert not find_garbage(inventory(storage), older_than=older_than).garbage
        for number, place in enumerate(places):
            if before[number] is None and number not in in_use:
                assert not is_old or not keys_of(place) or in_use
        for lock in locks:
            lock.release()
        assert (Path(folder) / "mlflow.db").read_bytes() == b"mine"
        for place in places:  # what was given up can be done again
            if place.manifest() is None:
                finish(place, {"a.bin": b"again"})
                assert contents(place)["a.bin"] == b"again"


def keys_of(place):
    return [listed.key for listed in place.store.listing(place.key)]


# -- the command


def test_gc_lists_first_and_removes_when_told(tmp_path):
    def run(*words):
        return CliRunner().invoke(app, ["gc", "--storage", str(tmp_path), *words]).stdout

    place = place_of(Storage.at(tmp_path), "demo", "train.main")
    assert run() == f"{tmp_path}: nothing to remove\n"
    finish(place, {"w.bin": bytes(50_000)})
    force(place)
    finish(place, {"w.bin": b"new"})
    amount = size(50_000 + (place.path / f"000000.{MANIFEST}").stat().st_size)
    listed = run().splitlines()
    assert listed[0].split() == ["place", "reason", "files", "size"]
    assert listed[1].split() == [place.key, "earlier", "generation", "2", *amount.split()]
    assert listed[2].endswith(f"{amount} in 2 files could be removed; --delete removes them")
    assert len(list(place.path.glob("files/*/w.bin"))) == 2
    removed = json.loads(run("--delete", "--json"))
    assert (removed["deleted"], removed["files"], removed["kept"]) == (True, 2, [])
    assert (place.open() / "w.bin").read_bytes() == b"new"
    assert run("--delete") == f"{tmp_path}: nothing was removed\n"
