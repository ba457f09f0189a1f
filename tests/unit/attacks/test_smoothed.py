"""The l2 attack on smoothed classifiers against the one case with a closed form: linear models.

For f = [w.x + b > 0] the smoothed probability is Phi(d / sigma) with d the signed distance to the
boundary, and sigma * Phi^-1(p) = d is the exact radius (Cohen et al. 2019, sec. 3).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import nn

from components.attacks.smoothed import attack_smoothed_l2

SIGMA = 0.25


def linear_case(seed, *, distance):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(1, 4, 4, generator=generator)
    w /= w.norm()
    image = 0.4 + 0.2 * torch.rand(1, 4, 4, generator=generator)
    bias = distance - float((w * image).sum())

    def signed_distance(x):
        return (x * w).flatten(1).sum(dim=1) + bias

    def logits_of(x):
        score = 4 * signed_distance(x)
        return torch.stack([-score, score], dim=1)

    return image, logits_of, signed_distance


def attack(logits_of, image, label, *, eps, num_steps=8, num_draws=8, step_size=None, seed=0):
    return attack_smoothed_l2(
        logits_of,
        image,
        label,
        eps=eps,
        sigma=SIGMA,
        num_steps=num_steps,
        num_draws=num_draws,
        step_size=eps / 2 if step_size is None else step_size,
        generator=torch.Generator().manual_seed(seed),
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), distance=st.floats(0.02, 0.3))
def test_the_vote_moves_exactly_when_the_radius_allows(seed, distance):
    image, logits_of, signed_distance = linear_case(seed, distance=distance)
    top_prob = norm.cdf(float(signed_distance(image[None])) / SIGMA)
    radius = SIGMA * norm.ppf(top_prob)
    for share, moves in ((0.98, False), (1.02, True)):
        x_adv = attack(logits_of, image, 1, eps=share * radius)
        assert signed_distance(x_adv[None]) < signed_distance(
            image[None]
        )  # whether it breaks or not
        prob = norm.cdf(float(signed_distance(x_adv[None])) / SIGMA)
        assert (prob < 0.5) == moves


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), eps=st.floats(0.001, 3), label=st.integers(0, 1))
def test_inside_ball_and_range_and_deterministic(seed, eps, label):
    image, logits_of, _ = linear_case(seed, distance=0.1)
    kept = image.clone()
    x_adv = attack(logits_of, image, label, eps=eps, seed=seed)
    assert x_adv.shape == image.shape
    assert 0 <= x_adv.min() <= x_adv.max() <= 1
    assert (x_adv - image).norm().double() <= eps
    assert (x_adv.double() - image.double()).norm() <= eps
    assert torch.equal(image, kept)
    assert torch.equal(x_adv, attack(logits_of, image, label, eps=eps, seed=seed))


def test_zero_budget_returns_the_image_without_a_model_call():
    def forbidden(x):
        raise AssertionError("the model was called")

    image = torch.rand(1, 4, 4)
    assert torch.equal(attack(forbidden, image, 0, eps=0.0), image)


def test_the_step_follows_the_logarithm_of_the_mean_probability():
    """Central differences of J written out; the mean of logarithms points elsewhere."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[3].weight.mul_(8)  # confident on some draws, wrong on others
    image = torch.full((1, 2, 2), 0.5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    noise = SIGMA * torch.randn(5, 1, 2, 2, generator=generator, dtype=torch.float64)

    def mean_prob(x):
        return model(x + noise).softmax(dim=1)[:, 2].mean()

    def mean_log(x):
        return model(x + noise).softmax(dim=1)[:, 2].log().mean()

    def slope(value_of):
        shifts = 1e-5 * torch.eye(4, dtype=torch.float64).view(4, 1, 2, 2)
        with torch.no_grad():
            rise = [value_of(image + s) - value_of(image - s) for s in shifts]
        direction = -torch.stack(rise)
        return direction / direction.norm()

    step = attack(model, image, 2, eps=0.1, num_steps=1, num_draws=5, step_size=0.01, seed=7)
    moved = (step - image).flatten() / 0.01
    expected = slope(lambda x: mean_prob(x).log())
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6)
    assert (expected - slope(mean_log)).norm() > 0.05


def test_every_step_sees_fresh_unclamped_noise_of_the_right_size():
    image, logits_of, _ = linear_case(0, distance=0.1)
    batches = []

    def spy(x):
        batches.append(x.detach().clone())
        return logits_of(x)

    attack(spy, image, 1, eps=1e-6, num_steps=3, num_draws=200)
    noise = [batch - image for batch in batches]
    assert [len(batch) for batch in batches] == [200] * 3
    assert (noise[0] - noise[1]).abs().max() > 0.1
    for draws in noise:  # 3,200 normals: standard error of their deviation is 1.25 %
        assert float(draws.std()) == pytest.approx(SIGMA, rel=0.06)
    assert min(float(batch.min()) for batch in batches) < 0
    assert math.isfinite(float(batches[-1].sum()))


def test_at_least_one_draw_is_needed():
    with pytest.raises(ValueError, match="num_draws"):
        attack(lambda x: x.flatten(1), torch.rand(1, 1, 2), 0, eps=0.1, num_draws=0)
