"""The spatial grid: its poses, its warp against exact answers, and an exhaustive search."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from components.attacks.interface import Items
from components.attacks.spatial import Pose, SpatialGrid, warp
from components.core.settings import SettingError


def images(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_grid_is_the_published_one():
    poses = SpatialGrid().poses()
    assert len(poses) == len(set(poses)) == 5 * 5 * 31 - 1
    assert sorted({pose.right for pose in poses}) == [-3, -1.5, 0, 1.5, 3]
    assert sorted({pose.down for pose in poses}) == [-3, -1.5, 0, 1.5, 3]
    assert sorted({pose.angle for pose in poses}) == pytest.approx(range(-30, 31, 2))
    assert Pose(0, 0, 0) not in poses  # the clean prediction covers it
    strengths = [abs(pose.angle) for pose in poses]
    assert strengths == sorted(strengths, reverse=True)
    assert SpatialGrid(num_angles=1, num_shifts=1).poses() == []


def test_no_movement_is_the_image_itself():
    x = images(2, 3, 7, 9)
    torch.testing.assert_close(warp(x, Pose(0, 0, 0)), x, atol=1e-6, rtol=0)


@settings(max_examples=20, deadline=None)
@given(right=st.integers(-4, 4), down=st.integers(-4, 4))
def test_whole_shifts_move_pixels_and_leave_black_behind(right, down):
    x = images(1, 2, 6, 9)
    expected = torch.zeros_like(x)
    for row in range(6):
        for column in range(9):
            if 0 <= row - down < 6 and 0 <= column - right < 9:
                expected[..., row, column] = x[..., row - down, column - right]
    torch.testing.assert_close(warp(x, Pose(0, right, down)), expected, atol=1e-5, rtol=0)


def test_half_a_pixel_is_the_mean_of_two():
    x = images(1, 1, 4, 5)
    moved = warp(x, Pose(0, 0.5, 0))
    torch.testing.assert_close(moved[..., 1:], (x[..., 1:] + x[..., :-1]) / 2, atol=1e-6, rtol=0)
    torch.testing.assert_close(moved[..., 0], x[..., 0] / 2, atol=1e-6, rtol=0)


def test_right_angles_turn_about_the_centre_and_shifts_come_after():
    x = images(1, 3, 6, 6)
    turned = torch.rot90(x, k=-1, dims=(2, 3))
    torch.testing.assert_close(warp(x, Pose(90, 0, 0)), turned, atol=1e-5, rtol=0)
    shifted = torch.nn.functional.pad(turned, (2, 0))[..., :6]
    torch.testing.assert_close(warp(x, Pose(90, 2, 0)), shifted, atol=1e-5, rtol=0)
    tall = images(1, 1, 8, 4)  # pixels are square whatever the aspect: the middle square turns
    middle = torch.rot90(tall[..., 2:6, :], k=-1, dims=(2, 3))
    torch.testing.assert_close(warp(tall, Pose(90, 0, 0))[..., 2:6, :], middle, atol=1e-5, rtol=0)


@settings(max_examples=15, deadline=None)
@given(angle=st.floats(-180, 180), right=st.floats(-3, 3), down=st.floats(-3, 3))
def test_mirrored_poses_give_mirrored_images_inside_the_range(angle, right, down):
    x = images(2, 1, 7, 5)
    there = warp(x, Pose(angle, right, down))
    back = warp(x.flip(-1), Pose(-angle, -right, down)).flip(-1)
    torch.testing.assert_close(there, back, atol=1e-4, rtol=0)
    assert 0 <= there.min() <= there.max() <= 1


def problem(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3)]
        model = nn.Sequential(*layers).eval().requires_grad_(False)
    x = images(6, 1, 8, 8, seed=seed)
    y = model(x).argmax(dim=1)
    y[0] = (y[0] + 1) % 3
    return model, Items(x, y, tuple("abcdef"), run_seed=0)


def test_early_exit_gives_the_verdict_of_the_whole_grid():
    model, items = problem(0)
    grid = SpatialGrid(max_shift=1, num_shifts=3, max_angle=20, num_angles=5)
    seen = []

    def watched(z):
        assert not torch.is_grad_enabled()
        seen.append(len(z))
        return model(z)

    result = grid(watched, items)
    poses = torch.stack([warp(items.x, pose) for pose in grid.poses()])  # (P, B, C, H, W)
    predictions = torch.stack([model(posed).argmax(dim=1) for posed in poses])
    survives = (predictions == items.y).all(dim=0)
    stands = result.adversarial_prediction == items.y
    assert torch.equal(stands[1:], survives[1:])
    assert 0 < stands.sum() < 5
    assert sum(seen) == result.num_evaluations.sum()
    assert (result.num_evaluations[stands] == len(grid.poses()) + 1).all()
    for row in range(1, 6):  # the first failing pose, or the one that comes nearest to failing
        logits = model(poses[:, row])
        own = logits[:, items.y[row]].clone()
        logits[:, items.y[row]] = -torch.inf
        margins = logits.amax(dim=1) - own
        failing = (margins > 0).nonzero().flatten()
        expected = poses[failing[0] if len(failing) else margins.argmax(), row]
        torch.testing.assert_close(result.x_adv[row], expected)
    assert torch.equal(result.x_adv[0], items.x[0])
    assert result.num_evaluations[0] == 1


def test_results_depend_on_the_item_and_not_on_its_batch():
    model, items = problem(2)
    grid = SpatialGrid(max_shift=1.5, num_shifts=3, num_angles=3)
    whole = grid(model, items)
    for row in range(6):
        part = grid(model, items.take(torch.tensor([row])))
        assert torch.equal(part.x_adv[0], whole.x_adv[row])
        assert part.num_evaluations[0] == whole.num_evaluations[row]


def test_bad_grids_are_named():
    with pytest.raises(SettingError, match=r"max_angle: -1"):
        SpatialGrid(max_angle=-1)
    with pytest.raises(SettingError, match=r"num_shifts: 0"):
        SpatialGrid(num_shifts=0)
