"""Published test vectors of the one-shot estimate and of the deterministic sampler."""

import math

import pytest
import torch
from torch import nn

from components.denoising.denoiser import Denoiser
from components.denoising.diffusion import Diffusion
from components.denoising.samplers import Heun


@pytest.mark.parametrize(
    ("prediction", "at_08", "at_259"),
    [
        ("epsilon", 0.4340169944, 0.4576042),
        ("sample", 0.25, 0.25),
        ("v_prediction", 0.3354101966, 0.1755107),
    ],
)
def test_estimates_of_the_clean_image(prediction, at_08, at_259):
    """x_t = 0.5, network output 0.25; at abar 0.8, and at step 259 of the linear schedule."""
    diffusion = Diffusion.named("linear", 1000, prediction_type=prediction)
    abar = 1 / (1 + 4 * float(diffusion.schedule.sigmas[259]) ** 2)
    assert abar == pytest.approx(0.49761376, abs=1e-7)  # betas come from diffusers in float32
    noisy, output = (torch.full((1, 1, 1, 1), v, dtype=torch.float64) for v in (0.5, 0.25))
    assert diffusion.clean(output, noisy, 0.8).item() == pytest.approx(at_08, abs=6e-11)
    assert diffusion.clean(output, noisy, abar).item() == pytest.approx(at_259, abs=2e-7)


class Shrinking(Denoiser):
    """D(z, s) = 0.25 z / (0.25 + s^2): the best estimate for clean images ~ N(0, 1/4)."""

    def __init__(self):
        nn.Module.__init__(self)
        self.num_calls = 0

    def timestep(self, ratio):
        return ratio

    def estimate(self, noisy, *, abar, timestep):
        self.num_calls += 1
        return noisy / math.sqrt(abar) * 0.25 / (0.25 + timestep**2)


@pytest.mark.parametrize(
    ("top", "value", "exact"),
    [
        (0.5, 0.7083405460, 0.7071068),
        (1.0, 0.4498267762, 0.4472136),
        (2.0, 0.2451355765, 0.2425356),
    ],
)
def test_the_deterministic_sampler(top, value, exact):
    denoiser = Shrinking()
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)  # pixel 1 is z = 1
    z = 2 * Heun(denoiser=denoiser)(one, top / 2, None).item() - 1
    assert z == pytest.approx(value, abs=6e-11)
    assert z == pytest.approx(exact, abs=3e-3)
    assert math.sqrt(0.25 / (0.25 + top**2)) == pytest.approx(exact, abs=6e-8)  # of the ODE
    assert denoiser.num_calls == 35


def test_the_levels_of_the_deterministic_sampler():
    levels = Heun(denoiser=Shrinking()).levels(0.5)
    assert levels[:5] == pytest.approx([1, 0.78146, 0.605205, 0.464185, 0.352322], abs=6e-6)
    assert levels[-2:] == pytest.approx([0.00352, 0.002], abs=6e-6)
