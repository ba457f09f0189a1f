"""Costs of every step of a recipe: counts, storage, prices, and speeds that are measured."""

import json

import pytest
from typer.testing import CliRunner

from components.certify.estimate import ACCELERATORS
from components.core.errors import CasemateError
from pipelines import api
from pipelines.cli.main import app
from pipelines.flow.overheads import KEPT, STEPS, Overheads
from pipelines.recipe.costs import (
    Hardware,
    Question,
    Seconds,
    Speed,
    StepCost,
    TrainingSpeeds,
    Work,
    known_splits,
    parse_prices,
    rows_of,
    totals,
)
from pipelines.recipe.load import available, load, parse
from pipelines.stages.attack.cost import padded
from pipelines.stages.registry import STAGES
from pipelines.stages.train.cost import TrainingCost
from pipelines.stages.tune.cost import _least_share

VIT = {"architecture": "tiny_vit",
       "options": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}}  # fmt: skip
NAMES = [  # the others with the longer tests: together they take half a minute
    name if place % 8 == 0 else pytest.param(name, marks=pytest.mark.cluster)
    for place, name in enumerate(available())
]
DATA = {"source": "digits", "limits": {"train": 100, "val": 20, "test": 10}}


def recipe(**sections):
    values = {"name": "x", "data": DATA, "model": VIT, "evaluate": None, **sections}
    return parse(values, source="x")


def costs(loaded, **asked):
    question = Question(**asked)
    found = [cost for s in STAGES.values() for cost in s.cost().costs_of(loaded, question)]
    return {cost.step: cost for cost in found}


def planned(name):
    """The rows of a ready recipe; None where a folder that it names is not here."""
    try:
        return api.estimate(name, accelerators=["A100"], num_items=1000, num_train=5000)
    except CasemateError as error:
        if error.remedy.startswith(("is not on this machine", "cannot be used")):
            return None
        raise


@pytest.mark.parametrize("name", NAMES)
def test_every_ready_recipe_has_a_row_for_each_of_its_steps(name):
    """Or one line that says what is not known here."""
    rows = planned(name)
    if rows is None:
        return
    stages = {row["step"].partition(".")[0] for row in rows}
    loaded = load(name)
    wanted = {s.name for s in STAGES.values() if loaded.needs_stage(s.section)}
    if loaded.given_model():
        wanted -= {"train"}
    assert stages == wanted
    for row in rows:
        if "unknown" in row:
            assert row["unknown"]
            assert row["hours"] == []
            continue
        assert 0 <= row["hours"][0]["low"] <= row["hours"][0]["high"]
        assert row["storage_bytes"] > 0
        assert row["objects"] > 0
    json.dumps(rows)


def test_every_stage_answers():
    for stage in STAGES.values():
        assert callable(stage.cost().costs_of), stage.name


def test_a_training_costs_the_passes_of_its_epochs():
    """100 items in batches of 8: 12 whole steps; PGD-3 after two epochs with eps 0."""
    objective = {"kind": "pgd", "eps": 0.1, "num_steps": 3, "clean_forward": "none",
                 "eps_warmup_epochs": 2, "eps_zero_epochs": 1}  # fmt: skip
    train = {"objective": objective, "epochs": 3, "batch_size": 8, "val_items": 6, "val_steps": 4}
    step = costs(recipe(train=train))["train.main"]
    steps, validation, attacked = step.works
    assert steps.most == steps.least == 12 * 8 * (2 * 3 + (2 * 3 + 3))
    assert validation.most == 3 * 20
    assert (attacked.least, attacked.most) == (3 * 6, 3 * 6 * (1 + 2 * 4 + 1))
    told = costs(recipe(train=train), withstand=0.5)["train.main"].works[2]
    assert told.least == told.most == (attacked.least + attacked.most) / 2


def test_what_an_optimiser_keeps_is_part_of_memory_and_checkpoints():
    def cost(**train):
        return TrainingCost.of(recipe(train=train), "main", Question())

    weights = cost().network.weight_bytes
    assert cost().state_bytes() == 3 * weights
    more = {"average": {"kind": "ema"}, "select": "best"}
    assert cost(**more).state_bytes() == 5 * weights
    assert cost(optimizer={"kind": "sgd"}).state_bytes() == 2 * weights
    large, small = (cost(batch_size=size).memory(1) for size in (80, 40))
    assert large - small == 40 * cost().network.costs.activation_bytes
    assert cost(batch_size=80).memory(2) == small  # two workers share the batch


def test_trials_cost_what_their_values_cost():
    """Twice the epochs in one of two trials; a scheduler may end trials, a grid has none."""
    space = {"space": {"train.epochs": [2, 4]}}
    step = costs(recipe(train={}, tune=space))["tune"]
    one = costs(recipe(train={"epochs": 2}))["train.main"]
    assert step.works[0].most == pytest.approx(3 * one.works[0].most)
    assert step.works[0].least == step.works[0].most
    assert step.own["trials"] == 2
    asha = {"space": {"train.learning_rate": {"kind": "loguniform", "low": 1e-4, "high": 1e-2}},
            "search": {"kind": "random", "num_trials": 8}, "epochs": 8}  # fmt: skip
    early = costs(recipe(train={}, tune=asha))["tune"].works[0]
    assert early.least / early.most == pytest.approx((1 + 1 / 2 + 2 / 4 + 4 / 8) / 8)
    assert _least_share(None, epochs=8) == 1


def test_attacks_cost_from_a_clean_pass_to_all_their_steps_in_padded_passes():
    assert padded(10, 35) == 35
    assert padded(100, 35) == 105
    assert padded(150, 35) == 2 * 105  # units of 75
    section = {
        "eps": 0.1,
        "attacks": [{"kind": "pgd"}],
        "num_items": 10,
        "micro_batch": 4,
        "sanity": None,
    }
    clean, pgd = costs(recipe(train={}, attack={"a": section}))["attack.a"].works
    assert (clean.least, clean.most) == (12, 12)
    assert (pgd.least, pgd.most) == (0, 12 * (1 + 2 * 20 + 1))
    curves = {**section, "curves": {"eps": [0.1], "steps": [5], "num_items": 10}}
    *_, extra = costs(recipe(train={}, attack={"a": curves}))["attack.a"].works
    assert extra.most == 12 * (1 + 40 + 1 + 1 + 10 + 1)


def test_money_is_the_users_price_and_nothing_without_one():
    section = {"train": {}}
    (row,) = (r for r in rows(section) if r["step"] == "train.main")
    assert "cost_low" not in row["hours"][0]
    (row,) = (r for r in rows(section, prices=("A100=2", "4")) if r["step"] == "train.main")
    costs_at = {place["where"]: place["cost_high"] / place["high"] for place in row["hours"]}
    assert costs_at["A100"] == pytest.approx(2)
    assert costs_at["T4"] == pytest.approx(4)
    assert set(costs_at) == set(ACCELERATORS)


def rows(sections, *, prices=(), num_workers=None):
    loaded = recipe(**sections)
    hardware = Hardware(
        accelerators=(), dtype="fp32", num_workers=num_workers, prices=parse_prices(prices)
    )
    return rows_of(costs(loaded).values(), hardware)


def test_workers_share_the_time_and_not_the_device_hours():
    one, four = (rows({"train": {}}, num_workers=n)[1]["hours"][0] for n in (1, 4))
    assert four["high"] == pytest.approx(one["high"] / 4)
    assert four["device_hours_high"] == pytest.approx(one["device_hours_high"])


@pytest.mark.parametrize("text", ["free", "A100=", "-1", "B200=3", "=2", "nan", "inf"])
def test_prices_that_are_none_are_refused(text):
    with pytest.raises(CasemateError, match="--price"):
        parse_prices([text])


def test_what_is_not_known_without_the_data_has_a_row_that_says_so():
    data = {"source": "folder", "path": "images", "image_size": 16}
    found = costs(recipe(data=data, train={}))
    assert "--train-items" in found["train.main"].unknown
    known = costs(recipe(data=data, train={}), num_train=40, num_items=8)
    assert known["train.main"].num_items == 40
    assert known["prepare"].num_items == 40 + 4 + 8


def test_splits_are_those_of_the_source():
    loaded = recipe(data={"source": "cifar10", "path": "x", "limits": {"val": 500}}, train={})
    assert known_splits(loaded, Question()) == {"train": 45_000, "val": 500, "test": 10_000}
    assert known_splits(recipe(), Question()) == {"train": 100, "val": 20, "test": 10}


class Stopwatch:
    """A laboratory whose passes take a second, and whose steps start in ten."""

    overheads = property(lambda self: self)

    def of_step(self, cost, num_workers, *, kept):
        assert not kept
        return Seconds(10, 10, 10 * num_workers, 10 * num_workers)

    def num_workers(self, stage):
        return 2

    def training(self, cost):
        return TrainingSpeeds(Speed(1, 2), Speed(1, 2), Speed(1, 2))

    def encoding(self, recipe):
        return Speed(1, 1)


def test_measured_rows_name_their_rates_and_add_starts():
    found = rows_of(
        [costs(recipe(train={"epochs": 1, "batch_size": 50}))["train.main"]],
        Hardware(accelerators=(), dtype="fp32"),
        lab=Stopwatch(),
    )
    (place,) = found[0]["hours"]
    passes = 100 * 3 + 20
    assert place["where"] == "here"
    assert place["high"] == pytest.approx((passes + 10) / 3600)  # one train worker
    assert place["cpu_high"] == pytest.approx((2 * passes + 10) / 3600)
    assert [part["rate"] for part in found[0]["parts"]] == ["measured here"] * 2
    (total,) = totals(found)
    assert total["high"] == place["high"]


def test_work_ends_early_by_the_share_that_withstands():
    step = StepCost(step="attack.a", num_items=1,
                    works=[Work(what="w", most=100, least=20, flops=1e12)])  # fmt: skip
    (row,) = rows_of([step], Hardware(accelerators=["A100"], dtype="fp32"))
    assert row["hours"][0]["low"] == pytest.approx(row["hours"][0]["high"] / 5)
    assert Question(withstand=0.25).between(20, 100) == (40, 40)


def run(*words):
    return CliRunner().invoke(app, ["estimate", *words])


def test_the_table_fits_a_terminal():
    found = run("demo", "--price", "2.5")
    assert found.exit_code == 0
    table = found.output.split("\n\n")
    assert len(table) == 3
    assert max(map(len, f"{table[0]}\n{table[1]}".splitlines())) <= 110
    assert "money" in table[1]
    assert "money" not in run("demo", "--smoke").output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--withstand", "2"), "--withstand: 2.0 is not a share"),
        (("--price", "B200=3"), "--price: B200=3 names no accelerator"),
        (("--measure", "--accelerator", "A100"), "cannot be combined with --measure"),
        (("--dtype", "fp7"), "dtype: fp7"),
    ],
)
def test_wrong_words_are_refused_in_one_line(words, said):
    found = run("demo", *words)
    assert isinstance(found.exception, CasemateError)  # the command line shows it and exits with 2
    assert said in str(found.exception)


def test_a_step_whose_workers_an_earlier_one_has_started_waits_for_less():
    starts = Overheads({stage: Speed(9.0, 9.0) for stage in STEPS} | {KEPT: Speed(1.0, 1.0)})
    steps = [StepCost(step=step, num_items=1) for step in ("train.a", "attack.a", "certify.p")]
    waits = [starts.of_step(step, 2, kept=kept).cpu_low
             for step, kept in zip(steps, (False, False, True), strict=True)]  # fmt: skip
    assert waits == [18, 18, 2]
    seen = []

    class Noted(Stopwatch):
        def of_step(self, cost, num_workers, *, kept):
            seen.append(kept)
            return Seconds()

    rows_of(steps, Hardware(accelerators=(), dtype="fp32"), lab=Noted())
    assert seen == [False, False, True]
