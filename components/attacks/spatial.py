"""Rotations and shifts: the worst of a fixed grid, without any gradient.

Engstrom et al. 2019, sec. 3 and their released CIFAR-10 grid: 5 x 5 shifts of up to 3 pixels (at
32 x 32) and 31 angles of up to 30 degrees, with black beyond the frame. No pixel budget describes
such a change, so its results are reported separately from those of the norms.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F

from components.attacks.interface import AttackResult, Items, Search
from components.attacks.losses import margin
from components.attacks.settings import SpatialSettings
from components.core.settings import Problem, settings
from components.core.types import Images, LogitsFn
from components.models.logits import check_logits


@dataclass(frozen=True, slots=True)
class Pose:
    """A rotation about the image's centre in degrees, then a shift in pixels, right and down."""

    angle: float
    right: float
    down: float


@settings
class SpatialGrid(SpatialSettings):
    """Every pose of the grid, strongest first; a row is done at its first misclassified pose."""

    norm: Literal["spatial"] = "spatial"
    eps: float = 1.0
    """The whole pixel range: any pixel may take any value."""

    def problems(self) -> Iterator[Problem]:
        if self.eps != 1:
            yield Problem("eps", self.eps, "is not a budget of rotations and shifts; write 1")
        for name in ("max_shift", "max_angle"):
            if not math.isfinite(limit := getattr(self, name)):
                yield Problem(name, limit, "is not a limit; write a number >= 0")

    def poses(self) -> list[Pose]:
        """The grid without the identity, which the clean prediction covers; large changes first.

        The order does not change the result; large changes break rows early.
        """
        shifts = _axis(self.max_shift, self.num_shifts)
        angles = _axis(self.max_angle, self.num_angles)
        grid = [Pose(*cell) for cell in product(angles, shifts, shifts)]
        moved = [pose for pose in grid if pose != Pose(0.0, 0.0, 0.0)]
        return sorted(moved, key=lambda p: (-abs(p.angle), -abs(p.right) - abs(p.down)))

    @torch.no_grad()
    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        search = Search(logits_of, items)
        rows = search.robust_rows
        items = items.take(rows)
        for pose in self.poses():
            if len(rows) == 0:
                break
            posed = warp(items.x, pose)
            logits = check_logits(logits_of(posed), items.item_ids)
            robust = search.visit(rows, posed, logits, margin(logits, items.y))
            if not bool(robust.all()):
                kept = robust.nonzero().squeeze(1)
                rows, items = rows[kept], items.take(kept)
        return search.result()


def warp(x: Images, pose: Pose) -> Images:
    """`x` in a pose, bilinear, by one inverse warp from the original image, zeros beyond it.

    Two warps in a row would lose what leaves the frame between them. Rotation is in pixels, about
    ((W - 1) / 2, (H - 1) / 2), for any aspect of the image.
    """
    height, width = x.shape[-2:]
    cos, sin = math.cos(math.radians(pose.angle)), math.sin(math.radians(pose.angle))
    # input = R^-1 (output - shift), both measured from the centre in half widths and half heights
    right, down = 2 * pose.right / width, 2 * pose.down / height
    aspect = height / width
    inverse = torch.tensor(
        [
            [cos, sin * aspect, -cos * right - sin * aspect * down],
            [-sin / aspect, cos, sin / aspect * right - cos * down],
        ],
        dtype=torch.float64,
    )
    # in float64 and for one image: coordinates neither round visibly nor depend on the batch
    grid = F.affine_grid(inverse[None], [1, 1, height, width], align_corners=False)
    grid = grid.to(x).expand(len(x), -1, -1, -1)
    warped = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return warped.clamp(0, 1)  # weights of a mean may sum to a little more than one


def _axis(limit: float, num: int) -> list[float]:
    """`num` even steps from -limit to limit; one step is the centre."""
    if num == 1:
        return [0.0]
    return [limit * (2 * step - (num - 1)) / (num - 1) for step in range(num)]
