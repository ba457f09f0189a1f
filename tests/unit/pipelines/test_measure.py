"""Speeds measured on the real work of a recipe: each kind runs on random images and weights."""

import pytest

from pipelines.flow import measure
from pipelines.flow.overheads import DONE, STEPS, Overheads
from pipelines.recipe.costs import Hardware, Question, Speed, rows_of
from pipelines.recipe.load import parse
from pipelines.stages.registry import STAGES

VIT = {"architecture": "tiny_vit", "token_policy": "drop",
       "options": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}}  # fmt: skip
DATA = {"source": "digits", "limits": {"train": 64, "val": 16, "test": 8}}
UNET = {"architecture": "tiny_unet"}
STARTS = Overheads(dict.fromkeys(STEPS, Speed(1.0, 1.0)))


@pytest.fixture(autouse=True)
def _in_a_moment(monkeypatch):
    for name, value in {"SECONDS": 0.01, "LEAST_STEPS": 2, "MOST_STEPS": 3}.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(measure, "measured_overheads", lambda: STARTS)


def measured(**sections):
    values = {"name": "x", "data": DATA, "model": VIT, "evaluate": None, **sections}
    loaded = parse(values, source="x")
    costs = [c for s in STAGES.values() for c in s.cost().costs_of(loaded, Question())]
    with measure.measured_in(loaded) as lab:
        rows = rows_of(costs, Hardware(accelerators=(), dtype="fp32"), lab=lab)
    for row in rows:
        (place,) = row["hours"]
        starts = 1 / 3600
        assert starts <= place["low"] <= place["high"]
        timed = [part for part in row["parts"] if part["passes"]]
        assert all(part["seconds"] > 0 and part["cpu_seconds"] > 0 for part in timed)
    return {row["step"]: row for row in rows}


@pytest.mark.parametrize(
    "objective",
    [
        {"kind": "fgsm", "eps": 0.1, "eps_warmup_epochs": 1, "aas": {"every": 1}},
        {"kind": "trades", "eps": 0.1, "num_steps": 2, "awp": {}},
        {"kind": "columns", "band": 3},
        {"kind": "gaussian", "sigma": 0.25},
    ],
    ids=lambda objective: objective["kind"],
)
def test_steps_of_the_real_objective_are_timed(objective):
    model = {**VIT, "architecture": "vit_tiny_patch16_224", "upsample": 16, "token_policy": "mask",
             "options": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}}  # fmt: skip
    chosen = model if "aas" in objective else VIT
    train = {"objective": objective, "epochs": 2, "batch_size": 16, "average": {"kind": "ema"}}
    rows = measured(train=train, model=chosen)
    assert {part["what"] for part in rows["train.main"]["parts"]} >= {"steps", "validation"}


def test_a_classifier_behind_a_denoiser_that_the_recipe_trains():
    noise = {"kind": "denoised", "sigma": 0.25, "denoiser": "clean"}
    clean = {"objective": {"kind": "denoiser", "sigmas": [0.25], "num_timesteps": 100}}
    section = {"kind": "gaussian", "sigma": 0.25, "denoiser": "clean", "num_select": 4,
               "num_estimate": 40, "block_size": 20, "micro_batch": 20, "radii": [0.1]}  # fmt: skip
    rows = measured(
        train={"objective": noise, "epochs": 1, "batch_size": 16,
               "variants": {"clean": {**clean, "model": UNET}}},
        certify={"l2": section},
    )  # fmt: skip
    assert set(rows) == {"prepare", "train.main", "train.clean", "certify.l2", "report"}


@pytest.mark.cluster
def test_attacks_suites_votes_and_trials_are_timed():
    kinds = ("fgsm", "pgd", "apgd-t", "fab-t", "square")
    every = [{"kind": kind} for kind in kinds]
    rows = measured(
        train={"epochs": 1, "batch_size": 16},
        tune={"space": {"train.learning_rate": [0.1, 0.2]}, "attack": {"num_items": 8}},
        attack={"a": {"eps": 0.1, "attacks": every, "micro_batch": 8},
                "turned": {"norm": "spatial", "attacks": [{"kind": "spatial"}], "sanity": None}},
        evaluate={"corruptions": {"names": ["fog", "contrast"], "severities": [1]}},
        certify={"patch": {"kind": "columns", "band": 3, "patch_sizes": [1],
                           "allow_token_mismatch": True}},
    )  # fmt: skip
    timed = {part["what"] for part in rows["attack.a"]["parts"]}
    assert timed >= {"clean on main", "square on main", "sanity on main"}
    assert rows["evaluate.corruptions"]["hours"][0]["low"] > 1 / 3600


def test_the_lines_of_a_flow_are_read():
    line = "train.main         34.4 s     train.main-bfa839b6951c"
    assert DONE.match(line)[1] == "train.main"
    assert DONE.match("train.main        2 min 4.4 s     train.main-bfa839b6951c")
    assert not DONE.match("train.main       started")
