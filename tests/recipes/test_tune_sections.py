"""The tune section: what it accepts, what it refuses in one line, and what it fills in."""

import pytest

from pipelines.recipe.load import loads, with_values
from tests.refusals import refusal_of

BASE = """\
name: x
data: {source: digits}
train: {objective: {kind: fgsm, eps: 8/255}, epochs: 8}
"""


def tuned(section: str):
    return loads(f"{BASE}tune: {{{section}}}\n", source="my.yaml")


@pytest.mark.parametrize(
    "section",
    [
        "space: {train.weight_decay: [0, 0.05, 0.5]}",
        "space: {train.objective: [{kind: standard}, {kind: fgsm, eps: 4/255}]}",
        "space: {train.weight_decay: {kind: choice, values: [0, 1]}}",
        "space: {train.learning_rate: {kind: loguniform, low: 1e-4, high: 2/1000}}, "
        "search: {kind: optuna, num_trials: 3}",
        "space: {train.label_smoothing: {kind: uniform, low: 0, high: 0.3, step: 0.1}}, "
        "search: {kind: random, num_trials: 3}, scheduler: {kind: pbt, interval: 2}",
        "space: {train.warmup_epochs: {kind: integers, low: 0, high: 4}}, search: {kind: random}",
        "changes: [{name: base}, {name: + decay, set: {train.weight_decay: 0.5}}]",
    ],
)
def test_a_good_section_survives_yaml(section):
    recipe = tuned(section)
    again = loads(recipe.to_yaml(), source="again")
    assert again == recipe
    assert again.digest() == recipe.digest()


def test_defaults_measure_apgd_and_stop_trials_of_drawn_points_only():
    grid = tuned("space: {train.weight_decay: [0, 1]}").tune
    assert (grid.attack.kind, grid.metric) == ("apgd-ce", "val_robust_accuracy")
    chain = tuned("changes: [{name: base}]").tune
    named = tuned("space: {train.weight_decay: [0, 1]}, search: {kind: grid}").tune
    for listed in (grid, named, chain):
        assert (listed.search.kind, listed.scheduler.kind) == ("grid", "none")
        assert listed.grace_epochs > 10**9
    for kind in ("random", "optuna"):
        drawn = tuned(f"space: {{train.weight_decay: [0, 1]}}, search: {{kind: {kind}}}").tune
        assert (drawn.scheduler.kind, drawn.grace_epochs) == ("asha", 1)
    asked = tuned("space: {train.weight_decay: [0, 1]}, scheduler: {kind: asha}").tune
    assert asked.scheduler.kind == "asha"


def test_a_choice_is_the_list_of_its_values():
    recipe = tuned("space: {train.weight_decay: {kind: choice, values: [0, 1]}}")
    assert recipe.tune.space == {"train.weight_decay": [0, 1]}


def test_only_numbers_that_change_no_shape_may_change_in_training():
    section = tuned(
        "space: {train.learning_rate: [0.1, 0.2], train.batch_size: [8, 16], train.augment.mixup: "
        "[0, 1], train.clip_norm: [null, 1], model.options.depth: [1, 2]}, scheduler: {kind: pbt}"
    ).tune
    assert section.mutable == ["train.learning_rate"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("epochs: 2", "tune.space: give either a space or a list of changes"),
        ("space: {train.weight_decay: [0]}, changes: [{name: a}]", "tune.space: give either "),
        (
            "space: {train.weight_decay: 5}",
            "tune.space.train.weight_decay: 5 is neither a list of values ",
        ),
        ("space: {train.weight_decay: []}", "tune.space.train.weight_decay: [] is empty; "),
        (
            "space: {train.weight_decay: [1, 1]}",
            "tune.space.train.weight_decay: [1, 1] lists a value twice",
        ),
        ("space: {train.weight_decay: {kind: normal}}", "tune.space.train.weight_decay: {'kind': "),
        (
            "space: {train.weight_decay: {kind: choice, value: [1]}}",
            "tune.space.train.weight_decay: {'kind': 'choice', 'value': [1]} is wrong: a choice ",
        ),
        (
            "space: {train.weight_decay: {kind: uniform, low: 1, high: 1}}, search: {kind: random}",
            "tune.space.train.weight_decay.low: 1 must be below high (1)",
        ),
        (
            "space: {train.weight_decay: {kind: loguniform, low: 0, high: 1}}",
            "tune.space.train.weight_decay.low: 0 must be above 0",
        ),
        (
            "space: {train.weight_decay: {kind: uniform, low: 0, high: 1}}",
            "tune.space.train.weight_decay: is a distribution, which a grid cannot list; ",
        ),
        ("space: {data.limits: [1]}", "tune.space.data.limits: must begin with train. or "),
        ("space: {train.val_eps: [0.1]}", "tune.space.train.val_eps: decides how trials are "),
        ("space: {train.variants.a.epochs: [1]}", "tune.space.train.variants.a.epochs: belongs "),
        ("space: {model.pretrained: [a, b]}", "tune.space.model.pretrained: is a path; "),
        ("space: {train.epochs: [1, 2]}, epochs: 2", "tune.epochs: 2 conflicts with train.epochs"),
        (
            "space: {train.batch_size: [8]}, scheduler: {kind: pbt}",
            "tune.scheduler.kind: pbt finds no",
        ),
        (
            "space: {train.weight_decay: [1, 2]}, scheduler: {kind: pbt}, search: {kind: optuna}",
            "tune.scheduler.kind: pbt needs search grid or random",
        ),
        (
            "space: {train.weight_decay: [0, 1]}, scheduler: {kind: pbt}",
            "tune.space.train.weight_decay: 0 cannot",
        ),
        (
            "changes: [{name: a}], search: {kind: random}",
            "tune.changes: are all trained to the end; ",
        ),
        (
            "changes: [{name: a}], scheduler: {kind: asha}",
            "tune.changes: are all trained to the end; ",
        ),
        (
            "changes: [{name: a}, {name: a}]",
            "tune.changes: ['a', 'a'] gives two steps the same name",
        ),
        (
            "changes: [{name: a, set: {seed: 3}}]",
            "tune.changes.0.set.seed: must begin with train. ",
        ),
        ("grace_epochs: 2", "tune.grace_epochs: 2 is unknown; "),
    ],
)
def test_a_mistake_is_one_line(section, message):
    assert refusal_of(tuned, section).startswith(f"my.yaml: {message}")


def test_values_of_one_recipe_never_reach_into_those_of_another():
    given = {"train.objective": {"kind": "fgsm", "eps": 0.1}, "train.objective.num_steps": 3}
    changed = with_values(loads("{name: a, data: {source: digits}, train: {}}", source="a"), given)
    assert changed.train.objective.num_steps == 3
    assert given["train.objective"] == {"kind": "fgsm", "eps": 0.1}
