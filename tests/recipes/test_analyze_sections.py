"""The analyze section: what the gate refuses, what smoke keeps, what fingerprints follow."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from components.core.errors import CasemateError
from components.core.problems import Problems
from components.models.costs import network_of_shapes
from components.models.known import known_network
from pipelines.flow.plan import plan
from pipelines.recipe.analysis import certainly_works, check_network
from pipelines.recipe.check import check
from pipelines.recipe.costs import Hardware, Question, rows_of
from pipelines.recipe.lint import warnings_of
from pipelines.recipe.load import load, shrink
from pipelines.stages.analyze.cost import costs_of
from tests.recipes.sections import recipe_with, refused_with
from tests.unit.published import SIDE, write_imagenet_model

STUDIES = {
    "correlation": {},
    "lesions": {},
    "restricted_attention": {},
    "gaps": {},
    "perturbations": {},
    "accumulation": {},
}
TINY = {"architecture": "tiny_vit", "options": {"depth": 3, "embed_dim": 16, "num_heads": 1}}
RESNET = {"architecture": "resnet18"}
VITS = {"tiny_vit", "deit3_large_patch16_224.fb_in1k", "vit_base_patch32_224.orig_in21k"}
KNOWN = (
    *sorted(VITS),
    *("xcit_nano_12_p16_224", "cait_s12_224", "resnet18", "wrn_28_10", "preact_resnet18"),
    "resnetv2_50x1_bit.goog_in21k",
)
CHOSEN = {
    "correlation": {"tokens": ["cls"]},
    "lesions": {"counts": [2]},
    "restricted_attention": {"depths": [0]},
    "gaps": {"positions": [0]},
}
XCIT = {"architecture": "tiny_xcit", "upsample": 32}


recipe = partial(recipe_with, "analyze", model=TINY)
refused = partial(refused_with, "analyze", model=TINY)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"study": 1}, "analyze.study: 1 is unknown"),
        ({}, "analyze.studies: are missing; write one of correlation, lesions"),
        ({"lesions": {}, "models": ["man"]}, "analyze.models: man is unknown; did you mean 'main'"),
        ({"lesions": {}, "models": []}, "analyze.models: [] is empty"),
        ({"lesions": {"parts": ["head"]}}, "analyze.lesions.parts.0: 'head'"),
        ({"lesions": {"parts": ["local"]}}, "analyze.lesions.parts: local cannot be removed from"),
        ({"lesions": {"counts": [3]}}, "analyze.lesions.counts: 3 is too many: 3 blocks have"),
        ({"restricted_attention": {"depths": [9]}}, "analyze.restricted_attention.depths: 9 is"),
        ({"gaps": {"positions": [3]}}, "analyze.gaps.positions: 3 is not an attention module"),
        ({"perturbations": {"patch_size": 20}}, "analyze.perturbations.patch_size: 20 does not"),
        (
            {"perturbations": {"judge_models": ["main"], "top_k": 10}},
            "analyze.perturbations.top_k: 10 includes all 10 classes",
        ),
        (
            {"perturbations": {"judge_models": ["other"]}},
            "analyze.perturbations.judge_models: other is unknown",
        ),
        (
            {"lesions": {}, "blocks": {"names": ["layers.*"]}},
            "analyze.blocks.names: 'layers.*' is unknown",
        ),
    ],
)
def test_mistakes_are_refused_by_key(section, told):
    assert refused(section).startswith(told)


def test_studies_that_a_network_has_not_are_refused_by_name():
    told = refused({"restricted_attention": {}}, model=RESNET)
    assert told.startswith("analyze.restricted_attention: ResNet has no attention that can be")
    assert refused({"gaps": {}}, model=RESNET).startswith("analyze.gaps: ")
    told = refused({"correlation": {"measure": "pearson"}}, model=RESNET)
    assert told.startswith("analyze.correlation.measure: pearson does not fit ResNet")
    told = refused({"restricted_attention": {}}, model=XCIT)
    assert "has attention over channels, not tokens; write what: [local]" in told
    assert refused({"lesions": {}}, train=None).startswith("analyze: needs a train section")
    check(recipe({"correlation": {}, "lesions": {}, "perturbations": {}}, model=RESNET))
    check(recipe(STUDIES))


@pytest.mark.parametrize("study", ["correlation", "lesions", "restricted_attention", "gaps"])
def test_what_is_certain_without_torch_holds_for_the_network(study):
    section = recipe({study: {}}).analyze
    certain = set()
    for name in KNOWN:
        options = {"depth": 1} if name == "tiny_vit" else {}
        known = known_network(name, options, image_size=64)
        assert not certainly_works(recipe({study: CHOSEN[study]}).analyze, known)
        if certainly_works(section, known):
            certain.add(name)
            net = network_of_shapes(name, image_size=64, num_classes=10, options=options)
            check_network(section, net, problems := Problems(), seed=0)
            assert problems.found == [], name
    only = {"restricted_attention": VITS, "gaps": {*VITS, "xcit_nano_12_p16_224", "cait_s12_224"}}
    assert certain == only.get(study, set(KNOWN))


def test_judges_are_checked(tmp_path):
    write_imagenet_model(tmp_path)
    told = refused({"perturbations": {"judges": {"a": str(tmp_path)}}})
    assert told.startswith("analyze.perturbations.judges.a: ")
    assert told.endswith("has 1000 classes, the data have 10")
    with pytest.raises(CasemateError, match=r"analyze\.perturbations\.judges\.a: .*gone"):
        plan(recipe({"perturbations": {"judges": {"a": str(tmp_path / "gone")}}}), Path("runs"))


def test_further_models_are_checked(tmp_path):
    here, gone = write_imagenet_model(tmp_path / "here"), str(tmp_path / "gone")
    with pytest.raises(CasemateError) as caught:
        check(recipe({"lesions": {}, "other_models": {"a": str(here)}}))
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["analyze.other_models.a"] * 3
    assert lines[0].endswith("has 1000 classes, the data have 10")
    assert lines[1].endswith("is for images of 3 channels, the data have 1")
    assert lines[2].endswith(f"is for images of side {SIDE}, the data have 28")
    told = refused({"lesions": {}, "other_models": {"main": gone}})
    assert told.startswith("analyze.other_models.main: has the name of a model of this recipe")
    both = {"perturbations": {"judges": {"a": gone}}, "other_models": {"a": gone}}
    with pytest.raises(CasemateError, match=r"a is also in perturbations\.judges"):
        recipe(both)
    absent = recipe({"lesions": {}, "other_models": {"a": gone}})
    assert [w.key for w in warnings_of(absent)] == ["analyze.other_models.a"]
    with pytest.raises(CasemateError, match=r"analyze\.other_models\.a: .*gone"):
        plan(absent, Path("runs"))


def test_smoke_trains_models_in_place_of_given_ones(caplog):
    section = {"perturbations": {"judges": {"j": "gone"}}, "other_models": {"a": "gone"}}
    small = shrink(recipe({**section, "models": ["main"]}))
    check(small)
    assert (small.model_names(), small.analyzed_models()) == (["main", "a"], ["main", "a"])
    assert small.analyze.other_models == small.analyze.perturbations.judges == {}
    assert small.analyze.perturbations.judge_models == ("main",)
    assert "a model trained by this run instead of gone" in caplog.text


def test_smoke_keeps_the_studies_and_shrinks_them(caplog):
    section = {
        **STUDIES,
        "lesions": {"counts": [2], "subset": {"num_items": None, "item_ids": ["a"]}},
        "perturbations": {"judges": {"a": "gone"}},
    }
    shrunk = shrink(recipe(section))
    check(shrunk)
    small = shrunk.analyze
    assert small.studies() == list(STUDIES)
    assert (small.lesions.counts, small.lesions.num_samples) == (None, 3)
    assert (small.lesions.subset.item_ids, small.lesions.subset.num_items) == (None, 16)
    assert small.correlation.subset.num_items == 16
    assert (small.perturbations.num_steps, small.perturbations.judges) == (3, {})
    assert (small.gaps.search.num_draws, small.accumulation.num_images) == (1, 4)
    assert "no judge a" in caplog.text


def prints(section, **changes) -> dict[str, str]:
    planned = plan(recipe(section, **changes), Path("runs"))
    return {step.name: step.fingerprint for step in planned if step.step.stage == "analyze"}


def test_fingerprints_follow_what_a_study_computes(tmp_path):
    before = prints(STUDIES)
    assert set(before) == {f"analyze.{name}" for name in STUDIES}

    def changed(section, **changes) -> set[str]:
        after = prints(section, **changes)
        return {name.removeprefix("analyze.") for name in before if before[name] != after[name]}

    assert changed({**STUDIES, "lesions": {"num_samples": 5}}) == {"lesions"}
    named = {**STUDIES, "blocks": {"names": ["blocks.*"]}}
    assert changed(named) == {"correlation", "lesions", "restricted_attention"}
    assert changed({**STUDIES, "micro_batch": 5}) == set(STUDIES)
    assert changed(STUDIES, seed=3) == set(STUDIES)
    assert changed(STUDIES, cluster={"num_actors": 3}) == set()
    write_imagenet_model(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    judged = [
        {**STUDIES, "perturbations": {"judges": {"j": str(tmp_path / name)}}}
        for name in ("one", "two")
    ]
    assert changed(judged[0]) == {"perturbations"}
    assert prints(judged[0]) == prints(judged[1])  # a copy is the same model
    assert changed({**STUDIES, "other_models": {"o": str(tmp_path / "one")}}) == set(STUDIES)


def test_recipes_without_the_section_do_not_name_it():
    assert "analyze" not in load("demo").resolved()
    assert recipe({"lesions": {}}).resolved()["analyze"]["correlation"] is None


def test_costs_count_variants_and_gradients():
    deep = {"architecture": "vit_tiny_patch16_224", "options": {}}
    data = {"source": "made", "options": {"classes": 10, "image_size": 64}, "image_size": 64}
    hardware = Hardware(accelerators=(), dtype="fp32", num_workers=1)
    found = rows_of(
        costs_of(recipe(STUDIES, model=deep, data=data), Question(num_items=20)), hardware
    )
    rows = {row["step"].removeprefix("analyze."): row for row in found}
    assert rows["correlation"]["passes"] == 20
    assert rows["lesions"]["passes"] == 673 * 20
    assert 0.3 < rows["lesions"]["least_passes"] / rows["lesions"]["passes"] < 0.7
    assert rows["restricted_attention"]["passes"] == (2 * 4 + 2 * 13) * 20  # a grid of 4 x 4
    assert (rows["gaps"]["passes"], rows["gaps"]["gradients"]) == (4 * 20, 20 * 20)
    assert (rows["perturbations"]["passes"], rows["perturbations"]["gradients"]) == (0, 100 * 20)
    assert rows["accumulation"]["gradients"] == 8 * 100
