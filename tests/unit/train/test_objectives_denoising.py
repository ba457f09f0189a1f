"""Noise levels of denoiser training, its loss and validation; classifiers behind a denoiser."""

import numpy as np
import pytest
import torch
from torch import nn

from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.denoising.diffusion import Diffusion
from components.denoising.loading import denoiser_of
from components.denoising.samplers import Ancestral, OneShot
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from components.train.objectives.denoiser import DenoiserTraining
from components.train.objectives.noise import DenoisedFineTuning, GaussianNoise
from components.train.objectives.settings import (
    DenoisedTrainingSettings,
    DenoiserTrainingSettings,
    GaussianTrainingSettings,
)
from components.train.session import initial_model

COSINE = Diffusion.named("cosine", 4000)
DENOISED = DenoisedTrainingSettings(sigma=0.25, denoiser="model:any")
GAUSSIAN = GaussianNoise(GaussianTrainingSettings(sigma=0.25), label_smoothing=0.0)
ABAR, SIGMAS = COSINE.schedule.alphas_cumprod, COSINE.schedule.sigmas


def training(diffusion: Diffusion = COSINE, **settings) -> DenoiserTraining:
    return DenoiserTraining(DenoiserTrainingSettings(**settings), diffusion=diffusion)


@pytest.mark.parametrize(
    ("settings", "first", "last", "count"),
    [
        ({"sigmas": (0.25,)}, 1158, 1158, 1),
        ({"sigmas": (1.0, 0.25, 0.5)}, 1158, 2809, 3),
        ({"range": (0.0, 0.25)}, 0, 1158, 1159),
        ({"range": (0.0, 1.0), "sampling": "timestep"}, 0, 2809, 2810),
        ({"full": True}, 0, 3999, 4000),
    ],
)
def test_training_meets_the_allowed_levels_alone(new_batch, settings, first, last, count):
    objective = training(**settings)
    allowed = objective.allowed()
    assert (int(allowed[0]), int(allowed[-1]), len(allowed)) == (first, last, count)
    draws = torch.cat([objective.timesteps(new_batch(epoch=e), "t") for e in range(20)])
    assert torch.isin(draws, allowed).all()
    if count > 3:
        assert len(draws.unique()) > 100
        if settings.get("range") and settings.get("sampling", "sigma") == "sigma":
            mean = SIGMAS[draws.numpy()].mean()  # uniform in sigma, 440 draws
            assert mean == pytest.approx(settings["range"][1] / 2, rel=0.15)
        else:
            assert draws.double().mean().item() == pytest.approx(last / 2, rel=0.15)


def test_noise_belongs_to_items(new_batch):
    objective = training(range=(0.0, 1.0))
    whole, part = (objective.timesteps(new_batch(r), "t") for r in (slice(None), slice(3, 7)))
    assert torch.equal(part, whole[3:7])


class Pretender(nn.Module):
    """A model that is handed the truth: it answers as its kind of network should, times `skill`."""

    def __init__(self, diffusion, images, skill=1.0):
        super().__init__()
        self.diffusion, self.clean, self.skill = diffusion, 2 * images - 1, skill
        self.seen = []

    def forward(self, pixels, visible, times):
        steps = times.double() / self.diffusion.time_scale
        ratios = [2 * self.diffusion.schedule.sigma(t) for t in steps.tolist()]
        abar = torch.tensor([1 / (1 + r**2) for r in ratios]).view(-1, 1, 1, 1)
        noise = (2 * pixels - 1 - abar.sqrt() * self.clean) / (1 - abar).sqrt()
        self.seen.append((times, noise, abar))
        return self.skill * self.diffusion.target(self.clean, noise, abar)


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_loss_of_a_perfect_and_of_an_ignorant_denoiser(new_batch, prediction):
    diffusion = Diffusion.named("cosine", 4000, prediction_type=prediction, time_scale=0.25)
    objective, batch = training(diffusion, sigmas=(0.5,)), new_batch()
    perfect = Pretender(diffusion, batch.images)
    out = objective.loss(perfect, perfect, batch)
    assert out.loss.item() < 1e-8
    assert out.logits is None
    times, noise, abar = perfect.seen[0]
    assert times.tolist() == [496.0] * 22  # timestep 1984, on the scale of the network
    ignorant = objective.loss(Pretender(diffusion, batch.images, skill=0.0), perfect, batch)
    truth = diffusion.target(2 * batch.images - 1, noise, abar)
    torch.testing.assert_close(ignorant.loss, truth.square().mean())
    # on the [0, 1] scale the added noise has the standard deviation that was asked for
    shown = noise * ((1 - abar) / abar).sqrt() / 2
    assert shown.std().item() == pytest.approx(0.5, rel=0.05)


def test_validation_measures_pixels_at_the_trained_levels(new_batch):
    batch = new_batch()
    objective = training(sigmas=(1.0, 0.25))
    assert (objective.validation_metric, objective.lower_is_better) == ("val_mse", True)
    assert objective.validated_at() == (0.25, 1.0)
    assert training(range=(0.0, 0.5)).validated_at() == (0.25, 0.5)
    assert training(full=True).validated_at() == (0.25, 0.5, 1.0)
    perfect = Pretender(COSINE, batch.images)
    assert objective.validation_scores(perfect, batch).max() < 1e-6
    # one that predicts no noise returns the noisy image, clipped to [0, 1]
    ignorant = Pretender(COSINE, batch.images, skill=0.0)
    errors = objective.validation_scores(ignorant, batch)
    assert errors.shape == (22,)
    added = [noise * sigma for sigma, (_, noise, _) in zip((0.25, 1.0), ignorant.seen, strict=True)]
    noisy = [(batch.images + noise).clamp(0, 1) for noise in added]
    expected = [(image - batch.images).square().flatten(1).mean(1) for image in noisy]
    torch.testing.assert_close(errors, torch.stack(expected).mean(0), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigmas": (0.25,), "range": (0.0, 1.0)}, "give exactly one of sigmas"),
        ({"range": (0.5, 0.25)}, "range: .* must rise"),
        ({"sigmas": (1e6,)}, "sigmas: .* is outside"),
        ({"full": True, "sampling": "t"}, "sampling: t is unknown"),
    ],
)
def test_impossible_ranges(settings, message):
    with pytest.raises(SettingError, match=message):
        training(**settings)


def test_levels_beyond_the_schedule():
    short = Diffusion.named("linear", 10)
    with pytest.raises(CasemateError, match=r"sigma: 1\.0 is outside the denoiser's schedule"):
        training(short, sigmas=(1.0,))


def test_the_classifier_sees_what_the_denoiser_makes_of_the_noise(toy_spec, new_batch):
    model, denoiser, noted = initial_model(toy_spec, seed=0), nn.Conv2d(1, 1, 3, padding=1), []

    def denoise(images, sigma, draws):
        noted.append((images, sigma, draws(0), draws(1)))
        return denoiser(images)

    objective, batch = (
        DenoisedFineTuning(DENOISED, denoise=denoise, label_smoothing=0.0),
        new_batch(),
    )
    out = objective.loss(model, model, batch)
    out.loss.backward()
    assert denoiser.weight.grad is None  # frozen: no gradient enters
    assert model.net.head.weight.grad is not None
    noisy, sigma, *_ = noted[0]
    assert sigma == 0.25
    assert torch.equal(noisy, GAUSSIAN.shown(batch, "noise"))
    torch.testing.assert_close(out.logits, model(denoiser(noisy)).detach())
    objective.validation_logits(model, batch)
    objective.loss(model, model, new_batch(epoch=1))
    kinds = [entry[i] for entry in noted for i in (0, 2, 3)]  # noise and draws: all of them fresh
    assert all(not torch.equal(a, b) for n, a in enumerate(kinds) for b in kinds[:n])
    objective.loss(model, model, new_batch(slice(3, 7)))
    assert torch.equal(noted[3][2], noted[0][2][3:7])  # draws belong to items too


def test_tuning_behind_real_samplers(toy_spec, new_batch):
    size, channels = toy_spec.image_size, toy_spec.channels
    half = (0.5,) * channels
    options = {"widths": (4, 4), "norm_groups": 2, "head_width": 4}
    spec = ModelSpec("tiny_unet", 0, channels, size, half, half, options=options)
    denoiser = denoiser_of(PixelModel(spec).net, Diffusion.named("linear", 1000))
    batch = new_batch()
    for sampler in (OneShot(denoiser=denoiser), Ancestral(denoiser=denoiser, num_steps=2)):
        objective = DenoisedFineTuning(DENOISED, denoise=sampler, label_smoothing=0.0)
        images = objective.shown(batch, "noise")
        assert not images.requires_grad
        assert np.isfinite(images.numpy()).all()
        alone = objective.shown(new_batch(slice(3, 7)), "noise")
        torch.testing.assert_close(alone, images[3:7], atol=1e-5, rtol=0)
