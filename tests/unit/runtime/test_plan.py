"""The plan of a flow: a fingerprint follows what is computed, never where."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from components.core.errors import CasemateError
from pipelines import plan as plans
from pipelines.recipe import load, loads

EVERYTHING = {
    "prepare",
    "train.main",
    "train.standard",
    "train.columns",
    "train.noisy",
    "tune",
    "attack.linf",
    "certify.patch",
    "certify.l2",
    "report",
}


def prints(*overrides: str, recipe: str = "demo") -> dict[str, str]:
    planned = plans.plan(load(recipe, overrides=overrides), Path("runs"))
    return {step.name: step.fingerprint for step in planned}


def changed(*overrides: str) -> set[str]:
    before, after = prints(), prints(*overrides)
    assert before.keys() == after.keys() == EVERYTHING
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.split_seed=8", EVERYTHING),
        ("seed=8", EVERYTHING - {"prepare"}),
        ("data.val_fraction=0.2", EVERYTHING),
        ("model.options.depth=3", EVERYTHING - {"prepare"}),
        ("train.weight_decay=0.1", EVERYTHING - {"prepare"}),
        ("train.objective.eps=0.2", {"train.main", "tune", "attack.linf", "report"}),
        (
            "train.variants.columns.objective.band=6",
            {"train.columns", "certify.patch", "report"},
        ),
        ("train.variants.noisy.epochs=3", {"train.noisy", "certify.l2", "report"}),
        ("tune.epochs=3", {"tune", "report"}),
        ("attack.linf.num_steps=30", {"attack.linf", "report"}),
        ("certify.l2.num_estimate=2000", {"certify.l2", "report"}),
        ("certify.patch.patch_sizes=[1, 3]", {"certify.patch", "report"}),
        ("report.title=Mine", {"report"}),
    ],
)
def test_a_change_moves_exactly_what_depends_on_it(override, expected):
    assert changed(override) == expected


@pytest.mark.parametrize(
    "override",
    [
        "cluster.num_actors=3",
        "cluster.train_workers=2",
        "cluster.address=10.0.0.5:6379",
        "storage.root=elsewhere",
        "tracking.uri=http://127.0.0.1:5000",
        "tracking.experiment=other",
        "data.shard_size=10",
    ],
)
def test_where_it_runs_is_no_part_of_a_result(override):
    assert changed(override) == set()


def test_a_new_formula_makes_its_results_new(monkeypatch):
    before = prints()
    monkeypatch.setitem(plans.VERSIONS, "certify", plans.VERSIONS["certify"] + 1)
    after = prints()
    moved = {name for name in before if before[name] != after[name]}
    assert moved == {"certify.patch", "certify.l2", "report"}


def test_the_content_of_the_data_counts_and_its_place_does_not(tmp_path):
    here, there = tmp_path / "here.npz", tmp_path / "deep" / "there.npz"
    np.savez(here, images=np.zeros((2, 4, 4), np.uint8), labels=np.arange(2))
    there.parent.mkdir()
    shutil.copy(here, there)

    def fingerprint(path: Path) -> str:
        text = f"name: own\ndata: {{source: npz, path: {path}}}\n"
        return plans.plan(loads(text, source="own"), tmp_path)[0].fingerprint

    first = fingerprint(here)
    assert fingerprint(there) == first
    np.savez(there, images=np.ones((2, 4, 4), np.uint8), labels=np.arange(2))
    assert fingerprint(there) != first


def test_missing_data_is_named_before_anything_starts(tmp_path):
    recipe = loads(f"name: own\ndata: {{source: npz, path: {tmp_path}/no.npz}}\n", source="own")
    with pytest.raises(CasemateError, match=r"data\.path: .*no\.npz does not exist"):
        plans.plan(recipe, tmp_path)


def test_folders_are_named_by_recipe_step_and_fingerprint(tmp_path):
    for step in plans.plan(load("demo"), tmp_path):
        assert step.folder == tmp_path / "demo" / f"{step.name}-{step.fingerprint[:12]}"


def test_every_step_comes_after_what_it_needs():
    seen: set[str] = set()
    for step in plans.steps_of(load("demo")):
        assert set(step.needs) <= seen, step.name
        seen.add(step.name)
    assert seen == EVERYTHING


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        (None, EVERYTHING),
        ("prepare", {"prepare"}),
        ("tune", {"prepare", "tune"}),
        ("attack", {"prepare", "train.main", "train.standard", "attack.linf"}),
        (
            "certify",
            {"prepare", "train.columns", "train.noisy", "certify.patch", "certify.l2"},
        ),
        ("report", EVERYTHING),
    ],
)
def test_selecting_a_stage_pulls_in_its_needs(until, expected):
    planned = plans.plan(load("demo"), Path("runs"))
    chosen = [step.name for step in plans.select(planned, until)]
    assert set(chosen) == expected
    assert chosen == [step.name for step in planned if step.name in expected]  # order is kept


def test_a_stage_without_a_section_is_refused():
    recipe = loads("name: bare\ndata: {source: digits}\n", source="bare")
    assert plans.stages_of(recipe) == ["prepare", "report"]
    with pytest.raises(CasemateError, match="stage: attack has nothing to do"):
        plans.select(plans.plan(recipe, Path("runs")), "attack")


def test_stages_are_those_of_the_steps():
    recipe = load("demo")
    assert set(plans.stages_of(recipe)) == {step.stage for step in plans.steps_of(recipe)}
