"""Points of a search: the same for the same seed, inside their axes, refused where unequal."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import CasemateError
from pipelines.recipe import trials as tp
from pipelines.recipe.check import check_trials
from pipelines.recipe.load import loads, with_values
from pipelines.recipe.schema.tune import IntegersAxis, LogUniformAxis, TuneSection, UniformAxis

BASE = """\
name: x
seed: 5
data: {source: digits}
train: {objective: {kind: fgsm, eps: 8/255, eps_warmup_epochs: 2}, epochs: 8, val_steps: 3}
"""
RANGES = {
    "train.learning_rate": LogUniformAxis(kind="loguniform", low=1e-4, high=1e-2),
    "train.label_smoothing": UniformAxis(kind="uniform", low=0, high=0.3, step=0.1),
    "train.clip_norm": UniformAxis(kind="uniform", low=0.5, high=2),
    "train.warmup_epochs": IntegersAxis(kind="integers", low=1, high=8, step=3),
    "train.weight_decay": [0.1, 0.2, 0.4],
}


def tuned(section: str, **changes: object):
    recipe = loads(f"{BASE}tune: {{{section}}}\n", source="x")
    return with_values(recipe, changes) if changes else recipe


def inside(key: str, value: object) -> bool:
    axis = RANGES[key]
    if isinstance(axis, list):
        return value in axis
    if isinstance(axis, IntegersAxis):
        return type(value) is int and value in (1, 4, 7)
    if key == "train.label_smoothing":
        return value in (0.0, 0.1, 0.2, 0.3)
    return axis.low <= value <= axis.high


def test_a_grid_is_every_combination_in_the_order_written():
    points = tp.grid({"b": [1, 2], "a": ["x", {"kind": "y"}]})
    assert [(p["b"], p["a"]) for p in points] == [
        (1, "x"), (1, {"kind": "y"}), (2, "x"), (2, {"kind": "y"}),
    ]  # fmt: skip


@given(st.integers(0, 2**40))
def test_draws_stay_on_their_axes_and_never_repeat(seed):
    points = tp.draws(RANGES, num_trials=6, seed=seed)
    assert all(inside(key, value) for point in points for key, value in point.items())
    assert all(point not in points[:i] for i, point in enumerate(points))
    assert points == tp.draws(RANGES, num_trials=6, seed=seed)
    assert points[:2] == tp.draws(RANGES, num_trials=2, seed=seed)


def test_a_further_key_moves_no_draw_of_the_others():
    fewer = {key: RANGES[key] for key in ("train.learning_rate", "train.clip_norm")}
    few, all_ = (tp.draws(space, num_trials=5, seed=1) for space in (fewer, RANGES))
    assert few == [{key: point[key] for key in fewer} for point in all_]


def test_loguniform_draws_have_every_magnitude_equally_often():
    values = [
        p["x"] for p in tp.draws({"x": RANGES["train.learning_rate"]}, num_trials=300, seed=2)
    ]
    low = sum(value < 1e-3 for value in values)  # one of two decades
    assert abs(low - 150) < 5 * math.sqrt(300) / 2  # five standard deviations


def test_more_trials_than_points_are_refused():
    few = {key: RANGES[key] for key in ("train.label_smoothing", "train.weight_decay")}
    assert len(tp.draws(few, num_trials=12, seed=0)) == 12  # 4 steps x 3 values: all of them
    with pytest.raises(CasemateError, match="it has 12 points"):
        tp.draws(few, num_trials=13, seed=0)


def test_a_chain_inherits_and_a_section_replaces_what_was_set_inside_it():
    recipe = tuned(
        "changes: [{name: a}, {name: b, set: {train.objective.num_steps: 2}}, {name: c, set: "
        "{train.weight_decay: 0.5}}, {name: d, set: {train.objective: {kind: pgd, eps: 8/255}}}]"
    )
    points = tp.fixed_points(recipe)
    assert points[2] == {"train.objective.num_steps": 2, "train.weight_decay": 0.5}
    assert points[3].keys() == {"train.weight_decay", "train.objective"}
    variant = tp.trial_recipe(recipe, points[3])
    assert (variant.train.objective.kind, variant.train.weight_decay) == ("pgd", 0.5)


def test_a_trial_is_measured_by_the_attack_of_the_tuning():
    section = "space: {train.weight_decay: [0, 1]}, epochs: 3, attack: {num_items: 7}"
    train = tp.trial_recipe(tuned(section), {"train.weight_decay": 1}).train
    assert (train.val_attack, train.val_steps, train.val_items) == ("apgd-ce", 20, 7)
    assert (train.epochs, train.weight_decay) == (3, 1)


def test_keys_inside_a_section_are_set_after_the_section():
    values = {"train.objective.num_steps": 2, "train.objective": {"kind": "fgsm", "eps": 0.1}}
    objective = tp.trial_recipe(tuned("space: {train.weight_decay: [0]}"), values).train.objective
    assert (objective.eps, objective.num_steps) == (0.1, 2)


@given(st.integers(0, 2**32), st.floats(0, 1), st.integers(0, 200))
def test_changed_values_stay_on_their_axes_and_only_mutable_ones_move(seed, resample, steps):
    section = TuneSection(
        space=RANGES, search={"kind": "random"}, scheduler={"kind": "pbt", "interval": 1}
    )
    rng = np.random.default_rng(seed)
    (before,) = tp.draws(RANGES, num_trials=1, seed=seed)
    after = before
    for _ in range(steps % 7):
        after = tp.mutated(section, after, resample_prob=resample, rng=rng)
    assert all(inside(key, value) for key, value in after.items())
    assert after["train.warmup_epochs"] == before["train.warmup_epochs"]


def test_a_step_aside_is_a_factor_or_a_neighbour():
    space = {key: RANGES[key] for key in ("train.clip_norm", "train.weight_decay")}
    section = TuneSection(space=space, search={"kind": "random"}, scheduler={"kind": "pbt"})
    start = {"train.clip_norm": 1.0, "train.weight_decay": 0.2}
    found = [
        tp.mutated(section, start, resample_prob=0, rng=np.random.default_rng(i)) for i in range(40)
    ]
    assert {p["train.clip_norm"] for p in found} == {0.8, 1.2}
    assert {p["train.weight_decay"] for p in found} == {0.1, 0.4}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("space: {train.objective.eps: [0.1, 0.2]}", "would compare attacks of eps 0.1, 0.2"),
        (
            "space: {train.objective.eps: {kind: uniform, low: 0.1, high: 0.2}}, "
            "search: {kind: optuna}",
            "would compare attacks of eps 0.1, 0.2",
        ),
        (
            "space: {train.objective: [{kind: fgsm, eps: 0.1}, {kind: standard}]}",
            "needs an adversarial objective",
        ),
        ("space: {train.nothing: [1]}", "^x: tune.space.train.nothing: 1 is unknown"),
        (
            "space: {train.objective: [{kind: fgsm, eps: 0.1}, {kind: fgsm, eps: 0.1, epz: 1}]}",
            "^x: tune.space.train.objective.epz: 1 is unknown",
        ),
        (
            "space: {train.batch_size: {kind: integers, low: -2, high: 8}}, search: {kind: optuna}",
            "^x: tune.space.train.batch_size: -2 must be",
        ),
        (
            "changes: [{name: a, set: {train.weight_decay: 1}}, {name: b, set: {train.epochs: 0}}]",
            "^x: tune.changes.1.set.train.epochs: 0 must be",
        ),
        (
            "space: {train.objective: [{kind: denoiser, full: true}], model.architecture: [vit]}",
            "^x: tune.space.model.architecture: vit is not a network for a denoiser",
        ),
        (
            "space: {train.objective: [{kind: denoiser, full: true}], model.architecture: "
            "[tiny_unet]}, metric: val_accuracy",
            "^x: tune.space.train.objective.kind: denoiser makes no classifier",
        ),
    ],
)
def test_trials_that_cannot_be_compared_are_refused(section, message):
    with pytest.raises(CasemateError, match=message):
        check_trials(tuned(section))


def test_trials_behind_a_denoiser_of_the_recipe_are_refused():
    """Tuning would have to train it first."""
    recipe = loads(
        "{name: x, data: {source: digits}, train: {objective: {kind: denoised, sigma: 0.5, "
        "denoiser: d}, variants: {d: {objective: {kind: denoiser, full: true}, "
        "model: {architecture: tiny_unet}}}}, tune: {space: {train.weight_decay: [0, 1]}, "
        "metric: val_accuracy}}",
        source="x",
    )
    with pytest.raises(CasemateError, match=r"^x: train.objective.denoiser: d is trained by this"):
        check_trials(recipe)
    assert check_trials(with_values(recipe, {"train.objective.denoiser": "model:on/disk"})) > 0


def test_one_epsilon_for_all_makes_them_comparable():
    section = "space: {train.objective: [{kind: fgsm, eps: 0.1}, {kind: standard}]}"
    assert check_trials(tuned(section, **{"train.val_eps": 0.1})) == 8
    assert check_trials(tuned(f"{section}, metric: val_accuracy")) == 8


def test_the_longest_trial_counts():
    assert check_trials(tuned("space: {train.epochs: [2, 12, 4]}")) == 12


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("space: {train.weight_decay: [0, 1]}, scheduler: {kind: asha, grace_epochs: 3}", []),
        (
            "space: {train.weight_decay: [0, 1]}, scheduler: {kind: asha, grace_epochs: 2}",
            ["tune.scheduler.grace_epochs"],
        ),
        ("space: {train.weight_decay: [0, 1]}, scheduler: {kind: none}", []),
        ("space: {train.weight_decay: [0, 1]}, scheduler: {kind: asha, grace_epochs: 8}", []),
        (
            "space: {train.objective.eps_warmup_epochs: {kind: integers, low: 0, high: 5}}, "
            "search: {kind: optuna}, scheduler: {kind: asha, grace_epochs: 5}",
            ["tune.scheduler.grace_epochs"],
        ),
        (
            "space: {train.learning_rate: [0.1, 0.2]}, scheduler: {kind: pbt, interval: 8}",
            ["tune.scheduler.interval"],
        ),
        ("space: {train.learning_rate: [0.1, 0.2]}, scheduler: {kind: pbt, interval: 4}", []),
        ("changes: [{name: a}]", []),
        (
            "space: {train.objective: [{kind: standard}, {kind: fgsm, eps: 8/255}]}, "
            "scheduler: {kind: asha}",
            ["tune.scheduler.kind"],
        ),
        ("changes: [{name: a, set: {train.objective: {kind: standard}}}]", ["tune.metric"]),
    ],
)
def test_what_decides_too_early_or_by_the_wrong_figure_is_warned_of(section, keys):
    recipe = tuned(section, **{"train.val_eps": 8 / 255})
    assert [key for key, _ in tp.tune_warnings(recipe)] == keys
