"""Rotations and shifts: the worst of a fixed grid, without any gradient.

Engstrom et al. 2019, sec. 3 and their released CIFAR-10 grid: 5 x 5 shifts of up to 3 pixels (at
32 x 32) and 31 angles of up to 30 degrees, with black beyond the frame. No pixel budget describes
such a change, so its results are reported separately from those of the norms.

Bhojanapalli et al. 2021, appendix, take 9 x 9 shifts of up to 16 pixels. Their shifts are whole, so
all shifts of one angle are crops of one larger rotated image, the canvas: 31 interpolations in
place of 2511, with the same pixels. `components/evaluate/spatial.py` measures this grid.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from components.attacks.interface import AttackResult, Items, Search
from components.attacks.losses import margin
from components.attacks.settings import SpatialSettings
from components.core.settings import Problem, settings
from components.core.types import Images, LogitsFn
from components.models.logits import check_logits

NUM_CANVASES = 2  # kept at a time: the search order alternates between an angle and its negative


@dataclass(frozen=True, slots=True)
class Pose:
    """A rotation about the image's centre in degrees, then a shift in pixels, right and down."""

    angle: float
    right: float
    down: float

    @property
    def is_whole(self) -> bool:
        """Whether the shift is in whole pixels."""
        return float(self.right).is_integer() and float(self.down).is_integer()


IDENTITY = Pose(0.0, 0.0, 0.0)


def grid_poses(grid: SpatialSettings) -> list[Pose]:
    """All poses of a grid; a pose's place is its grid index: by angle, then right, then down."""
    shifts = axis(grid.max_shift, grid.num_shifts)
    angles = axis(grid.max_angle, grid.num_angles)
    return [Pose(*cell) for cell in product(angles, shifts, shifts)]


def search_order(poses: Sequence[Pose]) -> list[int]:
    """Grid indices without the identity, which the clean prediction covers; large changes first.

    The order does not change a verdict; large changes break items early.
    """
    moved = [index for index, pose in enumerate(poses) if pose != IDENTITY]
    return sorted(moved, key=lambda i: (-abs(poses[i].angle), -_shift_size(poses[i]), i))


def _shift_size(pose: Pose) -> float:
    return abs(pose.right) + abs(pose.down)


@settings
class SpatialGrid(SpatialSettings):
    """Every pose of the grid, strongest first; a row is done at its first misclassified pose."""

    norm: Literal["spatial"] = "spatial"
    eps: float = 1.0
    """The whole pixel range: any pixel may take any value."""

    def problems(self) -> Iterator[Problem]:
        if self.eps != 1:
            yield Problem("eps", self.eps, "is not a budget of rotations and shifts; write 1")
        yield from SpatialSettings.problems(self)

    def poses(self) -> list[Pose]:
        """The poses in the order in which they are tried."""
        every = grid_poses(self)
        return [every[index] for index in search_order(every)]

    @torch.no_grad()
    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        search = Search(logits_of, items)
        search.visit_clean(search.clean_margins)
        rows = search.robust_rows
        items, poses = items.take(rows), self.poses()
        images = PosedImages(items.x, poses)
        for pose in poses:
            if len(rows) == 0:
                break
            posed = images.at(pose)
            logits = check_logits(logits_of(posed), items.item_ids)
            robust = search.visit(rows, posed, logits, margin(logits, items.y))
            if not bool(robust.all()):
                kept = robust.nonzero().squeeze(1)
                rows, items, images = rows[kept], items.take(kept), images.take(kept)
        return search.result()


class PosedImages:
    """Images in the poses of a grid: crops of a canvas where shifts are whole, else single warps.

    A canvas is computed when a pose first needs it; the last two angles are kept.
    """

    def __init__(self, x: Images, poses: Sequence[Pose]) -> None:
        whole = [pose for pose in poses if pose.is_whole]
        self.x = x
        self.border = int(max((max(abs(p.right), abs(p.down)) for p in whole), default=0))
        self.canvases: dict[float, Images] = {}
        self.num_interpolations = 0

    def at(self, pose: Pose) -> Images:
        """(B, C, H, W) in this pose; equal to `warp` in every bit."""
        if not pose.is_whole:
            self.num_interpolations += 1
            return warp(self.x, pose)
        height, width = self.x.shape[-2:]
        top, left = self.border - int(pose.down), self.border - int(pose.right)
        crop = self._canvas(pose.angle)[..., top : top + height, left : left + width]
        return crop.contiguous()  # as a model expects its input

    def take(self, rows: Tensor) -> "PosedImages":
        """The images at these int64 indices, with the canvases that they have."""
        part = PosedImages(self.x[rows], ())
        part.border, part.num_interpolations = self.border, self.num_interpolations
        part.canvases = {angle: canvas[rows] for angle, canvas in self.canvases.items()}
        return part

    def _canvas(self, angle: float) -> Images:
        if angle not in self.canvases:
            while len(self.canvases) >= NUM_CANVASES:
                del self.canvases[next(iter(self.canvases))]  # the oldest
            self.canvases[angle] = canvas(self.x, angle, border=self.border)
            self.num_interpolations += 1
        return self.canvases[angle]


def warp(x: Images, pose: Pose) -> Images:
    """`x` in a pose, bilinear, by one inverse warp from the original image, zeros beyond it.

    Two warps in a row would lose what leaves the frame between them. Rotation is in pixels, about
    ((W - 1) / 2, (H - 1) / 2), for any aspect of the image.
    """
    height, width = x.shape[-2:]
    return _rotated(
        x,
        pose.angle,
        across=_from_centre(0, width, width) - pose.right,
        along=_from_centre(0, height, height) - pose.down,
    )


def canvas(x: Images, angle: float, *, border: int) -> Images:
    """The rotated image with `border` further pixels on each side.

    A shift by (right, down) is the crop from row border - down and column border - right: its
    pixels have the coordinates that `warp` computes, exactly, because whole and half numbers are
    exact in float64.
    """
    height, width = x.shape[-2:]
    return _rotated(
        x,
        angle,
        across=_from_centre(-border, width + border, width),
        along=_from_centre(-border, height + border, height),
    )


def _from_centre(start: int, stop: int, side: int) -> Tensor:
    return torch.arange(start, stop, dtype=torch.float64) - (side - 1) / 2


def _rotated(x: Images, angle: float, *, across: Tensor, along: Tensor) -> Images:
    """Pixels of the rotated image at these distances from its centre, right and down."""
    height, width = x.shape[-2:]
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    right, down = across[None, :], along[:, None]
    # Inverse rotation, in half widths and half heights; float64 and for one image, so coordinates
    # neither round visibly nor depend on the batch.
    columns = (cos * right + sin * down) / (width / 2)
    rows = (cos * down - sin * right) / (height / 2)
    grid = torch.stack([columns, rows], dim=-1).to(x).expand(len(x), -1, -1, -1)
    rotated = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return rotated.clamp(0, 1)  # weights of a mean may sum to a little more than one


def axis(limit: float, num: int) -> list[float]:
    """`num` even steps from -limit to limit; one step is the centre."""
    if num == 1:
        return [0.0]
    return [limit * (2 * step - (num - 1)) / (num - 1) for step in range(num)]
