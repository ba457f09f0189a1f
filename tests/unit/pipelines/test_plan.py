"""The plan of a flow: a fingerprint follows what is computed, never where."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from components.core.errors import CasemateError
from components.data.shards import FORMAT
from pipelines.deploy.shapes import needs_of
from pipelines.flow import plan as plans
from pipelines.recipe.load import load, loads
from pipelines.stages.registry import STAGES, stages_of

EVERYTHING = {
    "prepare",
    "train.main",
    "train.standard",
    "train.columns",
    "train.noisy",
    "tune",
    "attack.linf",
    "evaluate.clean",  # columns and noisy, which nothing attacks
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
        ("data.shard_size=10", EVERYTHING),  # streamed training shuffles among shards
        ("seed=8", EVERYTHING - {"prepare"}),
        ("data.val_fraction=0.2", EVERYTHING),
        ("model.options.depth=5", EVERYTHING - {"prepare", "train.columns", "certify.patch"}),
        ("train.weight_decay=0.1", EVERYTHING - {"prepare"}),
        ("train.objective.eps=0.2", {"train.main", "tune", "attack.linf", "report"}),
        (
            "train.variants.columns.objective.band=6",
            {"train.columns", "evaluate.clean", "certify.patch", "report"},
        ),
        (
            "train.variants.noisy.epochs=3",
            {"train.noisy", "evaluate.clean", "certify.l2", "report"},
        ),
        ("tune.epochs=3", {"tune", "report"}),
        ("attack.linf.attacks.1.num_steps=30", {"attack.linf", "report"}),
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
    ],
)
def test_where_it_runs_is_no_part_of_a_result(override):
    assert changed(override) == set()


def test_a_new_formula_makes_its_results_new(monkeypatch):
    before = prints()
    stage = STAGES["certify"]
    monkeypatch.setitem(STAGES, "certify", replace(stage, version=stage.version + 1))
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


def test_an_option_counts_whatever_files_lie_around(tmp_path, monkeypatch):
    """Only options that mean files are replaced by the content of those files."""
    data, here = tmp_path / "c", tmp_path / "here"
    for folder in (data, here):
        folder.mkdir()
    np.save(data / "labels.npy", np.zeros(5, np.int64))
    for name in ("fog", "snow"):
        np.save(data / f"{name}.npy", np.zeros((5, 32, 32, 3), np.uint8))
        (here / name).touch()

    def fingerprint(source: str, options: str) -> str:
        text = f"name: own\ndata: {{source: {source}, path: {data}, options: {{{options}}}}}\n"
        return plans.plan(loads(text, source="own"), tmp_path)[0].fingerprint

    asked = [f"corruption: {name}, severity: 1" for name in ("fog", "snow")]
    before = [fingerprint("cifar10_c", options) for options in asked]
    bundled = fingerprint("imagenet", "test_ids: robustbench")
    monkeypatch.chdir(here)
    assert [fingerprint("cifar10_c", options) for options in asked] == before
    assert len(set(before)) == 2
    (here / "robustbench").write_text("a file that is not the bundled list")
    assert fingerprint("imagenet", "test_ids: robustbench") == bundled
    first = fingerprint("imagenet", "test_ids: snow")
    (here / "copy").touch()
    assert fingerprint("imagenet", "test_ids: copy") == first
    (here / "copy").write_text("other images")
    assert fingerprint("imagenet", "test_ids: copy") != first


@pytest.fixture
def given(tmp_path):
    """A model folder and a prepared dataset: what plans look at of each."""
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    data.mkdir()

    def write(*, model_digest: str = "a", data_digest: str = "b") -> tuple[str, Path]:
        header = {"format": 1, "spec": {}, "digest": model_digest}
        (model / "model.json").write_text(json.dumps(header))
        page = {"format": FORMAT, "digest": data_digest}
        (data / "dataset.json").write_text(json.dumps(page))
        text = (
            f"name: own\ndata: {{source: parquet, path: {data}}}\nmodel: {{pretrained: {model}}}\n"
            "attack: {linf: {eps: 0.1, attacks: [{kind: pgd}]}}\n"
        )
        return text, data

    return write


def test_stages_of_a_submitted_flow_do_not_wait_for_a_given_model(given):
    """Its step is planned by the train stage, which this recipe does not have."""
    text, _ = given()
    needs = plans.stage_needs(loads(text, source="own"))
    assert needs["attack"] == {"prepare"}
    assert needs["report"] == needs.keys() - {"report"}
    assert "train" not in needs


def test_what_is_given_counts_by_content_and_is_never_made(given, tmp_path):
    def steps(**digests: str) -> dict[str, plans.PlannedStep]:
        text, data = given(**digests)
        planned = plans.plan(loads(text, source="own"), tmp_path / "runs", prepared=data)
        return {step.name: step for step in plans.select(planned, "attack")}

    first = steps()
    assert {n: s.given for n, s in first.items()} == {
        "prepare": True, "model.main": True, "attack.linf": False,
    }  # fmt: skip
    assert first["model.main"].folder == tmp_path / "model"
    assert all(step.finished for step in first.values() if step.given)
    assert first["attack.linf"].folder.is_relative_to(tmp_path / "runs")
    for change in ({"model_digest": "c"}, {"data_digest": "c"}):
        assert steps(**change)["attack.linf"].fingerprint != first["attack.linf"].fingerprint
    assert steps()["attack.linf"].fingerprint == first["attack.linf"].fingerprint


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
    assert [stage.name for stage in stages_of(recipe)] == ["prepare", "report"]
    with pytest.raises(CasemateError, match="stage: attack has nothing to do"):
        plans.select(plans.plan(recipe, Path("runs")), "attack")


def test_stages_are_those_of_the_steps():
    recipe = load("demo")
    asked = [stage.name for stage in stages_of(recipe)]
    assert asked == list(dict.fromkeys(step.stage for step in plans.steps_of(recipe)))


def test_a_recipe_that_only_trains_has_workers_for_its_clean_accuracy():
    recipe = loads("name: bare\ndata: {source: digits}\ntrain: {}\n", source="bare")
    assert [stage.name for stage in stages_of(recipe)] == ["prepare", "train", "evaluate", "report"]
    needs = plans.stage_needs(recipe)
    assert needs["evaluate"] == {"prepare", "train"}
    assert needs["report"] == {"prepare", "train", "evaluate"}
    assert [need.what for need in needs_of(recipe)][1:] == ["train worker", "actor"]
