"""Sigma to timestep and back: published vectors, closed form, round trips, rounding upwards."""

import math

import diffusers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.denoising.diffusion import Diffusion
from components.denoising.levels import certain_levels
from components.denoising.schedule import NoiseSchedule, abar_of

SIGMAS = (0.25, 0.5, 1.0)
CONFIGS = {
    "linear": {"beta_schedule": "linear"},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "scaled-linear": {"beta_schedule": "scaled_linear", "beta_start": 8.5e-4, "beta_end": 0.012},
    "trained": {"trained_betas": np.geomspace(1e-4, 0.05, 300).tolist()},
}
CLASSES = (
    "DDPMScheduler",
    "DDIMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerDiscreteScheduler",
)


@pytest.mark.parametrize(
    ("name", "length", "whole", "ratios", "fractional"),
    [
        (
            *("linear", 1000, (145, 259, 396)),
            *((0.503162, 1.004784, 2.000482), (144.154, 258.093, 395.952)),
        ),
        (
            *("cosine", 4000, (1158, 1984, 2809)),
            *((0.500237, 1.000624, 2.000028), (1157.513, 1983.199, 2808.985)),
        ),
        (
            *("cosine", 1000, (289, 496, 702)),
            *((0.500725, 1.002966, 2.003931), (288.629, 495.050, 701.496)),
        ),
    ],
)
def test_timesteps_of_the_published_sigmas(name, length, whole, ratios, fractional):
    schedule = Diffusion.named(name, length).schedule
    found = [schedule.timestep_at_least(sigma) for sigma in SIGMAS]
    assert tuple(found) == whole
    assert schedule.ratios[found] == pytest.approx(ratios, abs=5e-7)
    assert [schedule.timestep(s) for s in SIGMAS] == pytest.approx(fractional, abs=6e-4)


@pytest.mark.parametrize("length", [1000, 4000])
@pytest.mark.parametrize("sigma", [0.05, *SIGMAS, 2.0])
def test_closed_form_of_the_cosine_schedule(length, sigma):
    # abar(share) = cos^2((share + s0) / (1 + s0) * pi / 2) / cos^2(...at 0), solved for the share;
    # entry i of a table made of betas stands at share (i + 1) / T
    top = math.sin(math.pi / (2 + 2 * 0.008))
    share = 1 - 2 * 1.008 * math.asin(top / math.sqrt(1 + 4 * sigma**2)) / math.pi
    schedule = Diffusion.named("cosine", length).schedule
    assert schedule.timestep(sigma) == pytest.approx(length * share - 1, abs=2e-3)


@pytest.mark.parametrize("scheduler", CLASSES)
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trips_for_the_schedulers_of_diffusers(scheduler, name):
    theirs = getattr(diffusers, scheduler)(**CONFIGS[name])
    schedule = Diffusion.from_config(dict(theirs.config)).schedule
    abar = theirs.alphas_cumprod.double().numpy()
    np.testing.assert_allclose(schedule.alphas_cumprod, abar, rtol=2e-4)  # theirs is float32
    for t in (0.5, 3, 100.25, len(schedule) - 1.5):
        assert schedule.timestep(schedule.sigma(t)) == pytest.approx(t, abs=1e-6)
    for sigma in np.geomspace(schedule.sigmas[0] * 1.01, schedule.sigmas[-1] * 0.99, 7):
        assert schedule.sigma(schedule.timestep(sigma)) == pytest.approx(sigma, rel=1e-9)


@given(sigma=st.floats(0.006, 30), length=st.sampled_from([50, 1000]))
def test_rounding_never_understates_the_noise(sigma, length):
    schedule = Diffusion.named("cosine", length).schedule
    if sigma < schedule.sigmas[0]:
        sigma = float(schedule.sigmas[0])
    t = schedule.timestep_at_least(sigma)
    assert schedule.sigmas[t] >= sigma
    assert t == 0 or schedule.sigmas[t - 1] < sigma
    assert t - 1 <= schedule.timestep(sigma) <= t


def test_abar_of_a_level_is_that_of_the_table():
    schedule = Diffusion.named("linear", 1000).schedule
    for t in (0, 145, 999):
        assert abar_of(schedule.sigmas[t]) == pytest.approx(schedule.alphas_cumprod[t], rel=1e-12)


@pytest.mark.parametrize("sigma", [1e-4, 100.0, float("nan"), -1.0])
def test_noise_outside_the_schedule_is_refused(sigma):
    schedule = Diffusion.named("linear", 1000).schedule
    for ask in (schedule.check, schedule.timestep):
        with pytest.raises(CasemateError, match=r"^sigma: .* outside .* from 0\.005 to 78\.7$"):
            ask(sigma)
    if sigma > 1:
        with pytest.raises(CasemateError, match=r"^sigma: 100\.0 is outside"):
            schedule.timestep_at_least(sigma)


def test_a_schedule_that_ends_in_pure_noise():
    schedule = NoiseSchedule(np.array([0.1, 0.5, 1.0]))
    assert np.isinf(schedule.ratios[-1])
    assert schedule.timestep(schedule.sigmas[1]) == pytest.approx(1)
    with pytest.raises(CasemateError, match="betas"):
        NoiseSchedule(np.array([0.1, 1.5]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"beta_schedule": "quadratic"}, r"denoiser\.scheduler: quadratic is unknown"),
        (
            {"beta_schedule": "linear", "prediction_type": "flow"},
            r"denoiser\.scheduler\.prediction_type: flow is unknown",
        ),
        ({"beta_schedule": "linear", "thresholding": True}, r"thresholding: true is not supported"),
        ({"beta_schedule": "linear", "use_flow_sigmas": True}, r"use_flow_sigmas: true"),
        (
            {"_class_name": "EDMEulerScheduler", "sigma_max": 80.0},
            r"denoiser\.scheduler: EDMEulerScheduler has no betas",
        ),
    ],
)
def test_configurations_that_would_be_misread(config, message):
    with pytest.raises(CasemateError, match=message):
        Diffusion.from_config(config)


def test_a_diffusion_survives_its_plain_values():
    made = Diffusion.named("cosine", 50, prediction_type="v_prediction", time_scale=20.0)
    again = Diffusion.from_dict(made.to_dict())
    assert (again.prediction, again.time_scale, again.clip) == ("v_prediction", 20.0, 1.0)
    np.testing.assert_array_equal(again.schedule.betas, made.schedule.betas)
    with pytest.raises(CasemateError, match="quadratic is unknown"):
        Diffusion.named("quadratic", 50)


@pytest.mark.parametrize("name", ["cosine", "linear"])
@pytest.mark.parametrize("num_timesteps", [10, 50, 1000, 4000])
def test_levels_that_are_certain_are_those_of_the_schedule(name, num_timesteps):
    low, high = certain_levels(name, num_timesteps)
    sigmas = Diffusion.named(name, num_timesteps).schedule.sigmas
    assert low == pytest.approx(1.01 * sigmas[0], rel=2e-3)
    assert high == pytest.approx(0.99 * sigmas[-1], rel=2e-3)
    assert certain_levels("pretrained", num_timesteps) is None
