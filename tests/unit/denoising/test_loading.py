"""Denoisers on disk: folders of ours and of diffusers, and what cannot be read."""

import json

import pytest
import torch

from components.core.errors import CasemateError
from components.denoising.diffusion import Diffusion
from components.denoising.importing import denoiser_spec
from components.denoising.loading import load_denoiser, save_diffusers, source_digest
from components.denoising.samplers import OneShot
from components.models.checkpoint import save_model
from components.models.pixels import PixelModel

OPTIONS = {"widths": [8, 8], "norm_groups": 4}


@pytest.fixture
def saved(tmp_path):
    """A model folder of a tiny denoiser, made as a training makes it."""

    def make(*, num_timesteps=100, time_scale=1.0, name="ours"):
        diffusion = Diffusion.named("cosine", num_timesteps, time_scale=time_scale)
        spec = denoiser_spec(
            architecture="tiny_unet",
            channels=1,
            image_size=8,
            options=OPTIONS,
            trained_for={"kind": "denoiser"},
            diffusion=diffusion,
        )
        torch.manual_seed(0)
        save_model(tmp_path / name, PixelModel(spec), recipe_digest="none")
        return tmp_path / name

    return make


def test_a_denoiser_survives_both_formats(saved, tmp_path, normals, no_draws):
    ours = load_denoiser(f"model:{saved()}")
    save_diffusers(tmp_path / "theirs", ours)
    theirs = load_denoiser(f"diffusers:{tmp_path / 'theirs'}")
    noisy = normals(2, 1, 8, 8)
    a, b = (OneShot(denoiser=denoiser)(noisy, 0.5, no_draws) for denoiser in (ours, theirs))
    assert torch.equal(a, b)
    assert a.min() >= 0
    assert a.max() <= 1
    assert (ours.channels, ours.stride, ours.takes_fractions) == (1, 2, True)
    assert not any(p.requires_grad for p in ours.parameters())
    # the files side by side, as older folders have them
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in [*(tmp_path / "theirs").glob("*/*")]:
        path.rename(flat / path.name)
    assert torch.equal(
        OneShot(denoiser=load_denoiser(f"diffusers:{flat}"))(noisy, 0.5, no_draws), a
    )


def test_the_network_is_told_fractions_on_its_own_scale(saved, normals):
    plain, scaled = (
        load_denoiser(f"model:{saved(time_scale=s, name=str(s))}") for s in (1.0, 0.25)
    )
    noisy = normals(1, 1, 8, 8)
    assert torch.equal(plain.output(noisy, 10.0), scaled.output(noisy, 40.0))
    between = plain.output(noisy, 10.5)
    assert not torch.equal(between, plain.output(noisy, 10.0))
    assert not torch.equal(between, plain.output(noisy, 11.0))


def test_a_denoiser_follows_its_images_and_knows_their_shape(saved, no_draws):
    denoiser = load_denoiser(f"model:{saved()}")
    assert denoiser.output(torch.zeros(1, 1, 8, 8, device="meta"), 3.0).device.type == "meta"
    with pytest.raises(CasemateError, match=r"denoiser: 1 input channels, but .* have 3"):
        OneShot(denoiser=denoiser)(torch.zeros(1, 3, 8, 8), 0.5, no_draws)
    with pytest.raises(CasemateError, match="image side: 9 is not a multiple of 2"):
        OneShot(denoiser=denoiser)(torch.zeros(1, 1, 9, 8), 0.5, no_draws)


def test_gradients_reach_the_pixels(saved, normals, no_draws):
    denoiser = load_denoiser(f"model:{saved()}")
    noisy = normals(1, 1, 8, 8).requires_grad_()
    OneShot(denoiser=denoiser)(noisy, 0.5, no_draws).sum().backward()
    assert noisy.grad is not None
    assert noisy.grad.abs().max() > 0


def test_digests_name_content(saved, tmp_path):
    folder = saved()
    save_diffusers(tmp_path / "a", load_denoiser(f"model:{folder}"))
    save_diffusers(tmp_path / "b", load_denoiser(f"model:{folder}"))
    one, two = (source_digest(f"diffusers:{tmp_path / name}") for name in "ab")
    assert one == two
    path = tmp_path / "b" / "scheduler" / "scheduler_config.json"
    path.write_text(path.read_text().replace("100", "200"))
    assert source_digest(f"diffusers:{tmp_path / 'b'}") != one
    header = json.loads((folder / "model.json").read_text())
    assert source_digest(f"model:{folder}") == header["digest"]
    assert header["spec"]["trained_for"]["diffusion"]["scheduler"]["num_train_timesteps"] == 100


def test_folders_that_hold_no_denoiser(saved, tmp_path, toy_classifier):
    with pytest.raises(CasemateError, match=r"^denoiser: diffusers:.*nowhere is not a folder"):
        load_denoiser(f"diffusers:{tmp_path / 'nowhere'}")
    save_model(tmp_path / "vit", toy_classifier(channels=1, image_size=8), recipe_digest="none")
    with pytest.raises(CasemateError, match=r"holds a classifier \(tiny_vit\)"):
        load_denoiser(f"model:{tmp_path / 'vit'}")
    folder = tmp_path / "theirs"
    save_diffusers(folder, load_denoiser(f"model:{saved()}"))
    config = folder / "unet" / "config.json"
    values = json.loads(config.read_text())
    for change, message in (
        ({"_class_name": "UNet2DConditionModel"}, "holds a UNet2DConditionModel; only"),
        ({"time_embedding_type": "fourier"}, "variance-exploding"),
        ({"num_class_embeds": 10}, "must not be conditioned on the label"),
        ({"block_out_channels": [8, 16]}, "cannot be loaded"),
    ):
        config.write_text(json.dumps(values | change))
        with pytest.raises(CasemateError, match=message):
            load_denoiser(f"diffusers:{folder}")
    (folder / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(CasemateError, match=r"scheduler_config\.json is missing"):
        load_denoiser(f"diffusers:{folder}")


def test_rescaled_time_has_no_place_in_the_format_of_diffusers(saved, tmp_path):
    denoiser = load_denoiser(f"model:{saved(time_scale=0.25)}")
    with pytest.raises(CasemateError, match=r"time_scale: 0\.25 cannot be written"):
        save_diffusers(tmp_path / "out", denoiser)
