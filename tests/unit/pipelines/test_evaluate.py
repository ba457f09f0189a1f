"""The evaluate stage without Ray: what its suites write, and that only settings can change it."""

import json
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from components.core.errors import CasemateError
from components.core.statistics import mcnemar_p_value, wilson_interval
from components.data.corruptions import corrupt
from components.data.corruptions.stored import labels_among
from components.data.fitting import Fitting, to_channels
from components.data.prepared import PreparedDataset
from components.data.sources import open_source
from components.data.sources.names import CIFAR10, SEVERITIES, imagenet_synsets
from components.evaluate.metrics import read_metrics
from components.evaluate.predictions import Predictions
from components.evaluate.settings import TransferSuiteSettings
from components.evaluate.shifts import imagenet_indices
from components.evaluate.transfer import TransferModel, transfer_predictions
from components.models.checkpoint import load_model, save_model
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from pipelines import api
from pipelines.recipe.load import parse
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.evaluate import evaluation, stage
from pipelines.stages.evaluate.evaluation import DataOrigin
from pipelines.stages.evaluate.suites.corruption_numbers import clean_accuracy_on
from pipelines.stages.registry import stored_metrics
from tests.unit.pipelines.conftest import NUM_ITEMS, OPTIONS, FakeRun, InProcess, write_prepared
from tests.unit.published import (
    SIDE,
    write_imagenet_model,
    write_imagenet_sets,
    write_images,
)

FILES = ("metrics.parquet", "predictions.parquet", "summary.json")
CORRUPTIONS = {"names": ["gaussian_noise", "frost", "pixelate"], "severities": [1, 5]}


@pytest.fixture(scope="session")
def run_suite(run_step):
    """One suite on two models; returns its folder and what was logged."""
    return partial(run_step, "evaluate")


@pytest.fixture(scope="session")
def clean(run_suite) -> StageDir:
    return run_suite("clean", {})


@pytest.fixture(scope="session")
def corrupted(run_suite, clean) -> StageDir:
    further = {"evaluate.clean": clean.path}
    return run_suite("corruptions", {"corruptions": CORRUPTIONS}, further=further)


def rows_of(out: StageDir, **wanted):
    rows = read_metrics(out.path / "metrics.parquet")
    return [row for row in rows if all(getattr(row, k) == v for k, v in wanted.items())]


def value_of(out: StageDir, **wanted):
    (row,) = rows_of(out, **wanted)
    return row


def predictions_of(out: StageDir) -> list[dict]:
    return pq.read_table(out.path / "predictions.parquet").to_pylist()


def logits_of(models, name: str, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return load_model(models[name] / "model")(images)


def test_clean_accuracy_is_that_of_the_model(clean, prepared, models):
    test = PreparedDataset.open(prepared).load("test")
    found = {}
    for model in ("main", "plain"):
        right = (logits_of(models, model, test.pixels()).argmax(dim=1) == test.labels).numpy()
        found[model] = right
        row = value_of(clean, model=model, item="all", metric="accuracy")
        assert (row.value, row.n) == (right.mean(), NUM_ITEMS)
        assert (row.lo95, row.hi95) == wilson_interval(int(right.sum()), NUM_ITEMS)
        classes = rows_of(clean, model=model, metric="class_accuracy")
        assert sorted(r.item for r in classes) == [str(digit) for digit in range(10)]
        known = [(r.value * r.n, r.n) for r in classes if r.value is not None]
        assert round(sum(k for k, _ in known)) == right.sum()
        assert sum(n for _, n in known) == NUM_ITEMS
        assert 0 <= value_of(clean, model=model, metric="ece").value <= 1
    difference = value_of(clean, model="main", metric="difference_to/plain")
    expected = found["main"].mean() - found["plain"].mean()
    assert difference.value == pytest.approx(expected, rel=0, abs=1e-15)  # a rounded subtraction
    p_value = value_of(clean, model="plain", metric="mcnemar_p/main").value
    assert p_value == mcnemar_p_value(found["main"], found["plain"])


def test_models_beside_the_section_are_on_the_same_items(run_suite, clean):
    """The suite clean again, on the same subset; the flow's run keeps both apart."""
    section = {"models": ["main"]}
    own, rest = (run_suite(part, section) for part in ("clean", "remaining"))
    assert {row.model for row in rows_of(rest)} == {"plain"}
    for model, out in (("main", own), ("plain", rest)):
        row = value_of(out, model=model, item="all", metric="accuracy")
        assert row == value_of(clean, model=model, item="all", metric="accuracy")
        alike = [item for item in predictions_of(clean) if item["model"] == model]
        assert predictions_of(out) == alike
    shown = stored_metrics("evaluate", {"clean": own.path, "remaining": rest.path})
    assert shown == {
        "evaluate/clean/accuracy": value_of(own, item="all", metric="accuracy").value,
        "evaluate/clean/plain/accuracy": value_of(rest, item="all", metric="accuracy").value,
    }


def test_metrics_are_named_and_described(clean, models):
    logged = clean.run.logged
    row = value_of(clean, model="main", item="all", metric="accuracy")
    assert logged["evaluate/clean/main/accuracy"] == row.value
    assert not any("class_accuracy" in name or "/bin_" in name for name in logged)
    assert (row.family, row.arch, row.dataset, row.resize) == (
        "vit",
        "tiny_vit",
        "digits",
        "stored",
    )
    assert row.params_m > 0
    assert row.gmacs > 0
    summary = json.loads((clean.path / "summary.json").read_text())
    main, _ = summary["headlines"]
    assert (main["what"], main["model"], main["value"]) == ("clean", "main", row.value)
    assert summary["models"]["main"]["metrics"]["accuracy"] == row.value
    assert clean.run.tagged["casemate.device"] == "cpu"
    assert set(FILES) <= set(clean.run.files)


def test_variants_are_corrupted_grey_images(corrupted, prepared, models):
    """One channel is repeated, corrupted by (seed, item, variant) and turned to grey again."""
    test = PreparedDataset.open(prepared).load("test")
    colour = test.images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous()
    images = corrupt(colour, name="pixelate", severity=5, seed=5, item_ids=test.item_ids)
    grey = np.stack([to_channels(image, channels=1) for image in images.numpy()])
    pixels = torch.from_numpy(grey).permute(0, 3, 1, 2).float() / 255
    wanted = dict(
        zip(test.item_ids, logits_of(models, "main", pixels).argmax(dim=1).tolist(), strict=True)
    )
    rows = [
        row
        for row in predictions_of(corrupted)
        if (row["model"], row["corruption"], row["severity"]) == ("main", "pixelate", 5)
    ]
    assert {row["item_id"]: row["prediction"] for row in rows} == wanted
    right = np.array([row["prediction"] == row["label"] for row in rows])
    row = value_of(corrupted, model="main", item="pixelate", level=5.0, metric="accuracy")
    assert (row.value, row.n, row.fidelity) == (right.mean(), NUM_ITEMS, "raw")
    assert row.flags == ("nonstandard_resolution",)
    assert corrupted.run.logged["evaluate/corruptions/main/pixelate/s5/accuracy"] == row.value
    frost = value_of(corrupted, model="main", item="frost", level=1.0, metric="accuracy")
    assert frost.flags == ("nonstandard_resolution", "procedural_frost")
    assert rows_of(corrupted, model="plain", item="frost", level=1.0, metric="mcnemar_p/main")


def test_scores_that_lack_variants_are_null_with_the_reason(corrupted):
    for metric in ("mean75", "mean95", "mean_noise", "mce", "relative_mce", "ce_frost"):
        row = value_of(corrupted, model="main", item="all", metric=metric)
        assert row.value is None
        assert any(flag.startswith("null: ") for flag in row.flags)
    summary = json.loads((corrupted.path / "summary.json").read_text())
    assert summary["headlines"] == []
    assert summary["flags"] == ["nonstandard_resolution", "procedural_frost"]


def test_order_and_a_kill_change_no_byte(run_suite, corrupted, clean, tmp_path):
    further = {"evaluate.clean": clean.path}
    section = {"corruptions": CORRUPTIONS}
    executor = InProcess(order=lambda units: units[::-1])
    executor.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        run_suite("corruptions", section, out=tmp_path, executor=executor, further=further)
    assert not (tmp_path / "metrics.parquet").exists()
    executor.stop_after = None
    again = run_suite("corruptions", section, out=tmp_path, executor=executor, further=further)
    assert len(executor.done) == len(set(executor.done)) == 3 * 3  # blocks of 14, 13 and 13 items
    for name in FILES:
        assert (again.path / name).read_bytes() == (corrupted.path / name).read_bytes(), name


def test_the_python_function_finds_what_the_stage_finds(clean, corrupted, prepared, models):
    test = PreparedDataset.open(prepared).load("test")
    loaded = {name: load_model(folder / "model") for name, folder in models.items()}
    found = api.evaluate(
        loaded, test.images, test.labels, corruptions=CORRUPTIONS, seed=5,
        item_ids=test.item_ids, micro_batch=8, classes=[str(digit) for digit in range(10)],
    )  # fmt: skip
    for row in rows_of(clean) + rows_of(corrupted):
        place = {"item": row.item, "level": row.level, "model": row.model}
        assert found.value(row.suite, row.metric, **place) == row.value, row
    with pytest.raises(CasemateError, match="names 2 numbers, not one"):
        found.value("clean", "accuracy")
    with pytest.raises(CasemateError, match=r"evaluate: spatial\.chunk_size: 0 must be at least 1"):
        api.evaluate(loaded, test.images, test.labels, spatial={"chunk_size": 0})
    with pytest.raises(CasemateError, match=r"transfer\.models: x are for recipes"):
        api.evaluate(loaded, test.images, test.labels, transfer={"models": {"x": "y"}})
    with pytest.raises(CasemateError, match="classes: 2 different names, but there are 10"):
        api.evaluate(loaded, test.images, test.labels, classes=["a", "b"])


GRID = {"max_shift": 1, "num_shifts": 3, "max_angle": 20, "num_angles": 3}


def test_transfer_is_the_matrix_of_components(run_suite, prepared, models):
    """Cut into units, and with a model of another run: one call on all items finds the same."""
    section = {"transfer": {"eps": 0.1, "num_steps": 3, "max_items": 30, "models": {"copy": "x"}}}
    further = {"other_model.copy": models["main"] / "model"}
    out = run_suite("transfer", section, further=further)
    test = PreparedDataset.open(prepared)
    chosen = {row["item_id"] for row in predictions_of(out)}
    assert len(chosen) == 30
    split = test.load("test")
    rows = torch.tensor([i for i, item in enumerate(split.item_ids) if item in chosen])
    part = split.rows(rows)
    loaded = {name: load_model(models[name] / "model") for name in ("main", "plain")}
    named = [TransferModel(name, model, (1, 8, 8)) for name, model in loaded.items()]
    how = TransferSuiteSettings(eps=0.1, num_steps=3)
    whole = transfer_predictions(
        named, {(1, 8, 8): part.pixels()}, part.labels, part.item_ids, how
    ).to_pylist()
    key = ("attack", "source", "target", "item_id")
    expected = {tuple(row[k] for k in key): row["prediction"] for row in whole}
    found = {tuple(row[k] for k in key): row["prediction"] for row in predictions_of(out)}
    assert {k: v for k, v in found.items() if "copy" not in k} == expected
    matrix = pq.read_table(out.path / "matrix.parquet").to_pylist()
    cells = {(row["attack"], row["source"], row["target"]): row for row in matrix}
    assert len(cells) == len(matrix) == 2 * 3 * 3
    for attack in ("fgsm", "pgd"):  # a model against its copy
        assert (
            cells[attack, "main", "copy"]["accuracy"] == cells[attack, "copy", "main"]["accuracy"]
        )
        assert cells[attack, "main", "main"]["drop"] < 0
    row = value_of(out, model="plain", item="pgd/main", metric="accuracy")
    assert (row.value, row.level) == (cells["pgd", "main", "plain"]["accuracy"], 0.1)
    assert value_of(out, model="copy", item="clean", metric="mcnemar_p/main").value == 1.0


def test_models_of_other_sizes_have_null_cells_with_the_reason(run_suite, tmp_path):
    torch.manual_seed(0)
    spec = ModelSpec("tiny_vit", 10, 3, 12, (0.5,) * 3, (0.5,) * 3, options=OPTIONS)
    save_model(tmp_path / "large", PixelModel(spec).eval(), recipe_digest="")
    section = {"transfer": {"attacks": ["fgsm"], "max_items": 8, "models": {"large": "x"}}}
    out = run_suite("transfer", section, further={"other_model.large": tmp_path / "large"})
    row = value_of(out, model="large", item="fgsm/main", metric="accuracy")
    assert row.value is None
    assert row.flags == ("null: the source takes 1x8x8, the target 3x12x12",)
    assert value_of(out, model="large", item="fgsm/large", metric="accuracy").n == 8
    reasons = {row["reason"] for row in pq.read_table(out.path / "matrix.parquet").to_pylist()}
    assert reasons == {
        None,
        "the source takes 1x8x8, the target 3x12x12",
        "the source takes 3x12x12, the target 1x8x8",
    }


def test_early_exit_finds_the_same_spatial_accuracy(run_suite):
    section = {"grid": GRID, "max_items": 12, "chunk_size": 9}
    outs = {
        early: run_suite("spatial", {"spatial": {**section, "early_exit": early}})
        for early in (True, False)
    }
    item = "3x3x3-1px-20deg"
    for model in ("main", "plain"):
        early, full = (
            value_of(out, model=model, item=item, metric="accuracy") for out in outs.values()
        )
        assert (early.value, early.n) == (full.value, 12)
        clean = value_of(outs[False], model=model, item=item, metric="clean_accuracy")
        assert full.value <= clean.value
    failures = pq.read_table(outs[False].path / "failure_map.parquet").to_pylist()
    assert len(failures) == 2 * 27
    assert not (outs[True].path / "failure_map.parquet").exists()
    angles = rows_of(outs[False], model="main", metric="angle_accuracy")
    assert [row.level for row in angles] == [-20.0, 0.0, 20.0]
    assert rows_of(outs[True], model="main", metric="mcnemar_p/plain")


def test_a_dataset_against_itself_has_no_gap(run_suite, prepared):
    """A prepared dataset as its own shift, and a source of which one class is left out."""
    shifts = {
        "same": {"path": str(prepared)},
        "part": {"source": "digits", "class_map": {"3": None}, "num_items": 24},
    }
    out = run_suite("shifts", {"shifts": shifts})
    for metric in ("masked", "unmasked"):
        row = value_of(out, model="main", item="same", metric=metric)
        clean = value_of(out, model="main", item="same", metric=f"clean_{metric}")
        assert (row.value, row.n) == (clean.value, NUM_ITEMS)
        assert value_of(out, model="main", item="same", metric=f"gap_{metric}").value == 0
    part = value_of(out, model="plain", item="part", metric="masked")
    assert (part.n, part.flags) == (24, ("classes: 9 of 10",))
    rows = [row for row in predictions_of(out) if row["shift"] == "part"]
    assert {row["images"] for row in rows} == {"shifted", "clean"}
    assert not {3} & {row[name] for row in rows for name in ("label", "masked_prediction")}
    assert rows_of(out, model="main", item="part/masked", metric="mcnemar_p/plain")


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory) -> dict[str, Path]:
    """A dataset with the classes of ImageNet, an untrained model, and stand-ins of other sets."""
    root = tmp_path_factory.mktemp("imagenet")
    places = write_imagenet_sets(root)
    places["main"] = root / "main"
    write_imagenet_model(root / "main" / "model")
    source = open_source("imagenet_v2", path=str(root / "v2"), options={"subset": True})
    (root / "data").mkdir()
    write_prepared(root / "data", source, Fitting(SIDE, "squash", 3))
    return {**places, "data": root / "data"}


@pytest.fixture(scope="module")
def run_imagenet(imagenet, tmp_path_factory):
    def run(suite: str, section: dict, **further: Path) -> StageDir:
        data = {"source": "imagenet_v2", "path": str(imagenet["v2"]), "image_size": SIDE,
                "fit": "squash", "options": {"subset": True}}  # fmt: skip
        values = {"name": "x", "data": data, "model": {"pretrained": str(imagenet["main"])}}
        recipe = parse({**values, "evaluate": {"micro_batch": 4, **section}}, source="x")
        inputs = {"prepare": imagenet["data"], "model.main": imagenet["main"] / "model", **further}
        place = tmp_path_factory.mktemp("evaluate")
        folder = StageDir(place, f"evaluate.{suite}", "f" * 64, FakeRun(), inputs)
        with mock.patch.object(evaluation, "run_units", InProcess()):
            stage.run(recipe, inputs, folder)
        return folder

    return run


def test_an_imagenet_set_is_masked_to_its_classes(run_imagenet, imagenet):
    shift = {"source": "imagenet_r", "path": str(imagenet["r"]), "options": {"subset": True}}
    out = run_imagenet("shifts", {"shifts": {"renditions": shift}})
    kept = set(imagenet_indices("imagenet_r"))
    rows = predictions_of(out)
    assert {row["masked_prediction"] for row in rows} <= kept
    assert {row["label"] for row in rows if row["images"] == "shifted"} == {1, 988}
    clean = value_of(out, item="renditions", metric="clean_masked")
    assert clean.n == 3 * len({1, 6, 10, 988} & kept)  # three images of each class
    assert value_of(out, item="renditions", metric="masked").dataset == "imagenet_r"
    assert "evaluate/shifts/renditions/masked" in out.run.logged  # one model: as in the spec


def test_conflict_stimuli_are_decided_among_16_classes(run_imagenet, imagenet):
    out = run_imagenet("shape_bias", {"shape_bias": {"path": str(imagenet["cue"])}})
    rows = predictions_of(out)
    assert [(row["shape"], row["texture"]) for row in rows] == [
        ("cat", "dog"), ("dog", "dog"), ("dog", "cat"),
    ]  # fmt: skip
    right = sum(row["decision"] == row["shape"] for row in rows)
    row = value_of(out, item="all", metric="shape_acc")
    assert (row.value, row.n, row.flags) == (right / 3, 3, ("nonstandard_stimuli",))
    assert row.dataset == "conflict_stimuli"


def test_a_published_dataset_is_read_and_its_gaps_are_null(run_imagenet, imagenet):
    section = {
        "corruptions": {"source": "imagenet_c", "path": str(imagenet["c"]), "names": "benchmark"}
    }
    clean = run_imagenet("clean", {})
    out = run_imagenet("corruptions", section, **{"evaluate.clean": clean.path})
    found = value_of(out, item="fog", level=1.0, metric="accuracy")
    assert (found.n, found.dataset, found.fidelity) == (2, "imagenet_c", "released")
    missing = value_of(out, item="fog", level=3.0, metric="accuracy")
    assert missing.value is None
    assert "lacks fog/3" in missing.flags[0]
    score = value_of(out, item="all", metric="mean75")
    assert score.value is None
    flags = ("missing_classes", "nonstandard_resolution")  # 2 classes, images of 32 pixels
    lacks = ", ".join(f"gaussian_noise/{level}" for level in (1, 2, 3, 4, 5))
    assert set(score.flags) == {*flags, f"null: lacks {lacks}, 66 more"}
    assert (
        "null: images were not corrupted at 224 pixels"
        in value_of(out, item="all", metric="mce").flags
    )
    rows = predictions_of(out)
    names = {row["item_id"] for row in rows}
    assert names == {f"{imagenet_synsets()[label]}/a.JPEG" for label in (1, 10)}
    assert len(rows) == 2 * 2 * 2


def test_a_variant_with_fewer_images_is_left_out_of_means(run_imagenet, tmp_path):
    wnids = [imagenet_synsets()[label] for label in (1, 10)]
    kept = [f"{name}/{n}/{w}/a.JPEG" for name in ("fog", "snow") for n in SEVERITIES for w in wnids]
    write_images(tmp_path, [path for path in kept if path != f"snow/2/{wnids[1]}/a.JPEG"])
    section = {
        "corruptions": {"source": "imagenet_c", "path": str(tmp_path), "names": ["fog", "snow"]}
    }
    out = run_imagenet("corruptions", section, **{"evaluate.clean": run_imagenet("clean", {}).path})
    assert value_of(out, item="snow", level=2.0, metric="accuracy").n == 1
    weather = value_of(out, item="all", metric="mean_weather")
    assert weather.value is None
    assert any("snow/2 (1 images, other variants 2)" in flag for flag in weather.flags)


def test_images_of_another_size_are_refused(run_imagenet, tmp_path):
    paths = [f"fog/{n}/{imagenet_synsets()[1]}/a.png" for n in (1, 2)]
    write_images(tmp_path, paths)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / paths[1])
    section = {"corruptions": {"source": "imagenet_c", "path": str(tmp_path), "names": ["fog"]}}
    clean = {"evaluate.clean": run_imagenet("clean", {}).path}
    with pytest.raises(CasemateError, match=r"corruptions\.path: .*is 8x8 pixels, other images"):
        run_imagenet("corruptions", section, **clean)


def test_labels_of_published_images_follow_the_names_of_classes():
    names = (*CIFAR10[1:], CIFAR10[0])
    assert labels_among("cifar10_c", names) == [9, *range(9)]
    assert labels_among("cifar10_c", [str(n) for n in range(10)]) == [*range(10)]  # no names
    with pytest.raises(CasemateError, match="class airplane is not one of the 10: zero"):
        labels_among("cifar10_c", ["zero", *(f"digit {n}" for n in range(9))])


def test_clean_accuracy_of_imagenet_c_is_that_of_the_same_crops():
    logits = torch.eye(3)[[0, 1, 1, 2]]
    ids = [f"val/n0/ILSVRC2012_val_0000000{n}" for n in range(4)]
    clean = Predictions.of_logits(ids, torch.tensor([0, 1, 2, 2]), logits)  # the third is wrong
    crop = DataOrigin("imagenet", "crop", 256, 224)
    images = [f"n01440764/ILSVRC2012_val_0000000{n}.JPEG" for n in (2, 3)]
    assert clean_accuracy_on(images, clean, crop) == 0.5
    assert clean_accuracy_on([*images, "n01440764/gone.JPEG"], clean, crop) is None
    for other in (("squash", None, 224), ("crop", 224, 224), ("crop", None, 224)):
        assert clean_accuracy_on(images, clean, DataOrigin("imagenet", *other)) is None
