"""`casemate attack` without a recipe: a model folder on prepared data or on a source."""

import json
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.e2e.cli import call, mistake_of, step_folder

pytestmark = pytest.mark.e2e


@pytest.fixture
def places(finished_flow):
    """(model folder, prepared dataset) of a finished flow."""
    return step_folder(finished_flow, "train.main") / "model", step_folder(finished_flow, "prepare")


@pytest.mark.ray
def test_a_given_model_is_attacked_as_in_its_own_recipe(
    kept_workers, places, finished_flow, tmp_path
):
    """Same model, items, seed and list: the same rows, though nothing was trained or prepared."""
    model, data = places
    command = ("attack", "--model", model, "--data", data, "--eps", 0.05, "--storage", tmp_path,
               "--attacks", "fgsm,pgd-5,apgd-ce", "--set", "seed=3",
               "--set", "attack.linf.sanity.num_items=8", "--json")  # fmt: skip
    said = call(*command)
    assert said.code == 0, said.err
    assert set(said.json["steps"]) == {"prepare", "model.main", "attack.linf", "report"}
    assert said.json["steps"]["prepare"] == str(data)
    rows = pq.read_table(step_folder(tmp_path, "attack.linf") / "attacks.parquet")
    expected = pq.read_table(step_folder(finished_flow, "attack.linf") / "attacks.parquet")
    assert rows.equals(expected)
    assert said.json["summary"][-1]["verdict"] in ("reliable", "suspect")
    again = call(*command)
    assert again.code == 0, again.err
    assert again.err.count("done before") == 2  # attack and report; the rest was made elsewhere
    assert again.json["summary"] == said.json["summary"]


@pytest.mark.ray
def test_a_source_is_prepared_to_fit_the_model(kept_workers, places, tmp_path):
    model, _ = places
    said = call("attack", "--model", model, "--data", "digits", "--eps", "8/255", "--num-items", 10,
                "--attacks", "fgsm", "--set", "attack.linf.sanity=null",
                "--set", "data.limits={train: 20, val: 10, test: 20}",
                "--storage", tmp_path)  # fmt: skip
    assert said.code == 0, said.err
    summary = json.loads((step_folder(tmp_path, "attack.linf") / "summary.json").read_text())
    assert summary["models"]["main"]["num_items"] == 10
    assert summary["threat"]["eps"] == 8 / 255
    assert "fgsm linf 8/255" in said.out
    assert "\nreport: " in said.out


mistake = partial(mistake_of, "attack")


def test_mistakes_are_one_line(places, tmp_path):
    model, data = places
    both = ("--model", model, "--data", data)
    (tmp_path / "empty").mkdir()
    assert mistake(*both) == (
        "attack: --eps is missing; name a RECIPE, or --model, --data and --eps"
    )
    twice = "cannot be combined with RECIPE"
    assert mistake("demo", "--eps", "8/255").startswith(f"--eps: 8/255 {twice}")
    assert mistake("demo", "--norm", "l2").startswith(f"--norm: l2 {twice}")
    assert mistake(*both, "--eps", 1, "--fit", "crop").startswith("--fit: crop does not apply")
    assert "eps: '8' is outside [0, 1]" in mistake(*both, "--eps", 8)
    assert "write e.g. 8/255" in mistake(*both, "--eps", 8)
    assert "has no model.json" in mistake("--model", tmp_path, "--data", data, "--eps", 0.1)
    empty = ("--model", model, "--data", tmp_path / "empty", "--eps", 0.1)
    assert "has no dataset.json" in mistake(*empty)
    assert "did you mean 'digits'?" in mistake("--model", model, "--data", "digit", "--eps", 0.1)
    few = mistake(*both, "--eps", 0.1, "--num-items", 0)
    assert few == "--num-items: 0 must be at least 1"
    comma = mistake(*both, "--eps", 0.1, "--attacks", "pgd-20,")
    assert comma.startswith("--attacks: 'pgd-20,' has an empty entry; write names with one comma")
    unknown = mistake(*both, "--eps", 0.1, "--attacks", "pgd-20,pdg-20")
    assert unknown.startswith("--attacks: pdg-20 is not an attack; write e.g. pgd-20. Known: ")


def test_a_model_of_other_images_is_refused_before_anything_starts(places, tmp_path):
    model, data = places
    other = tmp_path / "other"
    other.mkdir()
    for key, value, told in (
        ("num_classes", 7, "classes: 10 in the data, but this tiny_vit has 7"),
        ("image_size", 16, "image: 1x8x8 (channels x height x width) is not the 1x16x16"),
    ):
        header = json.loads((model / "model.json").read_text())
        header["spec"][key] = value
        (other / "model.json").write_text(json.dumps(header))
        said = mistake("--model", other, "--data", data, "--eps", 0.1, "--storage", tmp_path / "s")
        assert said.startswith(told)
        assert not (tmp_path / "s").exists()


def test_a_source_that_does_not_fit_is_refused_before_it_is_prepared(places, tmp_path):
    model, _ = places
    np.savez(tmp_path / "two.npz", images=np.zeros((40, 8, 8), np.uint8), labels=np.arange(40) % 2)
    np.savez(tmp_path / "wide.npz", images=np.full((40, 8, 8), 1.5), labels=np.arange(40) % 10)
    for name, told in (
        ("two", "classes: 2 in the data, but this tiny_vit has 10"),
        ("wide", "is float64 (40, 8, 8); expected uint8"),  # so pixels never leave [0, 1]
    ):
        source = ("--data", "npz", "--data-path", tmp_path / f"{name}.npz")
        said = mistake("--model", model, *source, "--eps", 0.1, "--storage", tmp_path / "s")
        assert told in said
        assert not (tmp_path / "s").exists()
