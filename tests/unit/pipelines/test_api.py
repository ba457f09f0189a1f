"""`pipelines.api`: networks of a user, models in folders, and what the stages would give."""

import doctest
import importlib
import json
import pkgutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from components.attacks.settings import FgsmSettings, PgdSettings
from components.certify.votes import read_votes
from components.core.errors import CasemateError
from components.data.prepared import PreparedDataset
from components.models.checkpoint import weights_digest
from pipelines import api
from pipelines.recipe.load import parse
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.attack import stage as attack_stage
from pipelines.stages.certify import stage as certify
from tests.unit.pipelines.conftest import EPS, FakeRun, InProcess

ROOT = Path(__file__).resolve().parents[3]
NUM_ITEMS = 6
MODULES = [f"pipelines.api.{m.name}" for m in pkgutil.iter_modules(api.__path__)]


class Own(nn.Module):
    """A small convolutional network, as a user would bring it."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(4 * 64, num_classes)

    def forward(self, x):
        return self.head(self.dropout(self.features(x)))


@pytest.fixture
def own():
    torch.manual_seed(0)
    return api.load_model(Own(), image_size=8, channels=1)


@pytest.fixture(scope="module")
def test_split(prepared):
    return PreparedDataset.open(prepared).load("test", limit=NUM_ITEMS)


def test_a_certificate_that_is_refused_leaves_no_folder(own, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    images, labels = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])
    for wrong in ({"patch_sizes": [9], "band": 2}, {"patch_sizes": [1], "band": 2, "seed": 1}):
        with pytest.raises(CasemateError):
            api.certify_patch(own, images, labels, **wrong)
    with pytest.raises(CasemateError):
        api.certify_patch(own, images, labels[:1], patch_sizes=[1], band=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_the_docstrings_run(module):
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    outcome = doctest.testmod(importlib.import_module(module), optionflags=flags)
    assert outcome.failed == 0


def test_every_public_function_is_documented():
    for name in api.__all__:
        assert getattr(api, name).__doc__, name


def test_importing_it_is_light():
    code = "import sys, pipelines.api; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    heavy = {"torch", "numpy", "pandas", "pyarrow", "pydantic", "ray", "mlflow", "yaml"}
    assert not heavy & set(found.stdout.split())


# Models


def test_a_network_of_ones_own_is_normalised_and_has_a_digest():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    plain = api.load_model(net, image_size=2)
    scaled = api.load_model(net, image_size=2, mean=[0.5] * 3, std=[0.25] * 3)
    images = torch.rand(5, 3, 2, 2)
    assert torch.equal(plain(images), net(images))
    assert torch.allclose(scaled(images), net((images - 0.5) / 0.25))
    assert plain.spec.num_classes == 3
    assert plain.spec.token_policy == "mask"
    assert weights_digest(plain) != weights_digest(scaled)
    with torch.no_grad():
        before = weights_digest(plain)
        net[1].bias += 1
    assert weights_digest(plain) != before


def test_a_folder_is_loaded_with_or_without_its_training(models, test_split):
    inside, outside = (api.load_model(p) for p in (models["main"] / "model", str(models["main"])))
    assert torch.equal(inside(test_split.pixels()), outside(test_split.pixels()))
    with pytest.raises(CasemateError, match="image_size: 8 does not apply to a model folder"):
        api.load_model(models["main"], image_size=8)


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (nn.Flatten(), {}, "image_size: is missing"),
        (nn.Identity(), {"image_size": 4}, r"returned \(1, 3, 4, 4\) for one image"),
        (nn.Flatten(), {"image_size": 2, "num_classes": 9}, r"not \(1, 9\) logits"),
    ],
)
def test_what_is_not_a_classifier_is_refused(net, options, message):
    with pytest.raises(CasemateError, match=message):
        api.load_model(net, **options)


# Attacks


def test_attacks_stay_in_their_budget_and_their_table_says_what_broke(models, test_split):
    model = api.load_model(models["main"])
    report = api.attack(
        model, test_split.images, test_split.labels, eps=EPS, attacks="pgd-10,apgd-ce-20"
    )
    table, x = report.table, test_split.pixels()
    assert float((report.x_adv - x).abs().max()) <= EPS + 1e-6
    with torch.no_grad():
        wrong = model(report.x_adv).argmax(dim=1) != test_split.labels
    assert (~wrong).tolist() == table["robust"].tolist()
    assert report.robust_accuracy.value == table["robust"].mean()
    assert report.clean_accuracy.num_items == NUM_ITEMS
    assert sum(report.broken_by.values()) == table["broken_by"].notna().sum()
    assert report.robust_accuracy.low <= report.robust_accuracy.value <= report.robust_accuracy.high
    assert not report.warnings


def test_attacks_give_the_items_that_the_stage_gives(models, prepared, test_split, tmp_path):
    recipe = parse(
        {"name": "x", "seed": 5, "data": {"source": "digits"}, "train": {},
         "attack": {"a": {"eps": EPS, "num_items": NUM_ITEMS, "sanity": None,
                          "attacks": [{"kind": "pgd", "num_steps": 10}, {"kind": "square",
                                                                         "num_queries": 50}]}}},
        source="x",
    )  # fmt: skip
    inputs = {"prepare": prepared, "train.main": models["main"]}
    out = StageDir(tmp_path, "attack.a", "f" * 64, FakeRun(), inputs)
    with mock.patch.object(attack_stage, "run_units", InProcess()):
        attack_stage.run(recipe, inputs, out)
    stored = pq.read_table(tmp_path / "attacks.parquet").to_pandas().set_index("item_id")
    report = api.attack(
        api.load_model(models["main"]), test_split.images, test_split.labels, eps=EPS,
        attacks=[PgdSettings(num_steps=10), {"kind": "square", "num_queries": 50}], seed=5,
        item_ids=test_split.item_ids,
    )  # fmt: skip
    found = report.table.set_index("item_id").loc[stored.index]
    for column in ("label", "clean_prediction", "adversarial_prediction", "num_evaluations"):
        assert found[column].tolist() == stored[column].tolist(), column


def test_weak_attacks_are_named(own, test_split):
    with pytest.warns(UserWarning, match="fgsm alone overstates robustness"):
        report = api.attack(
            own, test_split.images, test_split.labels, eps="8/255", attacks=FgsmSettings()
        )
    with pytest.warns(UserWarning, match="steps overstate robustness"):
        api.attack(own, test_split.images, test_split.labels, eps="8/255", attacks="pgd-2")
    assert report.warnings
    assert report.eps == 8 / 255


def test_own_networks_keep_their_mode_and_their_gradients(own, test_split):
    own.net.train()
    with warnings.catch_warnings(action="ignore"):
        api.attack(own, test_split.images, test_split.labels, eps=0.01, attacks="pgd-10")
    api.certify_patch(own, test_split.images, test_split.labels, patch_sizes=[1], band=4)
    assert own.net.dropout.training
    assert all(p.requires_grad and p.grad is None for p in own.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attacks": "pdg-20"}, "attacks: pdg-20 is not an attack"),
        ({"attacks": [{"kind": "pgd", "steps": 3}]}, "attack: attacks.0.steps"),
        ({"norm": "l3"}, "attack: norm"),
        ({"eps": 8}, "attack: eps: 8 is outside"),
        ({"eps": None}, "attack: eps"),
        ({"images": torch.full((1, 1, 8, 8), 2.0)}, r"neither uint8 nor floats in \[0, 1\]"),
        ({"images": torch.zeros(1, 8, 8)}, "are not .items x channels x height x width"),
        ({"labels": torch.tensor([10])}, "labels: 10 is not a class; the model has 10"),
        ({"labels": torch.tensor([0.5])}, "are not 1 class numbers"),
    ],
)
def test_wrong_arguments_are_named(own, changes, message):
    arguments = {"images": torch.zeros(1, 1, 8, 8), "labels": torch.tensor([1]), "eps": 0.1}
    with pytest.raises(CasemateError, match=message):
        api.attack(own, **{**arguments, **changes})


# Certificates


def stage_votes(section, *, prepared, models, folder):
    recipe = parse(
        {"name": "x", "seed": 5, "data": {"source": "digits"}, "train": {},
         "certify": {"p": {"num_items": NUM_ITEMS, **section}}},
        source="x",
    )  # fmt: skip
    inputs = {"prepare": prepared, "train.main": models["main"]}
    out = StageDir(folder, "certify.p", "f" * 64, FakeRun(), inputs)
    with (
        mock.patch.object(certify, "run_units", InProcess()),
        mock.patch.object(certify.results, "publish"),
    ):
        certify.run(recipe, inputs, out)
    return folder


KINDS = {
    "columns": {"band": 3, "stride": 2, "patch_sizes": [1, 2]},
    "both": {"band": 4, "patch_sizes": [1], "stop_early": True, "micro_batch": 3},
    "double_masking": {"mask_patch": 2, "num_masks": 2, "patch_sizes": [1, 2]},
    "gaussian": {"sigma": 0.25, "num_estimate": 150, "radii": [0.1], "block_size": 100,
                 "micro_batch": 50},
    "sequential": {"sigma": 0.25, "num_estimate": 400, "radii": [0.1], "block_size": 100,
                   "micro_batch": 50, "method": "sequential"},
}  # fmt: skip


@pytest.mark.parametrize("case", KINDS)
def test_votes_are_those_of_the_stage_byte_by_byte(case, prepared, models, tmp_path):
    kind = "gaussian" if case == "sequential" else case
    theirs = stage_votes(
        {"kind": kind, **KINDS[case]}, prepared=prepared, models=models, folder=tmp_path / "stage"
    )
    model, out = api.load_model(models["main"]), tmp_path / "api"
    if kind == "gaussian":
        made = api.certify_l2(model, prepared, out=out, seed=5, num_items=NUM_ITEMS, **KINDS[case])
    else:
        made = api.certify_patch(
            model, prepared, kind=kind, out=out, num_items=NUM_ITEMS, **KINDS[case]
        )
    stage, own = (read_votes(place / "votes.parquet") for place in (theirs, out))
    for ours, other in zip(own.items(), stage.items(), strict=True):
        assert (ours.item_id, ours.label) == (other.item_id, other.label)
        assert ours.image_sha256 == other.image_sha256
        assert ours.streams.keys() == other.streams.keys()
        for name, votes in ours.streams.items():
            assert np.array_equal(votes, other.streams[name])
    assert {**own.header.to_dict(), "run_id": ""} == {**stage.header.to_dict(), "run_id": ""}
    stage_bytes, own_bytes = ((p / "certificates.parquet").read_bytes() for p in (theirs, out))
    assert own_bytes == stage_bytes
    assert made.document.summary == json.loads((theirs / "certificate.json").read_text())["summary"]
    assert api.verify(out, resample=2, model=models["main"] / "model", data=prepared).ok


def test_the_same_request_gives_the_same_bytes(own, test_split, tmp_path):
    for name in ("a", "b"):
        api.certify_l2(
            own, test_split.pixels(), test_split.labels, sigma=0.25, num_estimate=100,
            radii=[0.1], out=tmp_path / name,
        )  # fmt: skip
    for file in ("votes.parquet", "certificates.parquet", "certificate.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_own_networks_are_certified_and_verified(own, test_split):
    made = api.certify_patch(
        own, test_split.images, test_split.labels, patch_sizes=[1, 2], band=4,
        item_ids=test_split.item_ids,
    )  # fmt: skip
    assert made.sound
    assert sorted(made.table["item_id"]) == sorted(test_split.item_ids)
    assert made.accuracy_at(1).value >= made.accuracy_at(2).value
    assert made.standard_accuracy.num_items == NUM_ITEMS
    assert api.verify(made.folder, resample=3, model=own, data=made.data).ok
    again = api.load_certificate(made.folder / "certificate.json")
    assert again.document == made.document
    with pytest.raises(CasemateError, match="budget: 3 is not claimed; choose one of 1, 2"):
        made.accuracy_at(3)
    with torch.no_grad():
        own.net.head.bias += 1
    with pytest.raises(CasemateError, match="verify --model: as given has digest"):
        api.verify(made.folder, resample=1, model=own, data=made.data)


def test_verify_counts_what_the_manifest_lists(own, test_split, tmp_path):
    made = api.certify_patch(
        own, test_split.images, test_split.labels, patch_sizes=[1], band=4, out=tmp_path / "c"
    )
    digest = {"sha256": "0" * 64, "bytes": 1}
    (made.folder / "manifest.json").write_text(json.dumps({"files": {"votes.parquet": digest}}))
    report = api.verify(made.folder)
    assert report.problems == ["votes.parquet: is not the file that manifest.json lists"]
    assert not report.ok


def test_certificates_are_derived_again_and_exported(own, test_split, tmp_path):
    made = api.certify_l2(
        own, test_split.images, test_split.labels, sigma=0.25, num_estimate=100, radii=[0.1],
        out=tmp_path / "l2",
    )  # fmt: skip
    again = api.recertify(made.folder, failure_prob=0.01)
    assert again.folder == tmp_path / "l2-recertified"
    assert again.accuracy_at(0.1).value >= made.accuracy_at(0.1).value
    assert api.verify(again.folder).ok
    written = api.export_tsv(made.folder)
    assert written == (tmp_path / "l2.tsv", NUM_ITEMS)
    assert len(written.path.read_text().splitlines()) == NUM_ITEMS + 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"images": torch.rand(2, 1, 8, 8)}, CasemateError, "lie between the 256 levels"),
        ({"labels": None}, CasemateError, "labels: None is missing"),
        ({"band": 9}, CasemateError, "is larger than the image"),
        ({"band": None}, CasemateError, "certify.band: None is needed"),
        ({"patch_sizes": []}, CasemateError, "certify: patch_sizes: .. needs 1 or more entries"),
        ({"challenge": {}}, CasemateError, "challenge: {} belongs to recipes"),
        ({"stridde": 2}, CasemateError, "certify: stridde: 2 is unknown; did you mean 'stride'"),
        ({"patch_sizes": 2}, CasemateError, "certify: patch_sizes: 2 is not a list"),
        ({"patch_sizes": [0]}, CasemateError, r"^certify: patch_sizes.0: 0 must be at least 1$"),
        ({"kind": "hexagon"}, CasemateError, "certify: kind: 'hexagon' is unknown; "),
        ({"out": __file__}, CasemateError, "out: .* is a file; name a folder"),
        ({"labels": ["a", "b"]}, CasemateError, "labels: .* are not 2 class numbers"),
        ({"item_ids": ["a", "a"]}, CasemateError, "item_ids: 2 must be unique"),
        ({"images": torch.zeros(2, 3, 8, 8)}, CasemateError, "3x8x8"),
    ],
)
def test_wrong_certificates_are_refused(own, changes, error, message):
    arguments = {
        "images": torch.zeros(2, 1, 8, 8), "labels": torch.tensor([1, 2]), "patch_sizes": [1],
        "band": 4,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        api.certify_patch(own, **{**arguments, **changes})


# Runs


def test_results_are_read_from_stored_files(prepared, models, tmp_path):
    storage = tmp_path / "storage"
    place = storage / "mine" / "certify.p-ffffffffffff"
    stage_votes(
        {"kind": "columns", **KINDS["columns"]}, prepared=prepared, models=models, folder=place
    )
    inputs = {"prepare": prepared, "train.main": models["main"]}
    run = mock.Mock(run_id="r")
    StageDir(place, "certify.p", "f" * 64, run, inputs).finish()
    (storage / "mine" / "certify.q-eeeeeeeeeeee").mkdir()  # not finished
    table = api.results(storage)
    assert table["what"].tolist() == [
        "smoothed, clean",
        "certified patch 1px",
        "certified patch 2px",
    ]
    assert set(table["recipe"]) == {"mine"}
    assert set(table["model"]) == {"main"}
    made = api.load_certificate(place)
    assert np.isclose(table["value"].iloc[1], made.accuracy_at(1).value)
    assert api.steps(storage)["step"].tolist() == ["certify.p"]


def test_recipes_may_be_names_paths_or_values(tmp_path):
    values = api.load_recipe("demo").resolved()
    assert api.load_recipe(values).resolved() == values
    (tmp_path / "own.yaml").write_text(api.load_recipe("demo").to_yaml())
    assert api.load_recipe(tmp_path / "own.yaml", overrides=["seed=9"]).seed == 9
    assert api.load_recipe(api.load_recipe("demo"), overrides=["seed=9"]).seed == 9
    assert api.lint(values) == api.lint("demo")


def test_run_says_where_everything_is(tmp_path):
    from pipelines.flow import run as flow

    with mock.patch.object(flow, "run_flow", return_value=[]) as ran:
        done = api.run("demo", storage=tmp_path, overrides=["seed=4"], until="train")
    assert ran.call_args.args[0].seed == 4
    assert ran.call_args.kwargs["until"] == "train"
    assert done.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert (done.steps, done.summary, done.report) == ({}, [], None)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (3, {}, "model: 3 is neither an nn.Module nor the name of a model: a model folder"),
        (Own(), {"image_size": 9}, "model: Own fails on an image of 1x9x9: mat1 and mat2"),
        (Own(), {"image_size": 0}, "image_size: 0 is not a whole number from 1 to 4096"),
        (Own(), {"channels": 0}, "channels: 0 is not a whole number above 0"),
        (Own(), {"mean": 0.5}, "mean: 0.5 needs 1 numbers, one per channel"),
        (Own(), {"mean": [123.7]}, "mean: .123.7. is outside .0, 1.; pixels are fractions of full"),
        (Own(), {"mean": ["a"]}, "mean: .'a'. needs 1 numbers, one per channel"),
        (Own(), {"std": [0]}, "std: .0. must be above 0: images are divided by it"),
        (Own(), {"device": "abacus"}, "device: 'abacus' is not usable here: "),
    ],
)
def test_wrong_models_are_refused(model, options, message):
    with pytest.raises(CasemateError, match=message):
        api.load_model(model, **{"image_size": 8, "channels": 1, **options})


def test_bare_networks_and_files_are_not_models(own):
    images, labels = torch.zeros(2, 1, 8, 8), torch.tensor([1, 2])
    with pytest.raises(CasemateError, match="model: Own is not a loaded model; use"):
        api.attack(own.net, images, labels, eps=0.1)
    with pytest.raises(CasemateError, match="model: Own is not a loaded model; use"):
        api.certify_patch(own.net, images, labels, patch_sizes=[1], band=4)
    with pytest.raises(CasemateError, match="is code; name what builds the network: python:"):
        api.load_model(__file__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attacks": 3}, "attacks: 3 is not a list of attacks"),
        ({"attacks": ["pdg-20"]}, "attacks: pdg-20 is not an attack"),
        ({"item_ids": ["a", "a"]}, "item_ids: 2 must be unique"),
        ({"item_ids": ["a"]}, "item_ids: 1 ids for 2 images; give one per image"),
        ({"seed": -1}, "seed: -1 is not a whole number of at least 0"),
    ],
)
def test_wrong_attacks_are_refused(own, options, message):
    images, labels = torch.zeros(2, 1, 8, 8), torch.tensor([1, 2])
    with pytest.raises(CasemateError, match=message):
        api.attack(own, images, labels, **{"eps": 0.1, "attacks": "pgd-2", **options})


def test_arguments_may_be_written_as_in_recipes(own):
    images, labels = torch.zeros(2, 1, 8, 8), own(torch.zeros(2, 1, 8, 8)).argmax(dim=1)
    named = api.attack(own, images, labels, eps=0.1, attacks=["fgsm", {"kind": "pgd"}])
    assert list(named.attacks["attack"]) == ["fgsm", "pgd-20-ce"]
    numbers = {"num_select": 10, "num_estimate": 100, "radii": (0.1,)}
    written = api.certify_l2(
        own, images, labels, sigma="1/4", sampler={"kind": "one-shot"}, **numbers
    )
    same = api.certify_l2(own, images, labels, sigma=0.25, **numbers)
    assert written.document.claim == same.document.claim
    data = {"source": "folder", "path": Path("images")}
    assert api.load_recipe({"name": "x", "data": data}).data.path == "images"
    with pytest.raises(CasemateError, match="recipe: 3 is neither the name or path of a recipe"):
        api.load_recipe(3)
