"""`casemate import-weights` as a user calls it: a model folder and a report, or one line."""

import json

import pytest
import torch

from components.denoising.loading import load_denoiser
from components.models.checkpoint import load_model
from components.models.zoo import build_network
from tests.e2e.cli import TINY, call, step_folder, tiny_recipe
from tests.unit.denoising.guided_unet import GuidedUNet

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
        ((*STATISTICS, "--option", "drop_path_rate=7"), ["drop_path_rate: 7 is not a rate"]),
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


@pytest.mark.parametrize("place", ["afile", "afile/sub"])
def test_a_file_is_no_place_for_a_model(tmp_path, arguments, place):
    (tmp_path / "afile").touch()
    told = call(*arguments, *STATISTICS, "--out", tmp_path / place)
    assert told.code == 2
    assert len(told.err.splitlines()) == 1
    assert "--out:" in told.err
    assert "afile is a file" in told.err


def test_blocks_that_would_be_cut_off_are_told(tmp_path, arguments):
    deep = build_network(
        "tiny_vit", image_size=16, channels=3, num_classes=4, options={**OPTIONS, "depth": 2}
    )
    torch.save(deep.state_dict(), arguments[1])
    told = call(*arguments, *STATISTICS)
    assert told.code == 2
    reason, *keys, rest = told.err.splitlines()
    assert "hold blocks.1.norm1.weight" in reason
    assert keys[0] == "unused     blocks.1.norm1.weight"
    assert len(keys) == 10
    assert rest.strip() == "and 2 more (--json lists all)"
    assert not (tmp_path / "model").exists()
    cut = call(*arguments, *STATISTICS, "--allow-unused", "blocks.1.*")
    assert cut.code == 0, cut.err
    assert "ignored    blocks.1.norm1.weight" in cut.out


@pytest.fixture
def diffusion_file(tmp_path):
    torch.manual_seed(0)
    file = tmp_path / "ema.pt"
    torch.save(GuidedUNet(width=32, mults=(1, 1), attends=(False, True)).state_dict(), file)
    return file


def test_a_diffusion_model_becomes_a_denoiser(tmp_path, diffusion_file):
    levels = ("--schedule", "cosine", "--timesteps", 4000, "--rescaled-time", "--head-width", 16)
    place = ("--architecture", "unet", "--image-size", 16, "--out", tmp_path / "out")
    told = call("import-weights", diffusion_file, *place, *levels, "--json")
    assert told.code == 0, told.err
    assert told.json["report"]["complete"]
    assert told.json["layout"] == "guided-diffusion"
    assert told.json["attention"] == [{"channels": 32, "num_heads": 2, "head_width": 16}]
    denoiser = load_denoiser(f"model:{tmp_path / 'out'}")
    assert denoiser.diffusion.time_scale == 0.25
    assert denoiser.timestep(0.5) == pytest.approx(1157.513, abs=1e-3)


def test_the_heads_of_a_denoiser_are_printed(tmp_path, diffusion_file):
    place = ("--architecture", "unet", "--image-size", 16, "--out", tmp_path / "out")
    told = call("import-weights", diffusion_file, *place, "--num-heads", 4)
    assert told.code == 0, told.err
    assert "attention  heads x width: 4 x 8 at 32 channels\n" in told.out
    wide = tmp_path / "wide.pt"
    torch.save(GuidedUNet(width=64, mults=(1,), attends=(True,)).state_dict(), wide)
    told = call("import-weights", wide, *place[:-1], tmp_path / "wide")
    assert told.code == 0, told.err
    assert "attention  heads x width: 1 x 64 at 64 channels (assumed; " in told.out


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--architecture", "unet", "--head-width", 8, "--num-heads", 4), "--num-heads: 4 and --"),
        (("--architecture", "tiny_vit", "--num-heads", 4), "--num-heads: 4 is for denoisers only"),
        (("--architecture", "unet", "--mean", "0,0,0"), "--mean: 0,0,0 is not used for a denoiser"),
        (("--architecture", "unet", "--head-width", 7), "--head-width: 7 does not divide 32"),
        (("--architecture", "unet", "--head-width", 16, "--schedule", "odd"), "odd is unknown"),
        (
            ("--architecture", "tiny_vit", "--timesteps", 10),
            "--timesteps: 10 is for denoisers only",
        ),
    ],
)
def test_mistakes_about_denoisers_take_one_line(tmp_path, diffusion_file, extra, words):
    told = call("import-weights", diffusion_file, *extra, "--out", tmp_path / "out")
    assert told.code == 2
    (line,) = told.err.splitlines()
    assert words in line
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("ray_session")
def test_a_relative_folder_starts_a_training(tmp_path, monkeypatch):
    """Digits are 8 x 8 and grey; the model folder is named as the user sees it, from here."""
    monkeypatch.chdir(tmp_path)
    options = TINY["model"]["options"]
    net = build_network("tiny_vit", image_size=8, channels=1, num_classes=10, options=options)
    torch.save(net.state_dict(), "digits.pth")
    given = [part for k, v in options.items() for part in ("--option", f"{k}={v}")]
    place = ("--architecture", "tiny_vit", "--image-size", 8, "--channels", 1, "--out", "parent")
    done = call("import-weights", "digits.pth", *place, *given, "--mean", "0.3", "--std", "0.4")
    assert done.code == 0, done.err
    recipe = tiny_recipe(
        tmp_path / "tiny.yaml",
        data={"source": "digits", "limits": {"train": 128, "val": 32, "test": 16}},
        model={**TINY["model"], "pretrained": "./parent"},
        train={"epochs": 1, "batch_size": 64},
        attack={},
        certify={},
    )
    trained = call("train", recipe, "--storage", "runs")
    assert trained.code == 0, trained.err
    folder = step_folder(tmp_path / "runs", "train.main")
    page = json.loads((folder / "pretrained.json").read_text())
    assert page["report"]["complete"]
    assert len(page["report"]["loaded"]) == len(net.state_dict())
    spec = json.loads((folder / "model" / "model.json").read_text())["spec"]
    assert (spec["mean"], spec["std"]) == ([0.3], [0.4])
