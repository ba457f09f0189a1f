"""The smoothed classifier as it answers: agreement with certification, deadlines, coverage."""

import numpy as np
import pytest
import torch

from components.certify.l2.claims import certified_radius
from components.certify.l2.deployed import SmoothedClassifier
from components.core.errors import CasemateError

IMAGE = torch.full((1, 2, 2), 0.5)


def by_brightness(images):
    """Class 1 where the mean pixel is above 0.4: its probability under noise is known."""
    over = images.mean(dim=(1, 2, 3)) - 0.4
    return torch.stack([-over, over], dim=1)


def smoothed(**changes):
    settings = {"sigma": 0.5, "num_select": 20, "num_estimate": 400, "micro_batch": 50}
    return SmoothedClassifier(by_brightness, num_classes=2, **{**settings, **changes})


def test_all_draws_give_the_certified_radius():
    noisy = smoothed(sigma=0.05)
    answer = noisy.certify(IMAGE, seed=1)
    assert (answer.label, answer.abstain, answer.num_draws) == (1, False, 420)
    assert answer.radius == certified_radius(400, 400, sigma=0.05, failure_prob=0.001)
    assert noisy.certify(IMAGE, seed=1) == answer


def test_a_vote_too_close_to_call_abstains():
    answer = smoothed().certify(torch.full((1, 2, 2), 0.4), seed=2)
    assert (answer.label, answer.abstain, answer.radius) == (-1, True, 0.0)


@pytest.mark.parametrize(("ticks", "draws"), [(0, 0), (1, 20), (2, 70), (4, 170), (100, 420)])
def test_a_deadline_ends_the_draws(ticks, draws):
    now = iter(range(1000))
    found = smoothed(sigma=0.05).certify_within(
        IMAGE, seconds=ticks + 1, seed=1, clock=lambda: next(now)
    )
    assert found.num_draws == draws
    assert found.abstain == (draws <= 20)
    whole = smoothed(sigma=0.05).certify(IMAGE, seed=1)
    assert found.radius <= whole.radius
    if draws == 420:
        assert found.radius > 0.85 * whole.radius


@pytest.mark.parametrize(("ticks", "draws"), [(0, 0), (1, 50), (3, 150), (4, 200), (5, 250)])
def test_selecting_draws_keep_the_deadline_too(ticks, draws):
    now = iter(range(1000))
    found = smoothed(sigma=0.05, num_select=200).certify_within(
        IMAGE, seconds=ticks + 1, seed=1, clock=lambda: next(now)
    )
    assert found.num_draws == draws
    assert found.abstain == (draws <= 200)


@pytest.mark.parametrize("draws", [-5, 0, 9])
def test_too_few_draws_to_ever_answer_are_refused(draws):
    with pytest.raises(CasemateError, match="num_estimate"):
        smoothed(num_estimate=draws)


def test_radii_are_true_whenever_the_clock_stops():
    """P(class 1) = Phi(0.1 / (sigma / 2)): the true radius is 0.2, whatever sigma is."""
    rng = np.random.default_rng(0)
    wrong = 0
    for seed in range(200):
        now = iter(range(1000))
        noisy = smoothed(failure_prob=0.1, num_estimate=200, micro_batch=20)
        answer = noisy.certify_within(
            IMAGE, seconds=int(rng.integers(1, 12)), seed=seed, clock=lambda now=now: next(now)
        )
        wrong += answer.radius > 0.2 or answer.label == 0
    assert wrong <= 20  # 10 % of 200 allowed, and the bound is conservative
