"""What Ray Tune is given, without starting it: proposals, their state, and changes of trials."""

import pickle
from types import SimpleNamespace

import pytest
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

from pipelines.recipe.load import loads
from pipelines.stages.tune import schedulers as tune_schedulers
from pipelines.stages.tune.optuna_search import NumberedSearch

BASE = """\
name: x
seed: 5
data: {source: digits}
train: {objective: {kind: fgsm, eps: 8/255, eps_warmup_epochs: 3}, epochs: 8}
"""
SPACE = (
    "space: {train.learning_rate: {kind: loguniform, low: 1e-4, high: 1e-2}, "
    "train.warmup_epochs: {kind: integers, low: 0, high: 4, step: 2}, "
    "train.label_smoothing: {kind: uniform, low: 0, high: 0.3, step: 0.1}, "
    "train.objective: [{kind: fgsm, eps: 8/255}, {kind: pgd, eps: 8/255}]}"
)


def tuned(section: str):
    return loads(f"{BASE}tune: {{{section}}}\n", source="x")


def proposals(search: NumberedSearch, names: range) -> list[dict]:
    """Points of trials that end, one after the other, with a score that depends on their rate."""
    points = []
    for name in map(str, names):
        config = search.suggest(name)["point"]
        points.append(config)
        score = -abs(config["values"]["train.learning_rate"] - 1e-3)
        search.on_trial_complete(name, {"score": score})
    return points


@pytest.fixture
def search():
    section = tuned(f"{SPACE}, search: {{kind: optuna}}").tune
    return lambda seed=5: NumberedSearch(section.space, seed=seed)


def test_optuna_proposes_numbered_values_of_every_axis(search):
    points = proposals(search(), range(14))
    assert [point["trial"] for point in points] == list(range(14))
    for point in points:
        values = point["values"]
        assert 1e-4 <= values["train.learning_rate"] <= 1e-2
        assert values["train.warmup_epochs"] in (0, 2, 4)
        assert min(abs(values["train.label_smoothing"] - v) for v in (0, 0.1, 0.2, 0.3)) < 1e-9
        assert values["train.objective"]["kind"] in ("fgsm", "pgd")
    assert len({point["values"]["train.objective"]["kind"] for point in points}) == 2


def test_optuna_repeats_itself_for_a_seed_and_only_for_it(search):
    assert proposals(search(), range(12)) == proposals(search(), range(12))
    assert proposals(search(), range(2)) != proposals(search(seed=6), range(2))


def test_a_restored_search_goes_on_as_if_nothing_had_happened(search, tmp_path):
    whole = proposals(search(), range(13))
    first = search()
    begun = proposals(first, range(11))  # past the ten random ones: the model of scores speaks
    first.save(str(tmp_path / "state"))
    second = search(seed=99)
    second.restore(str(tmp_path / "state"))
    assert begun + proposals(second, range(11, 13)) == whole


def test_a_scheduler_is_what_the_recipe_says():
    asha = tune_schedulers.scheduler(
        tuned(
            "space: {train.weight_decay: [0, 1]}, "
            "scheduler: {kind: asha, grace_epochs: 4, reduction_factor: 3}"
        ),
        epochs=8,
    )
    assert isinstance(asha, ASHAScheduler)
    assert (asha._time_attr, asha._max_t, asha._reduction_factor) == ("epochs", 8, 3)
    assert [rung[0] for rung in asha._brackets[0]._rungs] == [4]  # the next, 12, is too late
    none = tune_schedulers.scheduler(tuned("changes: [{name: a}]"), epochs=8)
    assert type(none) is FIFOScheduler


@pytest.fixture
def pbt():
    section = "space: {train.learning_rate: [0.1, 0.2, 0.4], train.warmup_epochs: [0, 1]}"
    scheduler = tune_schedulers.scheduler(
        tuned(f"{section}, scheduler: {{kind: pbt, interval: 2, resample_prob: 0}}"), epochs=8
    )
    assert pickle.loads(pickle.dumps(scheduler))._perturbation_interval == 2  # Ray stores it
    return scheduler


def trial(number: int, rate: float, warmup: int) -> SimpleNamespace:
    values = {"train.learning_rate": rate, "train.warmup_epochs": warmup}
    return SimpleNamespace(config={"dataset": "d", "point": {"trial": number, "values": values}})


class AllAt:
    """The scheduler's notes: every trial has reached the same epoch."""

    def __init__(self, epoch: int) -> None:
        self.state = SimpleNamespace(last_train_time=epoch)

    def __getitem__(self, trial: object) -> SimpleNamespace:
        return self.state


def changed(pbt, number: int, epoch: int) -> dict:
    """The point that a weak trial gets from a strong one."""
    weak, strong = trial(number, 0.1, 1), trial(7, 0.2, 0)
    pbt._trial_state = AllAt(epoch)
    config, _ = pbt._get_new_config(weak, strong)
    assert config["dataset"] == "d"
    assert strong.config["point"]["values"]["train.learning_rate"] == 0.2  # not changed in place
    return config["point"]


def test_a_replaced_trial_keeps_its_number_and_copies_what_may_not_change(pbt):
    point = changed(pbt, 3, epoch=4)
    assert point["trial"] == 3
    assert point["values"]["train.warmup_epochs"] == 0
    assert point["values"]["train.learning_rate"] in (0.1, 0.4)


def test_changes_depend_on_seed_trial_and_epoch_alone(pbt):
    places = [(number, epoch) for number in range(4) for epoch in (4, 6)]
    found = [changed(pbt, *place)["values"] for place in places]
    again = [changed(pbt, *place)["values"] for place in reversed(places)][::-1]
    assert found == again
    assert {values["train.learning_rate"] for values in found} == {0.1, 0.4}


def test_nothing_changes_before_epsilon_has_risen(pbt):
    assert pbt._burn_in_period == 3
    assert pbt._synch
