"""The grid search: canvases against an independent warp, verdicts against single warps."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from components.attacks.interface import Items
from components.attacks.settings import SpatialSettings
from components.attacks.spatial import (
    IDENTITY,
    Pose,
    PosedImages,
    grid_poses,
    search_order,
    warp,
)
from components.core.settings import SettingError
from components.evaluate.settings import SpatialSuiteSettings
from components.evaluate.spatial import (
    GridPlan,
    failure_map,
    failures_of,
    grid_name,
    measurements,
    search_grid,
)

SMALL = SpatialSettings(max_shift=2, num_shifts=3, max_angle=24, num_angles=5)
PAPER_COUNTS = SpatialSettings(max_shift=4, num_shifts=9)  # 2511 cells; shifts for a small image


def problem(seed=0, *, side=10, num_items=5, channels=1, scale=4.0):
    """A random network, and items of which the first is misclassified unchanged."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Flatten(), nn.Linear(channels * side * side, 12), nn.Tanh(), nn.Linear(12, 3)]
        model = nn.Sequential(*layers).eval().requires_grad_(False)
        x = torch.rand(num_items, channels, side, side)
    model[1].weight.mul_(scale)
    y = model(x).argmax(dim=1)
    y[0] = (y[0] + 1) % 3
    return model, Items(x, y, tuple(f"item-{row}" for row in range(num_items)), run_seed=0)


def slow_warp(image, pose):
    """One (H, W) image, pixel by pixel: turned about its centre, then moved, black outside."""
    height, width = image.shape
    turn = math.radians(pose.angle)
    out = np.zeros((height, width))
    for row in range(height):
        for column in range(width):
            across = column - pose.right - (width - 1) / 2
            along = row - pose.down - (height - 1) / 2
            x = math.cos(turn) * across + math.sin(turn) * along + (width - 1) / 2
            y = math.cos(turn) * along - math.sin(turn) * across + (height - 1) / 2
            for i in (math.floor(y), math.floor(y) + 1):
                for j in (math.floor(x), math.floor(x) + 1):
                    if 0 <= i < height and 0 <= j < width:
                        out[row, column] += (1 - abs(y - i)) * (1 - abs(x - j)) * image[i, j]
    return out


@pytest.mark.parametrize(
    "pose", [Pose(30, 2, -1), Pose(-14, -3, 3), Pose(7.5, 1.5, 0), Pose(0, 0.25, -4)]
)
def test_a_pose_is_one_inverse_bilinear_warp(pose):
    x = torch.rand(1, 1, 7, 9, generator=torch.Generator().manual_seed(1))
    expected = torch.from_numpy(slow_warp(x[0, 0].double().numpy(), pose))
    posed = PosedImages(x, [pose, Pose(0, 4, 4)]).at(pose)
    torch.testing.assert_close(posed[0, 0].double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(9, 9), (8, 12), (11, 6)])
def test_crops_of_a_canvas_are_the_direct_warps(height, width):
    x = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(2))
    poses = grid_poses(SpatialSettings(max_shift=3, num_shifts=7, num_angles=7))
    images = PosedImages(x, poses)
    for index in search_order(poses):
        assert torch.equal(images.at(poses[index]), warp(x, poses[index]))
    assert images.num_interpolations == 7  # one per angle, not one per pose
    torch.testing.assert_close(images.at(IDENTITY), x, atol=1e-6, rtol=0)


def test_shifts_in_part_of_a_pixel_are_warped_one_by_one():
    x = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(3))
    poses = grid_poses(SpatialSettings(num_angles=3))  # shifts -3, -1.5, 0, 1.5, 3
    images = PosedImages(x, poses)
    for pose in poses:
        assert torch.equal(images.at(pose), warp(x, pose))
    assert images.num_interpolations == 3 * (25 - 9 + 1)  # nine of 25 are whole: one canvas


def test_taken_rows_keep_their_canvases():
    x = torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(4))
    images = PosedImages(x, grid_poses(SMALL))
    images.at(Pose(24, 2, 0))
    part = images.take(torch.tensor([2, 0]))
    assert torch.equal(part.at(Pose(24, -2, 2)), warp(x[[2, 0]], Pose(24, -2, 2)))
    assert part.num_interpolations == 1


def test_published_grids():
    suite = SpatialSuiteSettings()
    for side, cells, limit, steps in [(224, 2511, 16, range(-16, 17, 4)), (32, 775, 3, None)]:
        grid = suite.grid_at(side)
        poses = grid_poses(grid)
        assert len(poses) == len(set(poses)) == cells
        assert IDENTITY in poses
        rights = sorted({pose.right for pose in poses})
        assert rights == sorted({pose.down for pose in poses})
        assert rights[-1] == -rights[0] == limit
        assert steps is None or rights == list(steps)
        assert sorted({pose.angle for pose in poses}) == pytest.approx(range(-30, 31, 2))
    assert suite.grid_at(63) == suite.grid_at(32)
    assert suite.grid_at(64) == suite.grid_at(384)
    assert SpatialSuiteSettings(grid=SMALL).grid_at(224) == SMALL
    assert grid_name(suite.grid_at(224)) == "9x9x31-16px-30deg"
    with pytest.raises(SettingError, match="max_shift: inf"):
        SpatialSettings(max_shift=math.inf)


def test_plan_covers_every_cell_but_the_identity_once_strongest_first():
    plan = GridPlan.of(PAPER_COUNTS, chunk_size=81)
    assert [len(chunk) for chunk in plan.chunks] == [81] * 30 + [80]
    cells = [cell for chunk in plan.chunks for cell in chunk]
    assert sorted([*cells, plan.identity]) == list(range(2511))
    assert plan.poses[plan.identity] == IDENTITY

    def strength(cell):
        pose = plan.poses[cell]
        return (-abs(pose.angle), -abs(pose.right) - abs(pose.down), cell)

    assert cells == sorted(cells, key=strength)


def direct_verdicts(model, items, grid):
    """(N, T): failures of every cell, each by its own warp of the image."""
    poses = grid_poses(grid)
    clean = model(items.x)
    logits = [clean if pose == IDENTITY else model(warp(items.x, pose)) for pose in poses]
    return torch.stack(logits, dim=1)  # (N, T, K)


@pytest.mark.parametrize(
    ("grid", "size", "seed", "scale"),
    [(SMALL, 9, 1, 3.0), (SMALL, 7, 2, 1.0), (SMALL, 50, 2, 0.5), (PAPER_COUNTS, 81, 3, 0.5)],
)
def test_verdicts_are_those_of_all_direct_warps(grid, size, seed, scale):
    model, items = problem(seed, scale=scale)
    logits = direct_verdicts(model, items, grid)
    failed = logits.argmax(dim=2) != items.y[:, None]
    full = search_grid(model, items, grid, chunk_size=size, early_exit=False)
    early = search_grid(model, items, grid, chunk_size=size, early_exit=True)
    survived = (~failed).all(dim=1).tolist()
    assert full.column("survived").to_pylist() == survived
    assert early.column("survived").to_pylist() == survived
    assert 0 < sum(survived) < len(survived)
    assert np.array_equal(failures_of(full, failed.shape[1]), failed.numpy())
    losses = -logits.log_softmax(dim=2)[torch.arange(len(items)), :, items.y]
    assert full.column("worst_loss").to_pylist() == pytest.approx(losses.amax(dim=1).tolist())
    assert full.column("worst_cell").to_pylist() == losses.argmax(dim=1).tolist()
    for column in ("item_id", "label", "clean_correct", "first_fail"):
        assert full.column(column).equals(early.column(column))
    check_first_failures(early, failed, GridPlan.of(grid, chunk_size=size))
    assert full.column("num_queries").to_pylist() == [failed.shape[1]] * len(items)
    assert early.column("failures").null_count == len(items)


def check_first_failures(early, failed, plan):
    """The lowest failing index of the first failing chunk, and the queries up to its end."""
    for row, found in enumerate(early.to_pylist()):
        queries, first = 1, plan.identity if failed[row, plan.identity] else -1
        for chunk in plan.chunks if first < 0 else ():
            queries += len(chunk)
            wrong = [cell for cell in chunk if failed[row, cell]]
            if wrong:
                first = min(wrong)
                break
        assert (found["first_fail"], found["num_queries"]) == (first, queries)
        assert found["survived"] == (first < 0)


def test_forward_passes_have_one_size_and_broken_items_stop():
    model, items = problem(1, scale=2.0)
    sizes = []

    def watched(z):
        assert not torch.is_grad_enabled()
        sizes.append(len(z))
        return model(z)

    table = search_grid(watched, items, SMALL, chunk_size=9, early_exit=True)
    assert set(sizes) == {9}
    queries = table.column("num_queries").to_pylist()
    assert queries[0] == 1  # misclassified unchanged
    chunks = sum(math.ceil((count - 1) / 9) for count in queries)
    assert len(sizes) == chunks + 1
    assert {q for q, s in zip(queries, table.column("survived").to_pylist(), strict=True) if s} == {
        45
    }


def test_results_depend_on_the_item_and_not_on_its_neighbours():
    model, items = problem(2)
    whole = search_grid(model, items, SMALL, chunk_size=11, early_exit=False).to_pylist()
    for row in range(len(items)):
        part = items.take(torch.tensor([row]))
        alone = search_grid(model, part, SMALL, chunk_size=11, early_exit=False).to_pylist()
        assert alone == whole[row : row + 1]


@pytest.mark.parametrize("early_exit", [True, False])
def test_a_constant_classifier_survives_all_or_none(early_exit):
    _, items = problem(0)
    items = Items(items.x, torch.tensor([1, 0, 1, 1, 0]), items.item_ids, run_seed=0)

    def constant(z):
        return torch.tensor([[0.0, 2.0, 1.0]]).expand(len(z), -1)

    table = search_grid(constant, items, SMALL, chunk_size=8, early_exit=early_exit)
    assert table.column("survived").to_pylist() == [True, False, True, True, False]


def test_even_counts_have_no_identity_and_clean_errors_still_count():
    model, items = problem(0)
    grid = SpatialSettings(max_shift=1, num_shifts=2, max_angle=10, num_angles=2)
    table = search_grid(model, items, grid, chunk_size=8, early_exit=False)
    first = table.to_pylist()[0]
    assert (first["clean_correct"], first["survived"], first["first_fail"]) == (False, False, -1)
    assert table.column("num_queries").to_pylist() == [9] * 5  # eight cells and the clean image


def test_map_and_curve_count_failures():
    model, items = problem(2, scale=2.0)
    full = search_grid(model, items, SMALL, chunk_size=9, early_exit=False)
    failed = (direct_verdicts(model, items, SMALL).argmax(dim=2) != items.y[:, None]).numpy()
    poses = grid_poses(SMALL)
    rows = failure_map(full, SMALL).to_pylist()
    assert [(r["angle"], r["right"], r["down"]) for r in rows] == [
        (p.angle, p.right, p.down) for p in poses
    ]
    assert [r["num_failures"] for r in rows] == [int(f.sum()) for f in failed.T]
    assert sum(r["num_worst"] for r in rows) == len(items)
    found = {(m.metric, m.level): m for m in measurements(full, SMALL)}
    for angle in {pose.angle for pose in poses}:
        own = [place for place, pose in enumerate(poses) if pose.angle == angle]
        right = [not failed[row, own].any() for row in range(len(items))]
        assert found["angle_accuracy", angle].value == sum(right) / len(items)
        assert found["angle_fail_share", angle].value == pytest.approx(failed[:, own].mean())
    assert found["clean_accuracy", None].value == 0.8
    assert found["accuracy", None].value == (~failed).all(axis=1).mean()
    assert found["accuracy", None].value <= found["clean_accuracy", None].value


def test_early_exit_has_no_curve_and_says_so():
    model, items = problem(1)
    early = search_grid(model, items, SMALL, chunk_size=9, early_exit=True)
    *_, last = measurements(early, SMALL)
    assert (last.metric, last.value) == ("angle_accuracy", None)
    assert last.flags == ("null: early exit evaluates part of a grid",)
