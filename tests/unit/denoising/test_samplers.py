"""One step, many steps and the ODE, against the true noise, diffusers and an analytic answer."""

import pytest
import torch
from diffusers import DDPMScheduler
from torch import nn

from components.core.errors import CasemateError
from components.core.seeding import DrawSpan
from components.core.settings import SettingError
from components.denoising.classifier import DenoisedClassifier, no_draws
from components.denoising.denoiser import Denoiser, on_schedule
from components.denoising.diffusion import Diffusion
from components.denoising.samplers import Ancestral, Heun, OneShot, draws_of_samples
from components.models.resizing import resized

PREDICTIONS = ("epsilon", "sample", "v_prediction")


class Oracle(nn.Module):
    """Knows the clean image and the level, says what a network of its kind should."""

    def __init__(self, diffusion, clean, abar):
        super().__init__()
        self.diffusion, self.clean, self.abar = diffusion, clean, abar

    def forward(self, noisy, times):
        abar = torch.tensor(self.abar).view(1, 1, 1, 1)
        noise = (noisy - abar.sqrt() * self.clean) / (1 - abar).sqrt()
        return self.diffusion.target(self.clean, noise, abar)


class Fixed(nn.Module):
    """Says the same whatever it sees; remembers the times it was told."""

    def __init__(self, output):
        super().__init__()
        self.output, self.times = output, []

    def forward(self, noisy, times):
        self.times.append(times)
        return self.output


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("sigma", [0.25, 1.0])
def test_the_true_noise_gives_the_image_back(prediction, sigma, normals, no_draws):
    diffusion = Diffusion.named("cosine", 4000, prediction_type=prediction)
    image = normals(2, 3, 4, 4).sigmoid()
    network = Oracle(diffusion, 2 * image - 1, 1 / (1 + 4 * sigma**2))
    denoise = OneShot(denoiser=Denoiser(network, diffusion, channels=3))
    noisy = image + sigma * normals(2, 3, 4, 4, seed=1)
    torch.testing.assert_close(denoise(noisy, sigma, no_draws), image, atol=2e-6, rtol=0)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("variance", ["fixed_small", "learned_range"])
def test_one_shot_equals_the_scheduler_of_diffusers(prediction, variance, normals, no_draws):
    settings = {"prediction_type": prediction, "variance_type": variance}
    diffusion = Diffusion.named("linear", 1000, **settings)
    output = normals(2, 6 if variance == "learned_range" else 3, 4, 4)
    sigma = float(diffusion.schedule.sigmas[259])
    noisy = normals(2, 3, 4, 4, seed=1).sigmoid()
    denoiser = Denoiser(network := Fixed(output), diffusion, channels=3)
    clean = OneShot(denoiser=denoiser)(noisy, sigma, no_draws)
    theirs = DDPMScheduler(num_train_timesteps=1000, **settings)
    expected = theirs.step(output, 259, on_schedule(noisy, sigma)).pred_original_sample
    torch.testing.assert_close(2 * clean - 1, expected, atol=2e-6, rtol=0)
    assert network.times[0].tolist() == pytest.approx([259, 259], abs=1e-4)


@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large", "learned_range"])
def test_an_ancestral_step_equals_that_of_diffusers(variance, normals, monkeypatch):
    settings = {"variance_type": variance, "prediction_type": "epsilon"}
    diffusion = Diffusion.named("linear", 1000, **settings)
    output = normals(2, 6 if variance == "learned_range" else 3, 4, 4) / 2
    sampler = Ancestral(denoiser=Denoiser(Fixed(output), diffusion, channels=3))
    abar = diffusion.schedule.alphas_cumprod
    u, noise = normals(2, 3, 4, 4, seed=1), normals(2, 3, 4, 4, seed=2)
    own = sampler._step(u, abar[200], abar[199], 200.0, 0, lambda step: noise)
    monkeypatch.setattr(
        "diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *args, **kwargs: noise
    )
    theirs = DDPMScheduler(num_train_timesteps=1000, **settings).step(output, 200, u).prev_sample
    torch.testing.assert_close(own, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_heun_converges_to_the_flow_of_a_gaussian(prediction, gaussian_denoiser, normals, no_draws):
    # z(s) = m + (z - m) sqrt((v + s^2) / (v + smax^2)) solves dz/ds = (z - D) / s
    denoiser = gaussian_denoiser(prediction_type=prediction)
    sigma, mean, variance = 0.5, 0.2, 0.09
    noisy = normals(1, 1, 8, 8).sigmoid() + sigma * normals(1, 1, 8, 8, seed=1)
    flow = mean + (2 * noisy - 1 - mean) * (variance / (variance + 4 * sigma**2)) ** 0.5
    errors = [
        (2 * Heun(denoiser=denoiser, num_levels=n)(noisy, sigma, no_draws) - 1 - flow)
        .abs()
        .max()
        .item()
        for n in (9, 18, 72)
    ]
    assert errors[1] < 2e-2
    assert errors[0] > 3 * errors[1] > 9 * errors[2]  # second order: a quarter per doubling
    assert errors[2] < 2e-3


def test_heun_visits_the_published_levels(gaussian_denoiser):
    levels = Heun(denoiser=gaussian_denoiser()).levels(1.0)
    assert len(levels) == 18
    assert (levels[0], levels[-1]) == (pytest.approx(2.0), pytest.approx(0.002))
    root = (2 ** (1 / 7) + 5 / 17 * (0.002 ** (1 / 7) - 2 ** (1 / 7))) ** 7
    assert levels[5] == pytest.approx(root)


def test_ancestral_samples_have_the_posterior_of_a_gaussian(gaussian_denoiser, normals):
    # Drawn back from x + noise, u is a sample of N(D, v s^2 / (v + s^2)) up to the step size
    denoiser, sigma = gaussian_denoiser(num_timesteps=400), 0.25
    noisy = torch.full((1, 1, 64, 64), 0.7)
    clean = (
        2 * Ancestral(denoiser=denoiser)(noisy, sigma, lambda i: normals(1, 1, 64, 64, seed=i)) - 1
    )
    best, spread = (0.09 * 0.4 + 0.25 * 0.2) / 0.34, (0.09 * 0.25 / 0.34) ** 0.5
    assert clean.mean().item() == pytest.approx(best, abs=4 * spread / 64)
    assert clean.std().item() == pytest.approx(spread, rel=0.06)


def test_ancestral_starts_at_the_exact_level_and_ends_at_the_first(gaussian_denoiser):
    denoiser = gaussian_denoiser(num_timesteps=4000)
    levels = Ancestral(denoiser=denoiser).levels(0.25)
    assert len(levels) == 1159
    assert levels[0] == (pytest.approx(0.8), pytest.approx(1157.513, abs=1e-3))
    assert [t for _, t in levels[1:3]] == [1157.0, 1156.0]
    assert levels[-1][1] == 0
    few = Ancestral(denoiser=denoiser, num_steps=5).levels(0.25)
    assert [round(t) for _, t in few] == [1158, 1157, 771, 386, 0]
    assert len(Ancestral(denoiser=denoiser, num_steps=1).levels(0.25)) == 1  # the same as one shot
    assert Ancestral(denoiser=denoiser, start="reference").levels(0.25) == levels[1:]


def test_draws_belong_to_samples_and_streams():
    whole, part, other = (
        draws_of_samples(DrawSpan(1, s, "a", a, b), shape=(1, 2, 2))
        for s, a, b in (("estimate", 0, 6), ("estimate", 2, 4), ("select", 2, 4))
    )
    assert torch.equal(whole(3)[2:4], part(3))
    assert not torch.equal(part(3), other(3))  # what chooses a class is not what bounds it
    assert not torch.equal(part(3), part(4))
    assert not torch.equal(whole(3)[0], whole(3)[1])


def test_networks_that_know_whole_timesteps_alone(normals, no_draws):
    network = Fixed(normals(1, 1, 2, 2))
    diffusion = Diffusion.named("linear", 1000)
    denoiser = Denoiser(network, diffusion, channels=1, takes_fractions=False)
    OneShot(denoiser=denoiser)(normals(1, 1, 2, 2), 0.25, no_draws)
    assert network.times[0].tolist() == [145]
    assert network.times[0].dtype == torch.int64


def test_a_classifier_behind_a_denoiser(toy_classifier, gaussian_denoiser, normals):
    classifier = toy_classifier(channels=1, image_size=8)
    denoiser = gaussian_denoiser()
    model = DenoisedClassifier(OneShot(denoiser=denoiser), classifier, image_size=4, sigma=0.5)
    noisy = normals(2, 1, 4, 4)
    clean = OneShot(denoiser=denoiser)(noisy, 0.5, no_draws)
    assert torch.equal(model(noisy), classifier(resized(clean, 8)))
    random = DenoisedClassifier(Ancestral(denoiser=denoiser), classifier, image_size=4, sigma=0.5)
    with pytest.raises(ValueError, match="needs draws"):
        random(noisy)


@pytest.mark.parametrize(
    ("channels", "image_size", "sigma", "message"),
    [
        (3, 8, 0.5, r"^denoiser: 1 input channels, but the images of the classifier have 3$"),
        (1, 6, 0.5, r"^image side: 6 is not a multiple of 4"),
        (1, 8, 1e6, r"^sigma: 1000000\.0 is outside the denoiser's schedule"),
    ],
)
def test_pairs_that_do_not_fit(toy_classifier, channels, image_size, sigma, message):
    diffusion = Diffusion.named("cosine", 1000)
    denoiser = Denoiser(nn.Identity(), diffusion, channels=1, stride=4)
    classifier = toy_classifier(channels=channels, image_size=8)
    with pytest.raises(CasemateError, match=message):
        DenoisedClassifier(
            OneShot(denoiser=denoiser), classifier, image_size=image_size, sigma=sigma
        )


def test_settings_that_no_sampler_has(gaussian_denoiser):
    denoiser = gaussian_denoiser(variance_type="learned")
    with pytest.raises(CasemateError, match="variance_type: learned is not supported"):
        Ancestral(denoiser=denoiser)
    with pytest.raises(SettingError, match="start: sideways"):
        Ancestral(denoiser=gaussian_denoiser(), start="sideways")
    with pytest.raises(SettingError, match="num_steps: 0"):
        Ancestral(denoiser=gaussian_denoiser(), num_steps=0)
    with pytest.raises(SettingError, match="num_levels: 1"):
        Heun(denoiser=gaussian_denoiser(), num_levels=1)
    with pytest.raises(CasemateError, match=r"sigma: 0\.0005 is not above"):
        Heun(denoiser=gaussian_denoiser()).levels(0.0005)


def test_a_variance_that_the_network_does_not_say_is_refused(normals):
    diffusion = Diffusion.named("linear", 1000, variance_type="learned_range")
    sampler = Ancestral(
        denoiser=Denoiser(Fixed(normals(2, 3, 4, 4)), diffusion, channels=3), num_steps=3
    )
    with pytest.raises(CasemateError, match=r"learned_range needs a network that predicts it"):
        sampler(normals(2, 3, 4, 4), 0.25, lambda step: normals(2, 3, 4, 4))
