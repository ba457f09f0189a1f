"""The analyze stage without Ray: what its studies write, and that only settings can change it."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from components.analyze.blocks import find_blocks
from components.analyze.correlation import pearson_states
from components.analyze.lesions import lesion_predictions, lesions_of
from components.analyze.settings import CorrelationSettings, LesionSettings
from components.attacks.gradients import attack_mode
from components.core.errors import CasemateError
from components.data.prepared import PreparedDataset
from components.evaluate.metrics import read_metrics
from components.models.checkpoint import load_model
from components.report.page import render
from pipelines import api
from pipelines.recipe.load import parse
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.report.stage import build_content
from tests.unit.pipelines.conftest import NUM_ITEMS, InProcess

PERTURBED = {"num_steps": 4, "eps": 0.1, "num_pictures": 10, "judge_models": ["plain"], "top_k": 2}
STUDIES = {
    "correlation": {},
    "lesions": {"num_samples": 3},
    "restricted_attention": {},
    "gaps": {"num_steps": 2, "subset": {"num_items": 12}},
    "perturbations": PERTURBED,
    "accumulation": {"num_steps": 3, "num_images": 3},
}


@pytest.fixture(scope="session")
def run_study(run_step):
    """One study of two models; returns its folder and what was logged."""

    def run(study: str, section=None, *, out=None, executor=None, **further) -> StageDir:
        own = STUDIES[study] if section is None else section
        return run_step("analyze", study, {study: own, **further}, out=out, executor=executor)

    return run


def content(folder: Path) -> dict[str, bytes]:
    """All results of a step; `unfinished` holds what only a resumed start reads."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    kept = [path for path in files if "unfinished" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


def value_of(out: StageDir, **wanted):
    rows = read_metrics(out.path / "metrics.parquet")
    (row,) = [r for r in rows if all(getattr(r, k) == v for k, v in wanted.items())]
    return row


def loaded(models, prepared, name="main"):
    """(model, items in the order of the prepared split)."""
    return load_model(models[name] / "model"), PreparedDataset.open(prepared).load("test")


@pytest.mark.parametrize("study", STUDIES)
def test_order_and_interruptions_change_no_byte(run_study, tmp_path, study):
    whole = run_study(study)
    broken = InProcess(lambda units: units[::-1])
    broken.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        run_study(study, out=tmp_path, executor=broken)
    rest = InProcess(lambda units: units[::-1])
    other = run_study(study, out=tmp_path, executor=rest)
    assert not set(broken.done) & set(rest.done)
    assert content(whole.path) == content(other.path)
    assert {"metrics.parquet", "summary.json"} < set(content(whole.path))
    logged = [name for name in whole.run.logged if name.startswith(f"analyze/{study}/main/")]
    assert logged


def test_lesions_are_those_of_the_model(run_study, models, prepared):
    out = run_study("lesions")
    model, test = loaded(models, prepared)
    with attack_mode(model):
        blocks = find_blocks(model.net)
        lesions = lesions_of(blocks, LesionSettings(num_samples=3), seed=5)
        expected = lesion_predictions(model, blocks, test.pixels(), lesions)
    rows = pq.read_table(out.path / "predictions.parquet").to_pylist()
    found = {row["item_id"]: row["predictions"] for row in rows if row["model"] == "main"}
    assert found == dict(zip(test.item_ids, expected.T.tolist(), strict=True))
    names = pq.read_table(out.path / "variants.parquet").to_pylist()
    own = [row["name"] for row in names if row["model"] == "main"]
    assert own == [lesion.name for lesion in lesions]
    right = expected == test.labels.numpy()
    whole = value_of(out, model="main", item="none", metric="accuracy")
    assert (whole.value, whole.n) == (right[0].mean(), NUM_ITEMS)
    place = own.index("attn-0")
    single = value_of(out, model="main", item="attn", level=0.0, metric="single_accuracy")
    assert single.value == right[place].mean()
    summary = json.loads((out.path / "summary.json").read_text())
    assert [row["what"] for row in summary["headlines"]] == ["lesions: whole network"] * 2
    assert out.run.logged["analyze/lesions/main/none/accuracy"] == whole.value


def test_correlations_are_those_of_all_items_at_once(run_study, models, prepared):
    out = run_study("correlation")
    model, test = loaded(models, prepared)
    with attack_mode(model):
        blocks = find_blocks(model.net)
        states = pearson_states(model, blocks, test.pixels(), CorrelationSettings())
    for stream, state in states.items():
        found = np.load(out.path / "matrices" / f"main.{stream}.npy")
        np.testing.assert_allclose(found, state.matrix(), rtol=1e-6)
        row = value_of(out, model="main", item=f"{stream}/0-1", metric="pearson_flat")
        assert row.value == found[0, 1]
        near = value_of(out, model="main", item=f"{stream}/neighbours")
        assert near.value == pytest.approx(found[0, 1])
    details = json.loads((out.path / "summary.json").read_text())["details"]
    assert details["blocks"]["main"]["all"] == blocks.names
    assert not [name for name in out.run.logged if "0-1" in name]


@pytest.mark.parametrize(("estimator", "num_units"), [("exact", 1), ("minibatch", 4)])
def test_cka_on_request(run_study, estimator, num_units):
    executor = InProcess()
    how = {"measure": "cka", "estimator": estimator, "cka_batch": 10}
    out = run_study("correlation", how, executor=executor, models=["main"])
    assert len(executor.done) == num_units
    matrix = np.load(out.path / "matrices" / "main.all.npy")
    np.testing.assert_array_equal(matrix, matrix.T)
    assert value_of(out, item="all/1-1", metric=f"cka_{estimator}").value == 1


def test_unrestricted_attention_is_the_whole_network(run_study):
    out = run_study("restricted_attention")
    clean = value_of(run_study("lesions"), model="main", item="none", metric="accuracy").value
    for item in ("spatial", "random"):  # a grid of 2 x 2 patches: distance 1 is everything
        row = value_of(out, model="main", item=item, level=1.0, metric="accuracy")
        assert row.value == clean
    assert (
        value_of(out, model="main", item="cls_first", level=0.0, metric="accuracy").value == clean
    )


def test_gaps_before_and_after_scaling(run_study):
    out = run_study("gaps")
    rows = read_metrics(out.path / "metrics.parquet")
    items = {row.item for row in rows if row.model == "main"}
    assert {tuple(item.split("/")[:2]) for item in items} == {
        (images, scaling) for images in ("clean", "attacked") for scaling in ("before", "after")
    }
    alone = run_study("gaps", {**STUDIES["gaps"], "search": None})
    kept = {(r.model, r.item, r.metric): r.value for r in rows if "/before/" in r.item}
    again = read_metrics(alone.path / "metrics.parquet")
    assert {(r.model, r.item, r.metric): r.value for r in again} == kept
    states = pq.read_table(out.path / "states.parquet")
    assert set(states["model"].to_pylist()) == {"main", "plain"}


def test_pictures_and_judges(run_study, prepared):
    out = run_study("perturbations")
    summary = json.loads((out.path / "summary.json").read_text())
    details = summary["details"]
    test = PreparedDataset.open(prepared).load("test")
    rows = [test.item_ids.index(item_id) for item_id in details["item_ids"]]
    originals = np.load(out.path / "pictures/originals.npy")
    np.testing.assert_array_equal(originals, test.images[torch.tensor(rows)].numpy())
    assert details["labels"] == test.labels[rows].tolist()
    shown = {name: np.load(out.path / f"pictures/{name}.npy") for name in ("main", "plain")}
    assert all(images.shape == (10, 1, 8, 8) for images in shown.values())
    assert (shown["main"] != shown["plain"]).any()
    verdicts = pq.read_table(out.path / "judged.parquet").to_pylist()
    assert len(verdicts) == 2 * 2 * NUM_ITEMS  # models, signs
    hits = [r["hit"] for r in verdicts if r["model"] == "main" and r["sign"] == 1]
    row = value_of(out, model="main", item="plain/plus", metric="top2_accuracy")
    assert (row.value, row.n) == (np.mean(hits), NUM_ITEMS)
    assert value_of(out, model="main", item="patch_alignment", metric="score").level == 4
    assert {row["what"] for row in summary["headlines"]} == {"perturbations, judge plain"}


def test_images_grow_towards_their_targets(run_study):
    how = {"preset": "l2", "num_steps": 20, "num_images": 4}
    out = run_study("accumulation", how)
    for model in ("main", "plain"):
        after = value_of(out, model=model, metric="confidence").value
        assert after > value_of(out, model=model, metric="confidence_before").value
        assert np.load(out.path / f"pictures/{model}.npy").shape == (4, 1, 8, 8)
    details = json.loads((out.path / "summary.json").read_text())["details"]
    assert len(details["targets"]) == 4


def test_items_that_are_not_there_are_named(run_study):
    with pytest.raises(CasemateError) as caught:
        run_study("lesions", {"subset": {"num_items": None, "item_ids": ["gone"]}})
    assert str(caught.value).startswith("analyze.lesions.subset.item_ids: gone is not an item")


def test_the_report_shows_every_study(run_study, prepared, tmp_path):
    recipe = parse({"name": "x", "data": {"source": "digits"}}, source="x")
    inputs = {f"analyze.{study}": run_study(study).path for study in STUDIES}
    out = mock.Mock(path=tmp_path, provenance=dict)
    content = build_content(recipe, {"prepare": prepared, **inputs}, out)
    chapters = {chapter.anchor: chapter for chapter in content.chapters}
    assert [len(chapter.charts) for chapter in chapters.values()] == [4, 2, 4, 2, 0, 0]
    assert len(chapters["analysis-perturbations"].galleries[0].strips) == 10
    assert len(chapters["analysis-accumulation"].galleries[0].strips[0].pictures) == 3
    page = render(content)
    assert all(f'id="{anchor}"' in page for anchor in chapters)
    assert page == render(build_content(recipe, {"prepare": prepared, **inputs}, out))
    names = {table.name for table in content.tables()}
    assert {"analyze.lesions.main", "analyze.perturbations.semantics"} <= names
    alone = {"prepare": prepared, "analyze.lesions": inputs["analyze.lesions"]}
    (only,) = build_content(recipe, alone, out).chapters
    assert only.anchor == "analysis-lesions"


def test_the_api_finds_what_the_stage_finds(run_study, models, prepared):
    loaded_models = {name: load_model(folder / "model") for name, folder in models.items()}
    test = PreparedDataset.open(prepared).load("test")
    chosen = {name: STUDIES[name] for name in ("lesions", "perturbations", "accumulation")}
    found = api.analyze(
        loaded_models, test.images, test.labels, item_ids=test.item_ids, seed=5, micro_batch=8,
        **chosen,
    )  # fmt: skip
    keys = ["model", "item", "level", "metric"]
    for study in chosen:
        rows = found.metrics[found.metrics["suite"] == study]
        own = {tuple(map(str, row)): v for *row, v in rows[[*keys, "value"]].values.tolist()}
        stored = read_metrics(run_study(study).path / "metrics.parquet")
        assert len(own) == len(stored)
        for row in stored:
            level = "nan" if row.level is None else str(row.level)
            value = own[row.model, row.item, level, row.metric]
            assert value == pytest.approx(row.value, rel=1e-6) or row.value is None
    pictures = found.arrays["perturbations"]["pictures/main"]
    np.testing.assert_array_equal(
        pictures, np.load(run_study("perturbations").path / "pictures/main.npy")
    )
    with pytest.raises(CasemateError, match="is not among main, plain"):
        api.analyze(loaded_models, test.images, test.labels, lesions={}, models=["x"])
    others = {"x": "folder"}
    with pytest.raises(CasemateError, match="other_models: x are for recipes"):
        api.analyze(loaded_models, test.images, test.labels, lesions={}, other_models=others)
