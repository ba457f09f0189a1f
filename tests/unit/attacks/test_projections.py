"""Projections keep their promise in the precision that checks it."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from components.attacks.projections import linf_bounds, project_l2, project_linf

SHAPE = (2, 1, 2, 3)
images = hnp.arrays(np.float32, SHAPE, elements=st.floats(0, 1, width=32)).map(torch.from_numpy)
points = hnp.arrays(np.float32, SHAPE, elements=st.floats(-3, 3, width=32)).map(torch.from_numpy)
budgets = st.floats(0, 1) | st.integers(0, 255).map(lambda n: n / 255)


def rows_norm(delta):
    return delta.flatten(1).norm(dim=1)


@settings(deadline=None)
@given(x=images, z=points, eps=budgets)
@example(x=torch.full(SHAPE, 0.7), z=torch.full(SHAPE, 3.0), eps=8 / 255)
def test_linf_result_is_inside_ball_and_range_in_both_precisions(x, z, eps):
    result = project_linf(z, center=x, eps=eps)
    assert result.dtype == torch.float32
    assert result.min() >= 0
    assert result.max() <= 1
    in_float32 = (result - x).abs().double()  # compared as float64: no rounding of eps can help
    in_float64 = (result.double() - x.double()).abs()
    assert in_float32.max() <= eps
    assert in_float64.max() <= eps


@settings(deadline=None)
@given(x=images, eps=budgets)
def test_linf_bounds_cannot_be_widened(x, eps):
    """One float further out leaves the ball of the float32 budget, or the pixel range."""
    low, high = linf_bounds(x, eps=eps)
    budget = np.float32(eps)
    if float(budget) > eps:  # as Python floats: numpy would round `eps` to compare
        budget = np.nextafter(budget, np.float32(0))
    above = torch.nextafter(high, torch.full_like(high, 2.0)).double()
    below = torch.nextafter(low, torch.full_like(low, -1.0)).double()
    assert ((above > 1) | (above - x.double() > float(budget))).all()
    assert ((below < 0) | (x.double() - below > float(budget))).all()


@settings(deadline=None)
@given(x=images, z=points, eps=st.floats(0, 4))
def test_l2_result_is_inside_ball_and_range_in_both_precisions(x, z, eps):
    result = project_l2(z, center=x, eps=eps)
    assert result.dtype == torch.float32
    assert result.min() >= 0
    assert result.max() <= 1
    assert (rows_norm(result - x).double() <= eps).all()
    assert (rows_norm(result.double() - x.double()) <= eps).all()


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (1, 3, 224, 224)])
@pytest.mark.parametrize("eps", [0.25, 1.0, 20.0])
def test_l2_budget_holds_and_is_used_at_real_image_sizes(shape, eps):
    generator = torch.Generator().manual_seed(3)
    x = 0.25 + 0.5 * torch.rand(shape, generator=generator)
    z = x + 0.5 * torch.randn(shape, generator=generator)
    delta = project_l2(z, center=x, eps=eps) - x
    assert (rows_norm(delta).double() <= eps).all()
    assert (rows_norm(delta.double()) <= eps).all()
    if eps <= 1:  # small steps meet no edge of the range: the whole radius is there
        # rounding toward the image costs at most one float32 step (6e-8) per pixel
        assert (
            rows_norm(delta.double()) >= eps * (1 - 2e-6) - 6e-8 * delta[0].numel() ** 0.5
        ).all()


@settings(deadline=None)
@given(x=images, z=points)
def test_points_inside_stay_exactly(x, z):
    z = z.clamp(0, 1)
    assert torch.equal(project_linf(z, center=x, eps=1.0), z)
    assert torch.equal(project_l2(z, center=x, eps=10.0), z)


@settings(deadline=None)
@given(x=images, z=points)
def test_zero_budget_returns_the_image_exactly(x, z):
    assert torch.equal(project_linf(z, center=x, eps=0.0), x)
    assert torch.equal(project_l2(z, center=x, eps=0.0), x)


def test_l2_scales_along_the_ray():
    x = torch.full((1, 1, 1, 2), 0.5)
    result = project_l2(x + torch.tensor([0.3, 0.4]), center=x, eps=0.25)
    torch.testing.assert_close(result - x, torch.tensor([[[[0.15, 0.2]]]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("project", [project_linf, project_l2])
def test_wrong_calls_are_refused(project):
    x = torch.full(SHAPE, 0.5)
    for eps in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="eps"):
            project(x, center=x, eps=eps)
    for bad in (x + 1, x - 1, x * float("nan")):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            project(x, center=bad, eps=0.1)
