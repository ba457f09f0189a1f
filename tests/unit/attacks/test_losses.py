"""Losses by hand, by definition and by finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.attacks.gradients import input_gradient
from components.attacks.losses import cross_entropy, dlr, kl_divergence, margin, targeted_dlr
from components.core.errors import CasemateError

LOGITS = torch.tensor([[1.0, 5.0, 3.0, 2.0]])


def label(y):
    return torch.tensor([y])


def random_logits(seed, *, num_items=7, num_classes=5):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_items, num_classes, generator=generator, dtype=torch.float64)
    return 3 * logits, torch.randint(num_classes, (num_items,), generator=generator)


def test_values_by_hand():
    assert margin(LOGITS, label(1)).item() == -2.0
    assert margin(LOGITS, label(0)).item() == 4.0
    assert margin(LOGITS, label(1), kappa=1.0).item() == -1.0
    assert margin(LOGITS, label(1), kappa=3.0).item() == -2.0
    assert dlr(LOGITS, label(1)).item() == pytest.approx(-2 / 3)  # 5 - 2 between first and third
    assert dlr(LOGITS, label(0)).item() == pytest.approx(4 / 3)
    assert targeted_dlr(LOGITS, label(1), label(2)).item() == pytest.approx(-2 / 3.5)
    assert targeted_dlr(LOGITS, label(1), label(0)).item() == pytest.approx(-4 / 3.5)
    log_sum = math.log(sum(math.exp(z) for z in (1, 5, 3, 2)))
    assert cross_entropy(LOGITS, label(2)).item() == pytest.approx(log_sum - 3, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), shift=st.floats(-9, 9), scale=st.floats(0.01, 100))
def test_dlr_sees_no_shift_and_no_scale_and_has_the_sign_of_the_verdict(seed, shift, scale):
    logits, y = random_logits(seed)
    torch.testing.assert_close(dlr(scale * logits + shift, y), dlr(logits, y))
    target = (y + 1) % 5
    moved = targeted_dlr(scale * logits + shift, y, target)
    torch.testing.assert_close(moved, targeted_dlr(logits, y, target))
    wrong = logits.argmax(dim=1) != y
    assert torch.equal(dlr(logits, y) > 0, wrong)
    assert torch.equal(margin(logits, y) > 0, wrong)
    assert (dlr(logits, y) <= 1).logical_or(wrong).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_divergence_is_that_of_the_distributions_and_smallest_at_the_reference(seed):
    logits, _ = random_logits(seed)
    other, _ = random_logits(seed + 1)
    reference = other.softmax(dim=1)
    p, q = (
        torch.distributions.Categorical(reference),
        torch.distributions.Categorical(logits=logits),
    )
    expected = torch.distributions.kl_divergence(p, q)
    torch.testing.assert_close(kl_divergence(logits, reference), expected)
    assert (kl_divergence(logits, reference) >= 0).all()
    assert kl_divergence(other, reference).abs().max() < 1e-12


def test_the_divergence_is_blind_at_its_own_reference():
    x = torch.rand(3, 1, 1, 4, dtype=torch.float64)
    reference = x.flatten(1).softmax(dim=1)
    point = input_gradient(
        lambda z: z.flatten(1), x, torch.zeros(3), loss_of=lambda z, _: kl_divergence(z, reference)
    )
    assert point.gradient.abs().max() < 1e-15


@pytest.mark.parametrize(
    "loss_of", [dlr, lambda z, y: targeted_dlr(z, y, (y + 2) % 5)], ids=["dlr", "targeted"]
)
def test_equal_logits_leave_value_and_gradient_finite(loss_of):
    logits = torch.full((2, 5), 3.0)
    point = input_gradient(
        lambda z: z.flatten(1), logits.view(2, 1, 1, 5), torch.tensor([0, 4]), loss_of=loss_of
    )
    assert point.losses.tolist() == [0.0, 0.0]
    assert point.gradient.isfinite().all()


def test_too_few_classes_name_the_loss_and_the_number():
    with pytest.raises(CasemateError, match=r"^dlr: 2 classes are too few"):
        dlr(torch.zeros(1, 2), label(0))
    with pytest.raises(CasemateError, match=r"^targeted dlr: 3 classes are too few"):
        targeted_dlr(torch.zeros(1, 3), label(0), label(1))
    dlr(torch.zeros(1, 3), label(0))
    targeted_dlr(torch.zeros(1, 4), label(0), label(1))
