"""The attack stage without Ray: what it writes, and that nothing but settings can change it."""

import json
from itertools import pairwise
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from components.attacks.cascade import run_cascade
from components.attacks.gradient import in_fixed_batches
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.listing import attack_list
from components.core.errors import CasemateError
from components.data.prepared import PreparedDataset
from components.models.checkpoint import load_model, save_model
from components.models.fast import fast_forward
from pipelines.recipe.schema.attack import AttackSection
from pipelines.stages.attack import units as attack_units
from pipelines.stages.attack import worker as attack_worker
from tests.unit.pipelines.conftest import EPS, NUM_ITEMS, InProcess

LIST = [{"kind": "fgsm"}, {"kind": "pgd", "num_steps": 5}, {"kind": "apgd-ce", "num_steps": 10}]
SECTION = {
    "models": ["main", "plain"],
    "attacks": LIST,
    "micro_batch": 8,
    "curves": {"eps": [EPS / 2, EPS], "steps": [1, 5], "num_items": 16},
}
FILES = ("attacks.parquet", "summary.json", "examples.npz")


def rows_of(out) -> list[dict]:
    return pq.read_table(out.path / "attacks.parquet").to_pylist()


def summary_of(out) -> dict:
    return json.loads((out.path / "summary.json").read_text())


@pytest.fixture(scope="module")
def executor() -> InProcess:
    return InProcess()


@pytest.fixture(scope="module")
def finished(run_attack, executor):
    return run_attack(SECTION, executor=executor)


@pytest.mark.parametrize("model", ["main", "plain"])
def test_the_stage_is_the_cascade_of_components(finished, prepared, models, model):
    """Cut into units, models and rounds: not one bit differs from one call on all items."""
    network = load_model(models[model] / "model")
    test = PreparedDataset.open(prepared).load("test")
    items = Items(test.pixels(), test.labels, test.item_ids, run_seed=5)
    section = AttackSection(eps=EPS, attacks=LIST)
    listed = attack_list(section.attacks, norm=section.norm, eps=section.eps)
    attacks = [own.attack for own in listed]
    with attack_mode(network), fast_forward(network.net):
        whole = run_cascade(attacks, in_fixed_batches(network, size=8), items)
    state = whole.state
    with np.load(finished.path / "examples.npz") as arrays:
        kept = arrays[f"{model}/adversarial"]
    assert np.array_equal(kept, whole.x_adv[: len(kept)].numpy())
    survivors = [i for i in range(len(kept)) if state.robust[i]]
    assert not any(torch.equal(whole.x_adv[i], items.x[i]) for i in survivors)
    moved = (whole.x_adv.double() - items.x.double()).abs().flatten(1).amax(dim=1)
    rows = [row for row in rows_of(finished) if row["model"] == model]
    assert [row["item_id"] for row in rows] == list(test.item_ids)
    assert [row["broken_by"] for row in rows] == state.breaker_names()
    for name in ("clean_prediction", "adversarial_prediction", "num_evaluations", "num_gradients"):
        assert [row[name] for row in rows] == getattr(state, name).tolist()
    for row, distance in zip(rows, moved.tolist(), strict=True):
        assert row["norm"] == (distance if row["broken_by"] else None)
    broken = [row for row in rows if row["broken_by"]]
    assert broken
    assert len(broken) < NUM_ITEMS
    assert all(0 < row["norm"] <= EPS + 1e-7 for row in broken)


def test_the_summary_counts_the_rows(finished):
    rows = rows_of(finished)
    for model, summary in summary_of(finished)["models"].items():
        own = [row for row in rows if row["model"] == model]
        correct = [row["clean_prediction"] == row["label"] for row in own]
        assert summary["clean_accuracy"]["value"] == np.mean(correct)
        given = sum(correct)
        for step in summary["attacks"]:
            broken = sum(row["broken_by"] == step["name"] for row in own)
            assert (step["num_items"], step["num_broken"]) == (given, broken)
            given -= broken
            assert step["robust_accuracy"]["value"] == pytest.approx(given / NUM_ITEMS)
        assert summary["robust_accuracy"] == summary["attacks"][-1]["robust_accuracy"]
        assert summary["num_evaluations"] == sum(row["num_evaluations"] for row in own)
        costs = sum(step["num_evaluations"] for step in summary["attacks"])
        assert summary["num_evaluations"] == costs + NUM_ITEMS  # and one clean pass each


def test_units_order_and_size_change_nothing(run_attack, finished):
    backwards = InProcess(order=lambda units: units[::-1])
    with mock.patch.object(attack_units, "ITEMS_PER_UNIT", 7):
        other = run_attack(SECTION, executor=backwards)
    assert len(backwards.done) > 2 * NUM_ITEMS / 7
    assert rows_of(other) == rows_of(finished)
    assert summary_of(other) == summary_of(finished)


@pytest.mark.parametrize("stop_after", [3, 11, 13])
def test_a_stopped_stage_goes_on_in_the_middle_of_its_list(
    run_attack, finished, executor, tmp_path, stop_after
):
    first, second = InProcess(), InProcess()
    first.stop_after = stop_after
    with pytest.raises(KeyboardInterrupt):
        run_attack(SECTION, out=tmp_path, executor=first)
    assert not (tmp_path / "summary.json").exists()
    resumed = run_attack(SECTION, out=tmp_path, executor=second)
    assert first.done + second.done == executor.done
    for name in FILES[:2]:
        assert (resumed.path / name).read_bytes() == (finished.path / name).read_bytes()


def test_kept_images_are_those_that_the_rows_speak_of(finished, prepared, models):
    test = PreparedDataset.open(prepared).load("test")
    rows = [row for row in rows_of(finished) if row["model"] == "main"]
    network = load_model(models["main"] / "model")
    with np.load(finished.path / "examples.npz") as arrays:
        clean, adversarial = arrays["main/clean"], arrays["main/adversarial"]
        said = arrays["main/adversarial_prediction"]
    assert np.array_equal(clean, test.pixels().numpy()[: len(clean)])
    assert adversarial.min() >= 0
    assert adversarial.max() <= 1
    predicted = network(torch.from_numpy(adversarial)).argmax(dim=1).numpy()
    assert np.array_equal(predicted, said)
    assert said.tolist() == [row["adversarial_prediction"] for row in rows[: len(said)]]


def test_images_of_the_first_broken_items_are_kept(finished, prepared, models):
    test = PreparedDataset.open(prepared).load("test")
    rows = [row for row in rows_of(finished) if row["model"] == "main"]
    fell = [place for place, row in enumerate(rows) if row["broken_by"] is not None][:6]
    assert fell
    with np.load(finished.path / "examples.npz") as arrays:
        parts = ("clean", "adversarial", "label", "clean_prediction", "adversarial_prediction")
        kept = {name: arrays[f"main/broken/{name}"] for name in parts}
    assert np.array_equal(kept["clean"], test.pixels().numpy()[fell])
    network = load_model(models["main"] / "model")
    predicted = network(torch.from_numpy(kept["adversarial"])).argmax(dim=1).numpy()
    assert np.array_equal(predicted, kept["adversarial_prediction"])
    assert np.array_equal(kept["clean_prediction"], kept["label"])
    assert (kept["adversarial_prediction"] != kept["label"]).all()
    changes = np.abs(kept["adversarial"] - kept["clean"]).reshape(len(fell), -1).max(axis=1)
    assert changes.tolist() == pytest.approx([rows[place]["norm"] for place in fell], abs=1e-6)


def test_curves_are_pgd_at_their_points(finished):
    summary = summary_of(finished)["models"]["main"]["curves"]
    assert [point["eps"] for point in summary["eps"]] == [EPS / 2, EPS]
    assert [point["steps"] for point in summary["steps"]] == [1, 5]
    for points in summary.values():
        values = [point["accuracy"]["value"] for point in points]
        assert values == sorted(values, reverse=True)
        assert all(point["accuracy"]["num_items"] == 16 for point in points)


def test_metrics_follow_the_list(finished):
    logged, summary = finished.run.logged, summary_of(finished)["models"]["main"]
    along = [logged[f"attack/a/main/after_{step['name']}"] for step in summary["attacks"]]
    assert all(a >= b for a, b in pairwise([logged["attack/a/main/clean_accuracy"], *along]))
    assert along[-1] == logged["attack/a/main/robust_accuracy"]
    assert finished.run.files == list(FILES[:2])
    assert finished.run.tagged == {"casemate.device": "cpu"}  # sanity is off here


def test_a_masked_model_is_suspect_and_a_plain_one_is_not(run_attack, models, tmp_path):
    """Logits 10^4 times as large: the same predictions, but cross-entropy has no gradient left."""
    masked = load_model(models["main"] / "model")
    masked.net.head.weight.data *= 1e4
    masked.net.head.bias.data *= 1e4
    save_model(tmp_path / "masked" / "model", masked, recipe_digest="")
    section = {"attacks": [{"kind": "pgd", "num_steps": 5}], "sanity": {"num_items": 16},
               "surrogate": "plain"}  # fmt: skip
    plain = run_attack(section)
    found = summary_of(plain)["models"]["main"]["sanity"]
    assert (found["verdict"], found["reasons"]) == ("reliable", [])
    assert any(f["name"].startswith("transfer") for f in found["findings"])
    assert plain.run.tagged["casemate.attack.a.verdict"] == "reliable"
    gaps = found["attention_gaps"]
    for block in gaps["blocks"].values():
        assert len(block["counts"]) == len(gaps["edges"]) + 1
        assert sum(block["counts"]) == 16 * 2 * 5  # items, heads, tokens

    folders = {"main": tmp_path / "masked", "plain": models["plain"]}
    flagged = run_attack(section, folders=folders)
    found = summary_of(flagged)["models"]["main"]["sanity"]
    assert found["verdict"] == "suspect"
    assert any("zero gradients" in reason for reason in found["reasons"])
    assert flagged.run.tagged["casemate.attack.a.verdict"] == "suspect"
    assert "zero gradients" in flagged.run.tagged["casemate.attack.a.reasons"]


def test_scaled_attention_is_judged_by_the_model_itself(run_attack):
    inner = {"kind": "pgd", "num_steps": 5}
    entry = {"kind": "aas", "inner": inner, "search": {"num_draws": 1}, "scales": [0.1]}
    out = run_attack({"attacks": [entry]})
    summary = summary_of(out)["models"]["main"]
    (step,), protocol = summary["attacks"], summary["paper_protocol"]["aas-pgd-5-ce"]
    base = summary_of(run_attack({"attacks": [inner]}))["models"]["main"]
    assert summary["robust_accuracy"]["value"] <= base["robust_accuracy"]["value"]
    assert protocol["num_items"] == step["num_items"]
    unscaled, manual, found = protocol["candidates"]
    assert unscaled["scales"] is None
    assert unscaled["original_accuracy"] == unscaled["scaled_accuracy"]
    assert manual["scales"] == [0.1, 0.1]
    assert len(found["scales"]) == 2
    best = min(c["original_accuracy"]["value"] for c in protocol["candidates"])
    assert step["num_items"] - step["num_broken"] <= best * step["num_items"]
    assert protocol["restarts_accuracy"]["value"] <= unscaled["original_accuracy"]["value"]
    apart = [protocol[key]["value"] for key in ("scaled_union_accuracy", "restarts_accuracy")]
    left = step["num_items"] - step["num_broken"]
    assert left <= min(apart) * step["num_items"] + 1e-9  # what restarts break is broken, too
    assert "attack/a/main/paper_protocol/aas-pgd-5-ce/1/scaled_accuracy" in out.run.logged


def test_a_list_goes_on_when_no_item_is_robust(run_attack):
    out = run_attack({"eps": 0.9, "attacks": [{"kind": "pgd"}, {"kind": "square"}]})
    summary = summary_of(out)["models"]["main"]
    assert summary["robust_accuracy"]["value"] == 0
    last = summary["attacks"][-1]
    assert (last["name"], last["num_items"], last["num_evaluations"]) == ("square", 0, 0)


@pytest.mark.parametrize(
    "section",
    [
        {"norm": "l2", "eps": 1.5, "attacks": [{"kind": "pgd", "num_steps": 3}]},
        {"norm": "spatial", "eps": None, "attacks": [{"kind": "spatial", "num_angles": 3}]},
    ],
)
def test_other_norms(run_attack, section):
    rows = rows_of(run_attack(section))
    broken = [row for row in rows if row["broken_by"]]
    assert broken
    for row in broken:
        if section["norm"] == "l2":
            assert 0 < row["norm"] <= 1.5 + 1e-6
        else:
            assert row["norm"] is None


def test_what_cannot_be_attacked_is_one_clear_line(run_attack, models, tmp_path):
    from components.models.pixels import PixelModel
    from components.models.spec import ModelSpec

    def saved(name: str, **changes):
        options = {"patch_size": 2, "embed_dim": 8, "depth": 1, "num_heads": 2}
        values = {"num_classes": 10, "image_size": 8, **changes}
        spec = ModelSpec("tiny_vit", channels=1, mean=(0.5,), std=(0.5,), options=options, **values)
        model = PixelModel(spec)
        if name == "broken":
            model.net.head.bias.data[0] = float("nan")
        save_model(tmp_path / name / "model", model, recipe_digest="")
        return {**models, "main": tmp_path / name}

    section = {"attacks": [{"kind": "fgsm"}]}
    with pytest.raises(CasemateError, match="classes: 10 in the data, but this tiny_vit has 3"):
        run_attack(section, folders=saved("three", num_classes=3))
    with pytest.raises(CasemateError, match=r"1x8x8.* is not the 1x16x16"):
        run_attack(section, folders=saved("large", image_size=16))
    with pytest.raises(CasemateError, match=r"item '.*' gets logits that are not finite"):
        run_attack(section, folders=saved("broken"))


def test_a_model_that_returns_probabilities_is_refused_before_any_attack(run_attack):
    def with_softmax(folder, *, device):
        model = load_model(folder, device=device)
        model.net.head = torch.nn.Sequential(model.net.head, torch.nn.Softmax(dim=1))
        return model

    executor = InProcess()
    with (
        mock.patch.object(attack_worker, "load_model", with_softmax),
        pytest.raises(CasemateError) as caught,
    ):
        run_attack({"attacks": [{"kind": "fgsm"}]}, executor=executor)
    assert str(caught.value) == (
        "model: main returns probabilities, attacks need logits; leave out the softmax at its end"
    )
    assert executor.done == []


def test_points_of_a_curve_that_agree_to_many_digits_have_parts_of_their_own():
    eps = [0.1, 0.1 + 1e-9, 0.1 + 2e-9]
    curves = {"eps": eps, "steps": [1, 10], "num_items": 250}
    section = AttackSection(eps=0.2, attacks=[{"kind": "fgsm"}], curves=curves)
    units = attack_units.curve_units(section, "main", 250, num_classes=10, micro_batch=35)
    names = [unit.name for point in units.values() for unit in point]
    assert len(names) == len(set(names)) == 5 * 3
    assert names[0] == "curve-eps-0.1-main-000000"


def test_a_list_of_tiny_steps_is_suspect(run_attack):
    weak = [{"kind": "pgd", "num_steps": 1, "step_size": 1e-6, "random_start": False}]
    out = run_attack({"attacks": weak, "sanity": {"num_items": 32}})
    found = summary_of(out)["models"]["main"]["sanity"]
    assert found["verdict"] == "suspect"
    assert any("suite against attack list" in reason for reason in found["reasons"])


def test_accuracies_so_far_lead_to_the_final_ones(finished, executor):
    summary = summary_of(finished)["models"]
    for model in ("main", "plain"):
        shares = [told.shares.get(f"{model}/robust_accuracy") for told in executor.so_far]
        shares = [share for share in shares if share is not None]
        final = summary[model]["robust_accuracy"]["value"]
        assert all(share.total == NUM_ITEMS and share.seen <= NUM_ITEMS for share in shares)
        assert shares[-1].value == final
        assert shares[-1].band() == (final, final)
        clean = [told.shares.get(f"{model}/clean_accuracy") for told in executor.so_far]
        last = [share for share in clean if share is not None][-1]
        assert last.value == summary[model]["clean_accuracy"]["value"]
