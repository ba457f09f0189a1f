"""The evaluate section: what the gate refuses, what smoke keeps, what fingerprints follow."""

import json
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from components.core.errors import CasemateError
from components.data.shards import FORMAT
from pipelines.flow.plan import plan
from pipelines.recipe import evaluation
from pipelines.recipe.check import check
from pipelines.recipe.costs import Hardware, Question, rows_of
from pipelines.recipe.facts import Facts
from pipelines.recipe.lint import ABSENT, warnings_of
from pipelines.recipe.load import load, loads, shrink
from pipelines.stages.evaluate.cost import costs_of
from tests.recipes.sections import recipe_with, refused_with
from tests.refusals import refusal_of
from tests.unit.published import (
    write_cifar_c,
    write_imagenet_model,
    write_imagenet_sets,
    write_images,
)

SUITES = {"corruptions": {}, "transfer": {}, "spatial": {}}
TINY = {"architecture": "tiny_vit", "options": {"depth": 1, "embed_dim": 16, "num_heads": 1}}


recipe = partial(recipe_with, "evaluate", model=TINY)
refused = partial(refused_with, "evaluate", model=TINY)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"suite": 1}, "evaluate.suite: 1 is unknown"),
        ({"models": ["man"]}, "evaluate.models: man is unknown; did you mean 'main'?"),
        ({"models": []}, "evaluate.models: [] is empty"),
        ({"models": ["main", "main"]}, "names a model twice"),
        ({"corruptions": {"names": ["snwo"]}}, "'snwo' is unknown; did you mean 'snow'?"),
        ({"corruptions": {"severities": [6]}}, "evaluate.corruptions.severities.0: 6"),
        ({"corruptions": {"source": "imagenet_c"}}, "path: is missing: set the folder of imagenet"),
        ({"corruptions": {"path": "x"}}, "would be ignored: source is generate"),
        ({"shifts": {"r": {"source": "imagenet_q", "path": "x"}}}, "'imagenet_q' is unknown"),
        ({"shifts": {"r": {}}}, "evaluate.shifts.r.path: is missing: set the folder of the prep"),
        ({"shifts": {"r": {"path": "x", "fit": "crop"}}}, "does not apply to a prepared dataset"),
        ({"shape_bias": {}}, "evaluate.shape_bias.path: is missing"),
        ({"shape_bias": {"path": "x", "pooling": "min"}}, "evaluate.shape_bias.pooling"),
        ({"transfer": {"eps": 8}}, "evaluate.transfer.eps: 8 is outside (0, 1]"),
        ({"transfer": {"attacks": ["fgsm", "fgsm"]}}, "names an attack twice"),
        ({"transfer": {"models": {"main": "x"}}}, "has the name of a model of this recipe"),
        ({"spatial": {"grid": {"max_shift": 28}}}, "max_shift: 28 moves the whole image out"),
        ({"subset": {"by_class": True}}, "evaluate.subset.by_class: True does nothing"),
        ({"shape_bias": {"path": "x"}}, "evaluate.shape_bias: 10 classes in the data; the suite"),
        (
            {"shifts": {"r": {"source": "imagenet_r", "path": "x"}}},
            "evaluate.shifts.r.source: imagenet_r has the classes of ImageNet, mnist5k has 10",
        ),
        (
            {"corruptions": {"source": "cifar100_c", "path": "x"}},
            "evaluate.corruptions.source: cifar100_c has 100 classes, the data have 10",
        ),
    ],
)
def test_what_cannot_work_is_one_line(section, told):
    assert told in refused(section)


def test_a_model_is_needed():
    assert refused({}, train=None).startswith("evaluate: needs a train section that makes models")


def test_layouts_are_refused_where_the_files_are_here(tmp_path):
    data = {"source": "imagenet_v2", "path": str(tmp_path / "v2"), "image_size": 16,
            "options": {"subset": True}}  # fmt: skip
    sets = write_imagenet_sets(tmp_path)
    given = {"data": data, "train": None, "model": {"pretrained": str(tmp_path / "model")}}
    write_imagenet_model(tmp_path / "model")
    names = {"names": ["fog", "frost"], "severities": [1, 3]}
    lacks = refused(
        {"corruptions": {"source": "imagenet_c", "path": str(sets["c"]), **names}}, **given
    )
    assert lacks == f"evaluate.corruptions.path: {sets['c']} lacks frost/1, frost/3, fog/3"
    wrong = refused({"corruptions": {"source": "imagenet_c", "path": str(sets["cue"])}}, **given)
    assert "holds no corruption; expected <corruption>/<severity>/<wnid>" in wrong
    shift = {"source": "imagenet_r", "path": str(sets["v2"]), "options": {"subset": True}}
    assert refused({"shifts": {"r": shift}}, **given).startswith("evaluate.shifts.r.path: ")
    assert "has folders that are not one of the 16 classes" in refused(
        {"shape_bias": {"path": str(sets["r"])}}, **given
    )
    write_images(tmp_path / "frost", ["frost1.png", "frost2.png"])
    told = refused({"corruptions": {"textures": str(tmp_path / "frost")}})
    assert "lacks frost3, frost4, frost5" in told
    write_cifar_c(tmp_path / "cifar", ["fog"])
    (tmp_path / "cifar" / "labels.npy").unlink()
    told = refused({"corruptions": {"source": "cifar10_c", "path": str(tmp_path / "cifar")}})
    assert "lacks the file labels.npy" in told
    write_cifar_c(tmp_path / "short", ["fog"])
    np.save(tmp_path / "short" / "labels.npy", np.zeros(20, np.int64))
    told = refused({"corruptions": {"source": "cifar10_c", "path": str(tmp_path / "short")}})
    assert told.startswith(f"evaluate.corruptions.path: {tmp_path / 'short' / 'fog.npy'} is uint8")
    told = refused({"transfer": {"models": {"other": str(tmp_path / "model")}}})
    assert told == (
        f"evaluate.transfer.models.other: {tmp_path / 'model'} has 1000 classes, the data have 10"
    )


def test_corrupted_images_of_other_classes_are_refused_once_they_are_known():
    facts = Facts(classes=tuple("zyxwvutsrq"), num_classes=10)
    section = {"corruptions": {"source": "cifar10_c", "path": "gone"}}
    told = refusal_of(check, recipe(section), facts)
    assert told.endswith(
        "evaluate.corruptions.source: cifar10_c has other classes than the data: class airplane is "
        "not one of the 10: z, y, x, w, v, ..."
    )


def test_class_maps_are_checked_once_the_classes_are_known(tmp_path):
    (tmp_path / "dataset.json").write_text(
        json.dumps({"format": FORMAT, "classes": ["zero", "one"], "digest": "d", "splits": {},
                    "channels": 1, "height": 28, "width": 28})
    )  # fmt: skip
    facts = Facts(classes=tuple("0123456789"), num_classes=10, height=28, width=28, channels=1)
    shift = {"path": str(tmp_path)}
    for class_map, told in (
        ({}, "class_map: zero, one have no class of the model; map them in class_map"),
        ({"zero": "0", "two": "2"}, "class_map: two are not classes of the shifted dataset"),
        ({"zero": None, "one": None}, "class_map: every class is left out"),
    ):
        loaded = recipe({"shifts": {"words": {**shift, "class_map": class_map}}})
        check(loaded)  # the classes of the data are not known yet
        assert f"evaluate.shifts.words.{told}" in refusal_of(check, loaded, facts)
    check(recipe({"shifts": {"words": {**shift, "class_map": {"zero": "0", "one": "1"}}}}), facts)
    larger = Facts(classes=tuple("0123456789"), num_classes=10, height=32, width=32, channels=1)
    mapped = {**shift, "class_map": {"zero": "0", "one": "1"}}
    with pytest.raises(CasemateError, match="has images of 1x28x28, the models take 1x32x32"):
        check(recipe({"shifts": {"words": mapped}}, data={"source": "npz", "path": "x"}), larger)


def test_spatter_without_opencv_is_refused():
    with mock.patch.object(evaluation, "find_spec", return_value=None):
        told = refused({"corruptions": {}})
        assert told.startswith("evaluate.corruptions.names: spatter needs OpenCV: pip install")
        check(recipe({"corruptions": {"names": "benchmark"}}))
        check(recipe({"corruptions": {"severities": [4, 5]}}))  # mud


def test_files_of_other_machines_are_warnings():
    section = {"shifts": {"r": {"path": "gone"}}, "transfer": {"models": {"other": "lost"}}}
    found = {w.key: w.message for w in warnings_of(recipe(section))}
    assert found == {
        "evaluate.shifts.r.path": f"gone {ABSENT}",
        "evaluate.transfer.models.other": f"lost {ABSENT}",
    }


def test_models_of_another_size_are_a_warning(tmp_path):
    write_imagenet_model(tmp_path)
    data = {"source": "made", "options": {"classes": 1000, "image_size": 32, "train": 2000}}
    (found,) = warnings_of(recipe({"transfer": {"models": {"a": str(tmp_path)}}}, data=data))
    assert found.key == "evaluate.transfer.models.a"
    assert found.message.startswith("takes 16 pixels, the data have 32: no result between the two")
    how = {"models": {"a": str(tmp_path)}, "resample": "bilinear"}
    assert warnings_of(recipe({"transfer": how}, data=data)) == []


def test_smoke_keeps_the_suites_and_shrinks_them(caplog):
    section = {
        **SUITES,
        "corruptions": {"source": "cifar10_c", "path": "gone"},
        "shifts": {"r": {"path": "gone"}},
        "subset": {"item_ids": ["a", "b"]},
    }
    small = shrink(recipe(section)).evaluate
    assert small.suites() == ["clean", "corruptions", "transfer", "spatial"]
    assert small.corruptions.source == "generate"
    assert (small.subset.item_ids, small.subset.num_items) == (None, 16)
    assert (small.transfer.max_items, small.transfer.num_steps) == (16, 3)
    assert (small.spatial.grid.num_shifts, small.spatial.grid.num_angles) == (3, 3)
    assert "no shift r: no gone here" in caplog.text
    data = {"source": "imagenet", "path": "gone", "image_size": 224, "fit": "squash"}
    shift = {"source": "imagenet_r", "path": "gone"}
    made = shrink(recipe({"shifts": {"r": shift}, "shape_bias": {"path": "gone"}}, data=data))
    assert made.evaluate.shifts["r"].source == made.data.source == "made"
    assert made.evaluate.shape_bias is None


def prints(section, **changes) -> dict[str, str]:
    planned = plan(recipe(section, **changes), Path("runs"))
    return {step.name: step.fingerprint for step in planned if step.step.stage == "evaluate"}


def test_fingerprints_follow_what_a_suite_computes(tmp_path):
    before = prints(SUITES)
    assert set(before) == {f"evaluate.{n}" for n in ("clean", "corruptions", "transfer", "spatial")}

    def changed(section, **changes) -> set[str]:
        after = prints(section, **changes)
        return {name.removeprefix("evaluate.") for name in before if before[name] != after[name]}

    assert changed({**SUITES, "corruptions": {"severities": [1]}}) == {"corruptions"}
    assert changed({**SUITES, "spatial": {"early_exit": False}}) == {"spatial"}
    assert changed({**SUITES, "calibration": {"num_bins": 5}}) == {"clean", "corruptions"}
    everything = {"clean", "corruptions", "transfer", "spatial"}
    assert changed({**SUITES, "subset": {"num_items": 5}}) == everything
    assert changed(SUITES, seed=3) == everything
    assert changed(SUITES, cluster={"num_actors": 3}) == set()
    write_imagenet_model(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    other = {**SUITES, "transfer": {"models": {"other": str(tmp_path / "one")}}}
    moved = {**SUITES, "transfer": {"models": {"other": str(tmp_path / "two")}}}
    assert changed(other) == {"transfer"}
    assert prints(other) == prints(moved)  # a copy is the same model


def planned_parts(section, **changes) -> dict[str, list[str]]:
    """The models of each step of the evaluation."""
    steps = plan(recipe(section, **changes), Path("runs"))
    parts = {s.name: list(s.step.identity["models"]) for s in steps if s.step.stage == "evaluate"}
    needed = {s.name: {n for n in s.step.needs if n.startswith("train.")} for s in steps}
    for name, models in parts.items():
        assert needed[name] == {f"train.{model}" for model in models}
    return parts


CLASSIFIER = {"objective": {"kind": "standard"}}
DENOISER = {
    "objective": {"kind": "denoiser", "sigmas": [0.1]},
    "model": {"architecture": "tiny_unet", "options": {"widths": [8, 16], "norm_groups": 2}},
}
THREE = {"variants": {"other": CLASSIFIER, "third": CLASSIFIER, "cleaner": DENOISER}}
ATTACK = {"eps": 0.1, "attacks": [{"kind": "fgsm"}]}


@pytest.mark.parametrize(
    ("section", "attack", "expected"),
    [
        (None, {}, {"clean": ["main", "other", "third"]}),
        (None, {"a": ATTACK}, {"clean": ["other", "third"]}),
        (None, {"a": {**ATTACK, "surrogate": "other"}}, {"clean": ["other", "third"]}),
        (None, {"a": ATTACK, "b": {**ATTACK, "models": ["other", "third"]}}, {}),
        ({"models": ["third"]}, {"a": ATTACK}, {"clean": ["third"], "remaining": ["other"]}),
        ({"models": ["other", "third"]}, {"a": ATTACK}, {"clean": ["other", "third"]}),
        ({}, {}, {"clean": ["main", "other", "third"]}),
    ],
)
def test_every_trained_classifier_gets_a_clean_accuracy(section, attack, expected):
    found = planned_parts(section, train=THREE, attack=attack)
    assert found == {f"evaluate.{part}": models for part, models in expected.items()}


def test_what_is_added_is_a_section_with_defaults():
    """The same step, whether it is written or not; it needs a training."""
    written = {"models": ["other", "third"]}
    assert prints(None, train=THREE, attack={"a": ATTACK}) == prints(
        written, train=THREE, attack={"a": ATTACK}
    )
    assert planned_parts(None, train=None) == {}
    hardware = Hardware(accelerators=[], dtype="fp32", num_workers=1)
    loaded = recipe({"models": ["third"], "subset": {"num_items": 20}}, train=THREE)
    rows = rows_of(costs_of(loaded, Question()), hardware)
    counted = {row["step"]: (row["num_models"], row["passes"]) for row in rows}
    assert counted == {"evaluate.clean": (1, 20), "evaluate.remaining": (2, 40)}
    added = recipe(None, train=THREE)
    (row,) = rows_of(costs_of(added, Question()), hardware)
    assert row["passes"] == 3 * 1000  # a fifth of the published items
    (row,) = rows_of(costs_of(added, Question(num_items=30)), hardware)
    assert (row["step"], row["passes"]) == ("evaluate.clean", 90)


def test_null_switches_off_what_is_added_to_a_silent_recipe(tmp_path):
    """Also where it is inherited, set on the command line, written out in full, or shrunk."""
    silent = recipe(None, train=THREE)
    assert list(planned_parts(None, train=THREE)) == ["evaluate.clean"]
    text = silent.to_yaml()
    off = loads(f"{text}evaluate: null\n", source="off")
    (tmp_path / "base.yaml").write_text(recipe({}, train=THREE).to_yaml())
    child = loads("extends: ./base.yaml\nname: x\nevaluate: null\n", source="c", base=tmp_path)
    by_option = loads(text, source="set", overrides=["evaluate=null"])
    for one in (off, child, by_option):
        for again in (one, loads(one.to_yaml(), source="again"), shrink(one)):
            assert again.evaluation() is None
            assert again.resolved()["evaluate"] is None
            assert not [s for s in plan(again, Path("runs")) if s.step.stage == "evaluate"]
    assert "evaluate" not in loads(text, source="again").resolved()
    assert off.digest() == by_option.digest() != silent.digest()
    back = loads(off.to_yaml(), source="on", overrides=["evaluate.subset.num_items=3"])
    assert back.evaluation().subset.num_items == 3


def test_files_count_by_content(tmp_path):
    one, two = (write_cifar_c(tmp_path / name, ["fog"]) for name in ("one", "two"))
    sections = [{"corruptions": {"source": "cifar10_c", "path": str(p)}} for p in (one, two)]
    assert prints(sections[0]) == prints(sections[1])
    write_cifar_c(two, ["fog", "snow"])
    assert (
        prints(sections[0])["evaluate.corruptions"] != prints(sections[1])["evaluate.corruptions"]
    )
    frost = [f"frost{n}.png" for n in range(1, 6)]
    write_images(tmp_path / "textures", frost)
    textured = {"corruptions": {"textures": str(tmp_path / "textures")}}
    before = prints(textured)
    write_images(tmp_path / "textures", frost[::-1])  # other images under the same names
    assert before["evaluate.corruptions"] != prints(textured)["evaluate.corruptions"]
    with pytest.raises(CasemateError, match=r"evaluate\.corruptions\.path: .*gone does not exist"):
        prints({"corruptions": {"source": "cifar10_c", "path": str(tmp_path / "gone")}})


def test_shifts_follow_the_fit_that_they_take_over(tmp_path):
    write_imagenet_sets(tmp_path)
    document = {"format": FORMAT, "digest": "d"}
    (tmp_path / "dataset.json").write_text(json.dumps(document))

    def found(of_data, **shift) -> str:
        shift = {"source": "folder", "path": str(tmp_path / "r"), **shift}
        data = {"source": "mnist5k", "fit": of_data, "image_size": 28}
        planned = plan(recipe({"shifts": {"a": shift}}, data=data), Path("runs"), prepared=tmp_path)
        return next(step.fingerprint for step in planned if step.name == "evaluate.shifts")

    assert found("squash") != found("resize")
    assert found("squash", fit="resize") == found("resize", fit="resize")


def test_recipes_without_the_section_do_not_name_it():
    assert "evaluate" not in load("demo").resolved()
    assert recipe({}).resolved()["evaluate"]["models"] is None


def test_the_cost_of_each_suite_is_that_of_the_paper():
    """Passes per item: 95, 2511 at most, and 2 N^2 + N beside 9 N gradients for N models."""
    data = {"source": "made", "options": {"image_size": 224, "test": 40, "channels": 1}}
    two = {"variants": {"other": {"objective": {"kind": "standard"}}}}
    loaded = recipe({**SUITES, "subset": {"num_items": 20}}, data=data, train=two)
    hardware = Hardware(accelerators=["A100"], dtype="fp32", num_workers=1)
    rows = {row["step"]: row for row in rows_of(costs_of(loaded, Question()), hardware)}
    assert rows["evaluate.clean"]["passes"] == 20 * 2
    assert rows["evaluate.corruptions"]["passes"] == 95 * 20 * 2
    assert rows["evaluate.corruptions"]["cpu_seconds"] == pytest.approx(0.12 * 20)
    assert rows["evaluate.transfer"]["passes"] == 20 * (2 * 2**2 + 2)
    assert rows["evaluate.transfer"]["gradients"] == 20 * 9 * 2
    spatial = rows["evaluate.spatial"]
    assert (spatial["least_passes"], spatial["passes"]) == (20 * 2, 2511 * 20 * 2)
    assert spatial["hours"][0]["low"] < spatial["hours"][0]["high"]
    clean, transfer = rows["evaluate.clean"]["flops"], rows["evaluate.transfer"]["flops"]
    assert transfer / clean == pytest.approx((2 * 2 + 1) + 2 * 9)
