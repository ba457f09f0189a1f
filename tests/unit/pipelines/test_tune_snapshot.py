"""What survives a kill: snapshots that are whole, and schedulers that remember."""

import json
import os
import pickle
import zipfile
from types import SimpleNamespace

import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from pipelines.recipe.load import loads, with_values
from pipelines.runtime.store import open_store
from pipelines.stages.tune import schedulers as tune_schedulers
from pipelines.stages.tune import snapshot as tune_snapshot
from pipelines.stages.tune.search import Ending
from pipelines.stages.tune.worker import MISTAKE

BASE = """\
name: x
seed: 5
data: {source: digits}
train: {objective: {kind: fgsm, eps: 8/255}, epochs: 8}
"""
SESSION = "2026-11-16_16-00-00"


def scheduler(section: str, **changes: object):
    recipe = with_values(loads(f"{BASE}tune: {{{section}}}\n", source="x"), changes)
    found = tune_schedulers.scheduler(recipe, epochs=8)
    found.set_search_properties("score", "max")
    return found


@pytest.fixture
def ray_files(tmp_path):
    """A search as Ray leaves it: saved here, copied to the storage; and what it would go on from.

    `saved(number)` is a moment of Ray's; `step` is what it does afterwards.
    """
    place, staging = tmp_path / "tune-f", tmp_path / "staging"
    storage = SimpleNamespace(
        experiment_fs_path=str(place), experiment_driver_staging_path=str(staging)
    )
    for folder in (place, staging):
        folder.mkdir()
    (place / "tuner.pkl").write_bytes(b"tuner")
    callback = tune_snapshot.Snapshots(FIFOScheduler())

    def saved(number: int) -> None:
        state = {"trial_data": [], "number": number}
        path = staging / f"experiment_state-{SESSION}.json"
        path.write_text(json.dumps(state))
        os.utime(path, (2e9, 2e9 + number))  # no clock is asked
        (staging / f"basic-variant-state-{SESSION}.json").write_text(str(number))
        (staging / ".uuid-tmp-searcher.json").write_text("not yet")

    def step() -> None:
        callback.on_step_end(iteration=0, trials=[SimpleNamespace(storage=storage)])

    return SimpleNamespace(
        place=place, store=open_store(place), saved=saved, step=step, callback=callback
    )


def last_snapshot(place):
    return max((place / tune_snapshot.SNAPSHOTS).glob("*.zip"))


def went_on_from(place) -> tuple[int, str, bytes]:
    state = json.loads((place / f"experiment_state-{SESSION}.json").read_text())
    variant = (place / f"basic-variant-state-{SESSION}.json").read_text()
    return state["number"], variant, (place / "tuner.pkl").read_bytes()


@pytest.mark.parametrize("left", ["", '{"trial_data": [], "numb'])
def test_files_that_a_kill_left_in_pieces_are_replaced_by_the_last_whole_moment(ray_files, left):
    for number in (1, 2):
        ray_files.saved(number)
        ray_files.step()
    for name in ("experiment_state", "basic-variant-state"):
        for session in (SESSION, "2026-11-16_17-00-00"):  # and a start that was killed at once
            (ray_files.place / f"{name}-{session}.json").write_text(left)
    (ray_files.place / "tuner.pkl").write_bytes(b"")
    assert tune_snapshot.unpack(ray_files.store) is None
    assert went_on_from(ray_files.place) == (2, "2", b"tuner")
    assert len(list(ray_files.place.glob("*.json"))) == 2


def test_nothing_is_written_while_ray_saves_nothing(ray_files):
    ray_files.saved(1)
    ray_files.step()
    before = last_snapshot(ray_files.place)
    ray_files.step()
    assert last_snapshot(ray_files.place) == before


def test_two_snapshots_are_kept(ray_files):
    for number in (1, 2, 3, 4):
        ray_files.saved(number)
        ray_files.step()
    kept = sorted(p.name for p in (ray_files.place / tune_snapshot.SNAPSHOTS).iterdir())
    assert kept == ["000000002.zip", "000000003.zip"]


def test_trials_that_a_mistake_ended_go_on_when_it_is_mended(ray_files):
    ray_files.saved(1)
    ray_files.step()
    ray_files.callback.on_trial_result(iteration=0, trials=[], trial=None, result={"score": 0.1})
    ray_files.saved(2)
    ray_files.step()
    ray_files.callback.on_trial_result(iteration=0, trials=[], trial=None, result={MISTAKE: []})
    ray_files.saved(3)
    ray_files.step()
    assert tune_snapshot.unpack(ray_files.store) is None
    assert went_on_from(ray_files.place)[0] == 2


def test_what_cannot_be_read_is_named(ray_files):
    place = ray_files.store
    assert tune_snapshot.unpack(place) == "it was killed before its first snapshot"
    ray_files.saved(1)
    ray_files.step()
    snapshot = last_snapshot(ray_files.place)
    whole = snapshot.read_bytes()
    snapshot.write_bytes(whole.replace(b"trial_data", b"trial_DATA", 1))
    assert tune_snapshot.unpack(place) == "its snapshot is damaged"
    for broken in (b"", whole[:40]):
        snapshot.write_bytes(broken)
        assert "its snapshot cannot be read" in tune_snapshot.unpack(place)
    with zipfile.ZipFile(snapshot, "w") as archive:
        archive.writestr(f"experiment_state-{SESSION}.json", "{}")
    assert "cannot read its state (KeyError)" in tune_snapshot.unpack(place)


def test_a_mistake_ends_the_search_and_an_end_ends_a_trial():
    ending = Ending(3)
    assert [ending("a", {"epochs": n}) for n in (1, 2, 3)] == [False, False, True]
    assert not ending.stop_all()
    assert not Ending(None)("a", {"epochs": 99})
    ending("a", {"epochs": 0, MISTAKE: ["key", "value", "remedy"]})
    assert ending.stop_all()


class Population(list):
    """Trials, and what a scheduler asks Ray about them."""

    def __init__(self, rates):
        super().__init__(FakeTrial(number, rate) for number, rate in enumerate(rates))
        self.search_alg, self._tune_controller, self.marked = None, self, []

    get_trials = get_live_trials = lambda self: self

    def _mark_trial_to_checkpoint(self, trial) -> None:
        self.marked.append(trial.number)


class FakeTrial:
    def __init__(self, number: int, rate: float) -> None:
        values = {"train.learning_rate": rate}
        self.config = {"point": {"trial": number, "values": values}}
        self.trial_id, self.number, self.status = f"t{number}", number, Trial.PENDING
        self.experiment_tag, self.checkpoint = f"{number}", f"checkpoint of {number}"
        manager = SimpleNamespace(checkpoint_config=SimpleNamespace(num_to_keep=8))
        self.run_metadata = SimpleNamespace(checkpoint_manager=manager)
        self.temporary_state = SimpleNamespace(saving_to=None)

    def is_finished(self) -> bool:
        return self.status == Trial.TERMINATED

    def set_status(self, status: str) -> None:
        self.status = status

    def set_config(self, config) -> None:
        self.config = config

    def set_experiment_tag(self, tag: str) -> None:
        self.experiment_tag = tag

    @property
    def copied(self):
        found = getattr(self.run_metadata.checkpoint_manager, "_latest_checkpoint_result", None)
        return found and found.checkpoint


def restarted(before, after, trials) -> None:
    """A new process: the state from a file, then the trials again, all of them pending."""
    after.restore(pickle.loads(pickle.dumps(before.state())))
    for trial in trials:
        trial.status = Trial.PENDING
        after.on_trial_add(trials, trial)


ASHA = "space: {train.learning_rate: [0.1, 0.2]}, scheduler: {kind: asha, grace_epochs: 2}"


def test_rungs_of_an_interrupted_search_still_count():
    trials, first, second = Population([0.1] * 3), scheduler(ASHA), scheduler(ASHA)
    for trial in trials:
        first.on_trial_add(trials, trial)
    good, bad, late = trials
    assert first.on_trial_result(trials, good, {"epochs": 2, "score": 0.9}) == "CONTINUE"
    assert first.on_trial_result(trials, bad, {"epochs": 2, "score": 0.1}) == "STOP"
    restarted(first, second, trials)
    assert second.on_trial_result(trials, late, {"epochs": 2, "score": 0.4}) == "STOP"
    # The kill came between decision and end: it repeats its epoch, and ends.
    assert second.on_trial_result(trials, bad, {"epochs": 2, "score": 0.1}) == "STOP"
    assert second.on_trial_result(trials, good, {"epochs": 3, "score": 0.9}) == "CONTINUE"


PBT = (
    "space: {train.learning_rate: [0.1, 0.2, 0.4, 0.8]}, "
    "scheduler: {kind: pbt, interval: 2, quantile: 0.5}"
)


def report(pbt, trials, number: int, epochs: int, score: float) -> None:
    decision = pbt.on_trial_result(trials, trials[number], {"epochs": epochs, "score": score})
    if decision == TrialScheduler.PAUSE:
        trials[number].status = Trial.PAUSED


def test_a_population_goes_on_at_the_epoch_where_it_was_killed():
    """Two of four wait at epoch 4 when the kill comes; the others still have to get there."""
    ends = []
    for killed in (False, True):
        pbt, trials = scheduler(PBT), Population([0.1, 0.2, 0.4, 0.8])
        for trial in trials:
            pbt.on_trial_add(trials, trial)
            trial.status = Trial.PAUSED  # as if each had its turn
        for number in range(4):
            report(pbt, trials, number, 2, score=number / 10)
        assert trials.marked == [0, 1]  # the worse half: its change is saved at once
        for number in (0, 1):
            report(pbt, trials, number, 4, score=number / 10)
        if killed:
            before, pbt = pbt, scheduler(PBT)
            restarted(before, pbt, trials)
            assert [trial.status for trial in trials] == [Trial.PAUSED] * 2 + [Trial.PENDING] * 2
            for trial in trials:
                trial.status = Trial.PAUSED
        for number in (2, 3):
            report(pbt, trials, number, 4, score=number / 10)
        assert trials.marked == [0, 1, 0, 1]
        assert pbt._next_perturbation_sync == 6
        ends.append([(trial.config["point"], trial.copied) for trial in trials])
    assert ends[0] == ends[1]
    assert {copied for _, copied in ends[0][:2]} <= {"checkpoint of 2", "checkpoint of 3"}


def test_a_trial_that_comes_back_after_a_failure_waits_for_the_same_epoch():
    pbt, trials = scheduler(PBT), Population([0.1, 0.2, 0.4, 0.8])
    for trial in trials:
        pbt.on_trial_add(trials, trial)
    report(pbt, trials, 0, 2, score=0.5)
    pbt.on_trial_add(trials, trials[0])
    assert pbt._trial_state[trials[0]].last_train_time == 2
    assert pbt._trial_state[trials[0]].last_score == 0.5


def test_which_good_trial_is_copied_depends_on_seed_trial_and_epoch():
    def copied(seed: int) -> list[str]:
        pbt, trials = scheduler(PBT, seed=seed), Population([0.1, 0.2, 0.4, 0.8] * 4)
        for trial in trials:
            pbt.on_trial_add(trials, trial)
            trial.status = Trial.PAUSED
        for number in range(16):
            report(pbt, trials, number, 2, score=number / 100)
        return [trial.copied for trial in trials[:8]]

    assert copied(1) == copied(1)
    assert len({tuple(copied(seed)) for seed in range(4)}) == 4


def test_a_search_without_decisions_has_nothing_to_keep():
    assert tune_snapshot.Snapshots(FIFOScheduler()).get_state() is None
