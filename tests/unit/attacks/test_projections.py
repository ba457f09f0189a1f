"""Projections keep their promise in the precision that checks it."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from components.attacks.projections import (
    bounds_of_pixels,
    check_pixels,
    linf_bounds,
    project_l2,
    project_linf,
)
from tests.unit.host_syncs import DEVICE, HostSyncs

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


def wide_bounds(x, eps):
    """The bounds of float32 images in float64, where x + eps is exact enough to compare."""
    radius = np.float32(eps)
    if float(radius) > eps:
        radius = np.nextafter(radius, np.float32(0))
    wide, radius = x.double(), float(radius)
    high, low = (wide + radius).float(), (wide - radius).float()
    high = torch.where(high.double() - wide > radius, torch.nextafter(high, x), high)
    low = torch.where(wide - low.double() > radius, torch.nextafter(low, x), low)
    return low.clamp(0, 1), high.clamp(0, 1)


EDGES = [
    0.0,
    1e-45,
    1e-40,
    1.1754942e-38,
    1.1754944e-38,
    1e-9,
    2**-24,
    2**-23,
    0.5,
    1 - 2**-24,
    1.0,
]
BUDGETS = [n / 255 for n in (0, 1, 2, 4, 8, 16, 128, 255)] + [0.001, 0.3, 1e-300, *EDGES]


@settings(deadline=None)
@given(x=images, eps=budgets | st.floats(0, 1e-30) | st.sampled_from(EDGES))
def test_linf_bounds_are_those_of_float64_bit_for_bit(x, eps):
    for found, expected in zip(linf_bounds(x, eps=eps), wide_bounds(x, eps), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("eps", BUDGETS)
def test_linf_bounds_are_those_of_float64_for_images_of_every_kind(eps):
    generator = torch.Generator().manual_seed(4)
    uniform = torch.rand(30, 3, 32, 32, generator=generator)
    stored = torch.randint(0, 256, (30, 3, 32, 32), generator=generator).float() / 255
    edges = torch.tensor([*EDGES, eps, 1 - eps, 2 * eps]).clamp(0, 1).view(1, 1, 2, -1)
    for x in (uniform, stored, uniform * 1e-6, uniform * 1e-38, uniform * 1e-44, edges):
        for found, expected in zip(linf_bounds(x, eps=eps), wide_bounds(x, eps), strict=True):
            assert torch.equal(found, expected)


def test_linf_bounds_hold_in_other_precisions():
    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = torch.rand(4, 1, 8, 8, generator=generator).to(dtype)
        low, high = linf_bounds(x, eps=8 / 255)
        assert low.dtype == dtype
        assert max((high.double() - x.double()).max(), (x.double() - low.double()).max()) <= 8 / 255
        assert (high - x).max() > 7.5 / 255


def test_bounds_of_known_pixels_wait_for_nothing():
    x = torch.rand(2, 3, 8, 8)
    with HostSyncs() as syncs:
        there = x.to(DEVICE)
        syncs.clear()
        found = bounds_of_pixels(there, eps=8 / 255)
        assert syncs.places == {}
        for ours, expected in zip(found, linf_bounds(x, eps=8 / 255), strict=True):
            assert torch.equal(ours.cpu(), expected)
        syncs.clear()
        check_pixels(there)
        assert syncs.count == 1


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
