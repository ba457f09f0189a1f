"""Noise levels, noise prediction, and classifiers behind a frozen denoiser."""

import math

import pytest
import torch
from torch import nn

from components.core.errors import CasemateError
from components.train.objectives.denoiser import DenoiserTraining, sigmas_of, timesteps_of
from components.train.objectives.noise import DenoisedFineTuning, GaussianNoise
from components.train.session import initial_model


def cosine_schedule(num_steps: int) -> torch.Tensor:
    """Nichol & Dhariwal 2021, eq. 17, with betas clipped at 0.999, in float64."""

    def level(share: float) -> float:
        return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2

    pairs = [(level((t + 1) / num_steps), level(t / num_steps)) for t in range(num_steps)]
    alphas = [max(high / low, 0.001) for high, low in pairs]
    return torch.tensor(alphas, dtype=torch.float64).cumprod(0)


COSINE = cosine_schedule(4000)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (COSINE, [1158, 1984, 2809]),
        (cosine_schedule(1000), [289, 496, 702]),
        ((1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0), [145, 259, 396]),
    ],
)
def test_timesteps_of_the_published_sigmas(schedule, expected):
    wanted = torch.tensor([0.25, 0.5, 1.0])
    found = timesteps_of(wanted, schedule)
    assert found.tolist() == expected
    levels = sigmas_of(schedule)
    assert (levels[found] >= wanted).all()
    assert (levels[found - 1] < wanted).all()
    abar = schedule[found]
    torch.testing.assert_close((1 - abar) / abar, (2 * levels[found]) ** 2)


@pytest.mark.parametrize(
    ("settings", "first", "last", "count"),
    [
        ({"sigmas": (0.25,)}, 1158, 1158, 1),
        ({"sigmas": (1.0, 0.25, 0.5)}, 1158, 2809, 3),
        ({"interval": (0.0, 0.25)}, 0, 1158, 1159),
        ({"interval": (0.0, 1.0), "sampling": "timestep"}, 0, 2809, 2810),
        ({}, 0, 3999, 4000),
    ],
)
def test_training_meets_the_allowed_levels_alone(new_batch, settings, first, last, count):
    objective = DenoiserTraining(COSINE, **settings)
    allowed = objective.allowed()
    assert (int(allowed[0]), int(allowed[-1]), len(allowed)) == (first, last, count)
    draws = torch.cat([objective.timesteps(new_batch(epoch=e), "t") for e in range(20)])
    assert torch.isin(draws, allowed).all()
    if count > 3:
        share = (sigmas_of(COSINE)[draws] if settings.get("interval") else draws / last).double()
        assert len(draws.unique()) > 100
        if settings.get("sampling", "sigma") == "sigma":  # uniform in sigma, 440 draws
            top = settings["interval"][1] if settings.get("interval") else 1.0
            assert share.mean().item() == pytest.approx(top / 2, rel=0.15)
        else:
            assert draws.double().mean().item() == pytest.approx(last / 2, rel=0.15)


def test_noise_belongs_to_items(new_batch):
    objective = DenoiserTraining(COSINE, interval=(0.0, 1.0))
    whole, part = (objective.timesteps(new_batch(r), "t") for r in (slice(None), slice(3, 7)))
    assert torch.equal(part, whole[3:7])


def test_loss_of_a_perfect_and_of_an_ignorant_denoiser(new_batch):
    objective, batch = DenoiserTraining(COSINE, sigmas=(0.5,)), new_batch()
    seen = {}

    def perfect(noisy, timesteps):
        seen["timesteps"] = timesteps
        abar = COSINE[timesteps].view(-1, 1, 1, 1)
        return ((noisy - abar.sqrt() * (2 * batch.images - 1)) / (1 - abar).sqrt()).float()

    def ignorant(noisy, timesteps):
        seen["noise"] = perfect(noisy, timesteps)
        return torch.zeros_like(noisy)

    assert objective.loss(perfect, batch).item() < 1e-10
    assert seen["timesteps"].tolist() == [1984] * 22  # always fed to the network
    expected = objective.loss(ignorant, batch)
    torch.testing.assert_close(expected, seen["noise"].square().mean())
    # on the [0, 1] scale the added noise has the standard deviation that was asked for
    shown = seen["noise"] * (1 - COSINE[1984]).sqrt() / COSINE[1984].sqrt() / 2
    assert shown.std().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigmas": (0.25,), "interval": (0.0, 1.0)}, r"denoiser\.sigmas: .* choose one"),
        ({"interval": (0.5, 0.25)}, r"denoiser\.interval"),
        ({"sigmas": (1e6,)}, r"denoiser\.sigma: 1000000\.0 is beyond the schedule"),
        ({"sampling": "t"}, r"denoiser\.sampling: t is unknown"),
    ],
)
def test_impossible_ranges(settings, message):
    with pytest.raises(CasemateError, match=message):
        DenoiserTraining(COSINE, **settings)


def test_the_classifier_sees_what_the_denoiser_makes_of_the_noise(toy_spec, new_batch):
    model, denoiser, noted = initial_model(toy_spec, seed=0), nn.Conv2d(1, 1, 3, padding=1), []

    def denoise(images, sigma, generator):
        noted.append((images, sigma, generator.initial_seed()))
        return denoiser(images)

    objective, batch = DenoisedFineTuning(denoise, 0.25), new_batch()
    out = objective.loss(model, model, batch)
    out.loss.backward()
    assert denoiser.weight.grad is None  # frozen: no gradient enters
    assert model.net.head.weight.grad is not None
    noisy, sigma, seed = noted[0]
    assert sigma == 0.25
    assert torch.equal(noisy, GaussianNoise(0.25)._noisy(batch, "noise"))
    torch.testing.assert_close(out.logits, model(denoiser(noisy)).detach())
    objective.validation_logits(model, batch)
    objective.loss(model, model, new_batch(epoch=1))
    assert not torch.equal(noted[1][0], noisy)
    assert not torch.equal(noted[2][0], noisy)  # fresh in every epoch
    assert len({entry[2] for entry in noted}) == 3
    assert seed == noted[0][2]
