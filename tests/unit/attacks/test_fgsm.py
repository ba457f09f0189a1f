"""The training attack: legal, reproducible, a no-op without budget."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.attacks.gradient import START_OFFSET, sign_ascent

WEIGHT = torch.tensor([[1.0, -2.0, 0.5, 3.0], [-1.0, 1.0, 2.0, -0.5]])


def linear(x):
    return x.flatten(1) @ WEIGHT.T


def run(x, y, *, eps, step_size, num_steps=1, seed=0):
    starts = 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) - 1
    start = x + eps * starts + START_OFFSET
    return sign_ascent(linear, x, y, start=start, eps=eps, step_size=step_size, num_steps=num_steps)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    eps=st.integers(1, 64).map(lambda n: n / 255),
    multiple=st.floats(0, 3),
    num_steps=st.integers(0, 3),
)
def test_inside_ball_and_range_and_deterministic(seed, eps, multiple, num_steps):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, 1, 2, 2, generator=generator).mul(1.4).sub(0.2).clamp(0, 1)
    y, kept = torch.tensor([0, 1, 0]), x.clone()
    settings = {"eps": eps, "step_size": multiple * eps, "num_steps": num_steps, "seed": seed}
    x_adv = run(x, y, **settings)
    assert (x_adv - x).abs().double().max() <= eps
    assert (x_adv.double() - x.double()).abs().max() <= eps
    assert 0 <= x_adv.min() <= x_adv.max() <= 1
    assert torch.equal(x, kept)
    assert torch.equal(x_adv, run(x, y, **settings))


def test_zero_budget_returns_x_without_any_work():
    def forbidden(x):
        raise AssertionError("the model was called")

    x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 1])
    result = sign_ascent(forbidden, x, y, start=x + 1, eps=0.0, step_size=0.1, num_steps=2)
    assert torch.equal(result, x)


def test_the_start_is_uniform_in_the_ball_and_centred():
    """A start drawn around -eps instead of 0 is a known slip; the mean shows it."""
    x = torch.full((64, 1, 2, 2), 0.5)
    delta = (
        run(x, torch.zeros(64, dtype=torch.int64), eps=0.1, step_size=0, num_steps=0) - x
    ) / 0.1
    assert delta.mean().abs() < 0.15  # standard error of 256 uniforms on [-1, 1]: 0.036
    assert delta.min() < -0.9
    assert delta.max() > 0.9
    assert delta.std() == pytest.approx(3**-0.5, abs=0.08)


@pytest.mark.parametrize(("num_steps", "multiple"), [(1, 2.0), (2, 1.0)])
def test_steps_of_two_eps_reach_the_worst_corner_of_a_linear_model(num_steps, multiple):
    x, y = torch.full((6, 1, 2, 2), 0.5), torch.tensor([0, 1] * 3)
    x_adv = run(x, y, eps=0.1, step_size=multiple * 0.1, num_steps=num_steps)
    away = (WEIGHT[1 - y] - WEIGHT[y]).sign().view_as(x)
    torch.testing.assert_close(x_adv, x + 0.1 * away, rtol=0, atol=1e-6)
