"""Denoisers that do not suit their images or samplers are refused before anything is trained."""

import json
import re

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DModel
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from components.core.errors import CasemateError
from components.denoising.loading import load_denoiser
from pipelines.cli.main import app
from pipelines.recipe import lint
from pipelines.recipe.check import check
from pipelines.recipe.costs import Hardware, Question, rows_of
from pipelines.recipe.facts import Facts
from pipelines.recipe.load import parse
from pipelines.stages.certify.cost import costs_of
from tests.refusals import refusal_of

SECTION = {
    "kind": "gaussian", "sigma": 0.25, "num_select": 6, "num_estimate": 22, "block_size": 8,
    "micro_batch": 4, "num_items": 3, "radii": [0.1], "failure_prob": 0.1,
}  # fmt: skip
ANCESTRAL = {"kind": "ancestral", "num_steps": 3}


@pytest.fixture
def unet(tmp_path):
    """A folder of diffusers, without weights unless asked for: checks read none."""

    def make(*, levels=2, given=1, made=None, variance="fixed_small", weights=False, **changes):
        torch.manual_seed(0)
        shape = {
            "block_out_channels": (8,) * levels, "layers_per_block": 1, "norm_num_groups": 4,
            "down_block_types": ("DownBlock2D",) * levels,
            "up_block_types": ("UpBlock2D",) * levels,
            "in_channels": given, "out_channels": made or given,
        }  # fmt: skip
        net = UNet2DModel(**shape)
        net.save_pretrained(tmp_path / "unet") if weights else net.save_config(tmp_path / "unet")
        DDPMScheduler(variance_type=variance).save_pretrained(tmp_path / "scheduler")
        config = tmp_path / "unet" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
        return f"diffusers:{tmp_path}"

    return make


def certified(source, *, data=None, train=None, **section):
    values = {"name": "x", "data": {"source": "digits", **(data or {})}, "train": train or {}}
    return parse(
        {**values, "certify": {"l2": {**SECTION, "denoiser": source, **section}}}, source="x"
    )


def refusal(recipe):
    """The one line by which `run` and `lint` refuse a recipe."""
    line = refusal_of(check, recipe)
    assert refusal_of(lint.warnings_of, recipe) == line
    assert line.startswith("x: ")
    return line.removeprefix("x: ")


def test_images_that_a_network_cannot_halve(unet):
    source = unet(levels=5)
    wanted = "needs image sides that are multiples of 16; these are 8"
    assert refusal(certified(source)) == f"certify.l2.denoiser: {source} {wanted}"
    behind = {"objective": {"kind": "denoised", "sigma": 0.25, "denoiser": source}}
    training = parse({"name": "x", "data": {"source": "digits"}, "train": behind}, source="x")
    assert refusal(training) == f"train.objective.denoiser: {source} {wanted}"
    check(certified(source, data={"image_size": 16}))
    unknown = certified(source, data={"source": "folder", "path": "somewhere"})
    check(unknown)
    with pytest.raises(CasemateError, match=r"^x: certify\.l2\.denoiser: .* of 16; these are 24"):
        check(unknown, Facts(height=24, width=24, channels=1))  # as prepared
    unet(levels=4)
    check(certified(source))


def test_starting_weights_for_other_sides_and_channels(unet):
    def recipe(**model):
        levels = {"schedule": "linear", "num_timesteps": 1000}
        variant = {
            "objective": {"kind": "denoiser", "range": [0, 0.5], **levels},
            "model": {"architecture": "unet", **model},
        }
        train = {"variants": {"cleaner": variant}}
        return parse({"name": "x", "data": {"source": "digits"}, "train": train}, source="x")

    source, key = unet(levels=5), "train.variants.cleaner.model"
    line = f"{key}.pretrained: {source} needs image sides that are multiples of 16; these are 8"
    assert refusal(recipe(pretrained=source)) == line
    options = {"block_out_channels": [8] * 5, "norm_num_groups": 4, "layers_per_block": 1}
    options |= {f"{way}_block_types": [f"{way.title()}Block2D"] * 5 for way in ("down", "up")}
    assert refusal(recipe(options=options)).startswith(f"{key}.options: ")
    unet(given=3)
    line = f"{key}.pretrained: 3 input channels do not match the images, which have 1"
    assert refusal(recipe(pretrained=source)) == line
    unet()
    check(recipe(pretrained=source))
    gone = "diffusers:nowhere"
    (warning,) = lint.warnings_of(recipe(pretrained=gone))
    assert (warning.key, warning.message) == (f"{key}.pretrained", f"{gone} {lint.ABSENT}")


def test_variances_that_ancestral_sampling_is_not_told(unet):
    source = unet(variance="learned")
    start = f"certify.l2.sampler: ancestral does not fit {source}: variance_type learned"
    assert refusal(certified(source, sampler=ANCESTRAL)).startswith(f"{start} is not supported")
    check(certified(source))  # one step puts nothing back
    unet(variance="learned_range")
    assert refusal(certified(source, sampler=ANCESTRAL)).startswith(
        f"{start}_range needs a network"
    )
    unet(variance="learned_range", made=2)
    check(certified(source, sampler=ANCESTRAL))


def test_channels_are_those_of_the_source(unet):
    source, line = unet(given=3), "certify.l2.denoiser: 3 input channels do not match the images"
    assert refusal(certified(source)) == f"{line}, which have 1"
    check(certified(source, data={"channels": 3}))
    check(certified(source, data={"source": "cifar10", "path": "somewhere"}))
    with pytest.raises(CasemateError, match=r"denoiser: 3 input channels do not match"):
        priced(certified(source))


def test_mistakes_in_a_folder_are_told_by_the_key_that_names_it(unet):
    source = unet(_class_name="UNet2DConditionModel")
    line = refusal(certified(source))
    assert line.startswith(f"certify.l2.denoiser: {source} cannot be used: denoiser: ")
    assert "holds a UNet2DConditionModel" in line
    unet(down_block_types=["NoBlock"] * 2)
    assert "does not describe a UNet2DModel" in refusal(certified(source))


def test_a_folder_elsewhere_is_warned_about():
    absent = certified("diffusers:nowhere/at/all")
    check(absent)
    found = [(warning.key, warning.message) for warning in lint.warnings_of(absent)]
    message = "diffusers:nowhere/at/all is not on this machine: not checked"
    assert found == [("certify.l2.denoiser", message)]
    with pytest.raises(CasemateError, match=r"nowhere/at/all is not .* copy its \.json files"):
        priced(absent)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(unet, tmp_path, value):
    source = unet(weights=True)
    (path,) = (tmp_path / "unet").glob("*.safetensors")
    state = load_file(path)
    state["conv_out.bias"][0] = value
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(CasemateError, match=r"^denoiser: .* holds NaN or infinity in unet\.conv_o"):
        load_denoiser(source)


def priced(recipe, **place):
    usual = {"accelerators": ["A100"], "dtype": "fp32", "num_workers": 1}
    (row,) = rows_of(costs_of(recipe, Question(num_items=3)), Hardware(**{**usual, **place}))
    return row


def test_memory_holds_both_networks(unet):
    source = unet()
    net = load_parameters(source)
    bare, behind = (priced(certified(name))["device_bytes"] for name in (None, source))
    twice = priced(certified(source, micro_batch=8, block_size=8))["device_bytes"]
    bare_twice = priced(certified(None, micro_batch=8, block_size=8))["device_bytes"]
    activations = (twice - behind) - (bare_twice - bare)  # of four images in the denoiser
    assert activations > 4 * 4 * 64 * 8  # at least one map of all channels at full side
    assert behind - bare == 4 * net + activations
    half = priced(certified(source), dtype="fp16")["device_bytes"]
    assert half == pytest.approx(behind / 2)


def load_parameters(source):
    """Number of weights, by diffusers itself."""
    folder = source.removeprefix("diffusers:")
    net = UNet2DModel.from_config(UNet2DModel.load_config(f"{folder}/unet"))
    return sum(p.numel() for p in net.parameters())


def test_memory_of_a_challenge_counts_every_pass(unet):
    """Gradients go through all passes of all its draws: more than a micro-batch of votes holds."""
    source = unet()
    challenge = {"eps": 0.1, "num_items": 1, "num_draws": 4}

    def memory(**section):
        return priced(certified(source, **section))["device_bytes"]

    votes = memory()
    assert memory(sampler=ANCESTRAL) == votes
    assert memory(challenge=challenge) == votes  # as many draws as a micro-batch, one pass each
    more = [memory(challenge=challenge, sampler=ANCESTRAL | {"num_steps": n}) for n in (2, 3)]
    assert more[1] - more[0] == more[0] - votes > 0


def test_draws_of_l2_are_called_draws(unet, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(certified(unet()).to_yaml())
    result = CliRunner().invoke(app, ["estimate", str(path), "--items", "3"])
    assert result.exit_code == 0, result.output
    assert re.search(r"certify\.\S+ +3 +84 draws ", result.output)
