"""The evaluate stage without Ray: what its suites write, and that only settings can change it."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from components.core.statistics import mcnemar_p_value, wilson_interval
from components.data.corruptions import corrupt
from components.data.fitting import to_channels
from components.data.prepared import PreparedDataset
from components.evaluate.metrics import read_metrics
from components.models.checkpoint import load_model
from pipelines.recipe.load import parse
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.evaluate import evaluation, stage
from tests.unit.pipelines.conftest import NUM_ITEMS, FakeRun, InProcess

FILES = ("metrics.parquet", "predictions.parquet", "summary.json")
CORRUPTIONS = {"names": ["gaussian_noise", "frost", "pixelate"], "severities": [1, 5]}


@pytest.fixture(scope="session")
def run_suite(prepared, models, tmp_path_factory):
    """One step of the stage on these models; returns its folder and what was logged."""

    def run(suite: str, section: dict, *, out=None, executor=None, further=None) -> StageDir:
        recipe = parse(
            {
                "name": "x",
                "seed": 5,
                "data": {"source": "digits"},
                "train": {"variants": {"plain": {"objective": {"kind": "standard"}}}},
                "evaluate": {"micro_batch": 8, **section},
            },
            source="x",
        )
        steps = {f"train.{name}": folder for name, folder in models.items()}
        inputs = {"prepare": prepared, **steps, **(further or {})}
        place = out or tmp_path_factory.mktemp("evaluate")
        folder = StageDir(place, f"evaluate.{suite}", "f" * 64, FakeRun(), inputs)
        with (
            mock.patch.object(evaluation, "run_units", executor or InProcess()),
            mock.patch.object(evaluation, "ITEMS_PER_UNIT", 16),
        ):
            stage.run(recipe, inputs, folder)
        return folder

    return run


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
    assert difference.value == found["main"].mean() - found["plain"].mean()
    p_value = value_of(clean, model="plain", metric="mcnemar_p/main").value
    assert p_value == mcnemar_p_value(found["main"], found["plain"])


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
    (main, plain) = summary["headlines"]
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
