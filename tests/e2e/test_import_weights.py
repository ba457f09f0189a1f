"""`casemate import-weights` as a user calls it: a model folder and a report, or one line."""

import json

import pytest
import torch

from components.models.checkpoint import load_model
from components.models.zoo import build_network
from tests.e2e.cli import call

pytestmark = pytest.mark.e2e
OPTIONS = {"embed_dim": 16, "depth": 1, "num_heads": 2}
STATISTICS = ("--mean", "0,0,0", "--std", "1,1,1")


@pytest.fixture
def network():
    torch.manual_seed(0)
    return build_network(
        "tiny_vit", image_size=16, channels=3, num_classes=4, options=OPTIONS
    ).eval()


@pytest.fixture
def arguments(tmp_path, network):
    file = tmp_path / "deit.pth"
    torch.save({"model": network.state_dict(), "epoch": 1}, file)
    options = [part for k, v in OPTIONS.items() for part in ("--option", f"{k}={v}")]
    place = ("--architecture", "tiny_vit", "--image-size", 16, "--out", tmp_path / "model")
    return ["import-weights", file, *place, *options]


def test_the_written_folder_holds_the_original_network(tmp_path, network, arguments):
    told = call(*arguments, *STATISTICS, "--json")
    assert told.code == 0, told.err
    assert told.json["report"]["complete"]
    assert told.json["entry"] == "model"
    assert len(told.json["report"]["loaded"]) == len(network.state_dict())
    model = load_model(tmp_path / "model")
    assert model.spec.trained_for["imported_from"] == "deit.pth"
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(model(images), network(images))
    again = call(*arguments, *STATISTICS)
    assert again.code == 2
    assert "holds a model already" in again.err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ((), ["--mean: ? is not in", "deit.pth"]),
        (("--mean", "0,0,0"), ["--std: ? is not in"]),
        (("--mean", "a,b", "--std", "1"), ["--mean: a,b is not a comma-separated list"]),
        ((*STATISTICS, "--layout", "hf-vit"), ["--layout: hf-vit does not fit"]),
        ((*STATISTICS, "--token-policy", "keep"), ["--token-policy: keep is not one of"]),
        ((*STATISTICS, "--upsample-mode", "cubic"), ["--upsample-mode: cubic is not one of"]),
        ((*STATISTICS, "--kernel", "nearest"), ["--kernel: nearest is not one of bilinear"]),
        ((*STATISTICS, "--option", "depth"), ["--option: depth is not key=value"]),
        ((*STATISTICS, "--option", "depth=-1"), ["model.options.depth: -1 must be at least 1"]),
        ((*STATISTICS, "--option", "drop_path_rate=7"), ["drop_path_rate: 7 is no rate"]),
        (("--mean", "0,0,0", "--std", "nan,1,1"), ["--std: (nan, 1.0, 1.0) must be finite"]),
    ],
)
def test_mistakes_take_one_line_and_write_nothing(tmp_path, arguments, extra, words):
    told = call(*arguments, *extra)
    assert told.code == 2
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert all(word in line for word in words)
    assert not (tmp_path / "model").exists()


def test_what_does_not_fit_is_reported_key_by_key(tmp_path, arguments):
    told = call(*arguments, *STATISTICS, "--classes", 9, "--json")
    assert told.code == 2
    assert len(told.err.splitlines()) == 1
    report = json.loads(told.out)["report"]
    assert report["mismatched"]["head.weight"] == [[4, 16], [9, 16]]
    assert not (tmp_path / "model").exists()
    fresh = call(*arguments, *STATISTICS, "--classes", 9, "--allow-missing", "head.*")
    assert fresh.code == 0, fresh.err
    assert "fresh      head.weight" in fresh.out
