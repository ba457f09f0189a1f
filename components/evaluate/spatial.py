"""The spatial grid attack: is an image classified correctly in every rotation and shift of a grid?

Engstrom et al. 2019 with the grid of Bhojanapalli et al. 2021 (appendix): 2511 poses, the identity
included. Images are searched one by one in chunks of poses, strongest first, so that a result
depends on its image alone. Early exit stops an image at its first failing chunk; the full search
also yields the worst pose of each image and the failures of each cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from components.attacks.gradient import in_fixed_batches
from components.attacks.interface import Items
from components.attacks.losses import cross_entropy
from components.attacks.settings import SpatialSettings
from components.attacks.spatial import (
    IDENTITY,
    Pose,
    PosedImages,
    axis,
    grid_poses,
    search_order,
)
from components.core.types import FloatArray, IntArray, Logits, LogitsFn
from components.evaluate.metrics import Measurement, null, share
from components.models.logits import check_logits

Verdicts = NDArray[np.bool_]
NO_CELL = -1
SCHEMA = pa.schema(
    [
        ("item_id", pa.string()),
        ("label", pa.int32()),
        ("clean_correct", pa.bool_()),
        ("survived", pa.bool_()),
        ("first_fail", pa.int32()),  # grid index; -1: none
        ("num_queries", pa.int32()),
        ("worst_loss", pa.float32()),  # from here on null with early exit
        ("worst_cell", pa.int32()),
        ("failures", pa.binary()),  # bits of the grid, first cell in the highest bit
    ]
)


@dataclass(frozen=True, slots=True)
class GridPlan:
    """The cells of a grid, and the chunks of grid indices in the order of the search."""

    poses: tuple[Pose, ...]
    chunks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, grid: SpatialSettings, *, chunk_size: int) -> "GridPlan":
        """The plan of a grid; the identity is in no chunk, the clean prediction covers it."""
        poses, step = grid_poses(grid), chunk_size
        order = search_order(poses)
        chunks = [tuple(order[start : start + step]) for start in range(0, len(order), step)]
        return cls(tuple(poses), tuple(chunks))

    @property
    def identity(self) -> int:
        """Grid index of the unchanged image; -1 if an axis has an even number of steps."""
        return self.poses.index(IDENTITY) if IDENTITY in self.poses else NO_CELL


@dataclass(slots=True)
class _Cells:
    """What is known of the cells of one image."""

    losses: FloatArray  # (T,), NaN: not evaluated
    failed: Verdicts  # (T,)
    num_queries: int = 1  # the clean image

    @classmethod
    def none_of(cls, num_cells: int) -> "_Cells":
        return cls(np.full(num_cells, np.nan), np.zeros(num_cells, bool))

    def keep(self, cells: Sequence[int], logits: Logits, label: torch.Tensor) -> Verdicts:
        """Record a forward pass of these cells; returns which of them fail."""
        failed: Verdicts = (logits.argmax(dim=1) != label).cpu().numpy()
        places = list(cells)
        self.failed[places] = failed
        losses = cross_entropy(logits, label.expand(len(logits)))
        self.losses[places] = losses.double().cpu().numpy()
        return failed

    def worst(self) -> dict[str, object]:
        """The columns of a full search."""
        return {
            "worst_loss": float(np.nanmax(self.losses)),
            "worst_cell": int(np.nanargmax(self.losses)),
            "failures": np.packbits(self.failed).tobytes(),
        }


@torch.no_grad()
def search_grid(
    logits_of: LogitsFn,
    items: Items,
    grid: SpatialSettings,
    *,
    chunk_size: int,
    early_exit: bool,
) -> pa.Table:
    """One row per item (`SCHEMA`): verdict, first failing cell, queries; worst pose if in full.

    `first_fail` is the lowest grid index of the first failing chunk, with and without early exit;
    of an item that is wrong unchanged, the identity. Every forward pass has `chunk_size` rows.
    Hold `attack_mode(model)` around the call.
    """
    plan = GridPlan.of(grid, chunk_size=chunk_size)
    fixed = in_fixed_batches(logits_of, size=chunk_size)
    clean = check_logits(fixed(items.x), items.item_ids)
    rows = [
        _search_item(fixed, items.take(torch.tensor([row])), clean[row], plan, early_exit)
        for row in range(len(items))
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _search_item(
    logits_of: LogitsFn, item: Items, clean: Logits, plan: GridPlan, early_exit: bool
) -> dict[str, object]:
    cells = _Cells.none_of(len(plan.poses))
    correct = survived = bool(clean.argmax() == item.y[0])
    first_fail = NO_CELL if correct else plan.identity
    if plan.identity != NO_CELL:
        cells.keep([plan.identity], clean[None], item.y[0])
    images = PosedImages(item.x, plan.poses)
    for chunk in plan.chunks if correct or not early_exit else ():
        posed = torch.cat([images.at(plan.poses[cell]) for cell in chunk])
        logits = check_logits(logits_of(posed), item.item_ids * len(chunk))
        cells.num_queries += len(chunk)
        failed = cells.keep(chunk, logits, item.y[0])
        if survived and failed.any():
            survived = False
            first_fail = min(cell for cell, wrong in zip(chunk, failed, strict=True) if wrong)
        if early_exit and not survived:
            break
    return {
        "item_id": item.item_ids[0],
        "label": int(item.y[0]),
        "clean_correct": correct,
        "survived": survived,
        "first_fail": first_fail,
        "num_queries": cells.num_queries,
        **({} if early_exit else cells.worst()),
    }


def failures_of(results: pa.Table, num_cells: int) -> Verdicts:
    """(N, T) bool of a full search: which items fail in which cells."""
    bits = [np.frombuffer(row, np.uint8) for row in results.column("failures").to_pylist()]
    return np.unpackbits(np.stack(bits), axis=1, count=num_cells).astype(bool)


def is_full(results: pa.Table) -> bool:
    """Whether every cell of every item was evaluated."""
    return len(results) > 0 and not results.column("failures").null_count


def failure_map(results: pa.Table, grid: SpatialSettings) -> pa.Table:
    """One row per cell of a full search, in grid order: its pose, `num_failures` of `num_items`,
    and `num_worst`, the items whose highest loss is there.
    """
    poses = grid_poses(grid)
    failed = failures_of(results, len(poses))
    worst: IntArray = np.asarray(results.column("worst_cell"), dtype=np.int64)
    return pa.table(
        {
            "angle": [pose.angle for pose in poses],
            "right": [pose.right for pose in poses],
            "down": [pose.down for pose in poses],
            "num_failures": failed.sum(axis=0),
            "num_worst": np.bincount(worst, minlength=len(poses)),
            "num_items": np.full(len(poses), len(failed)),
        }
    )


def measurements(results: pa.Table, grid: SpatialSettings) -> list[Measurement]:
    """Clean and spatial accuracy, mean queries, and the curve over the angle of a full search."""
    name = grid_name(grid)
    columns = {key: np.asarray(results.column(key)) for key in ("clean_correct", "survived")}
    queries = np.asarray(results.column("num_queries"), dtype=np.float64)
    return [
        share(columns["clean_correct"], item=name, metric="clean_accuracy"),
        share(columns["survived"], item=name, metric="accuracy"),
        Measurement(item=name, metric="mean_queries", value=float(queries.mean()), n=len(queries)),
        *_angle_curve(results, grid),
    ]


def _angle_curve(results: pa.Table, grid: SpatialSettings) -> list[Measurement]:
    """Per angle: items that are correct in all its shifts, and the mean share of failing cells."""
    name = grid_name(grid)
    if not is_full(results):
        return [null(item=name, metric="angle_accuracy", why="early exit evaluates part of a grid")]
    failed = failures_of(results, len(grid_poses(grid)))
    by_angle = failed.reshape(len(failed), grid.num_angles, -1)  # (N, angles, shifts)
    found = []
    for place, angle in enumerate(axis(grid.max_angle, grid.num_angles)):
        cells = by_angle[:, place]
        found += [
            share(cells.sum(axis=1) == 0, item=name, level=angle, metric="angle_accuracy"),
            Measurement(
                item=name,
                level=angle,
                metric="angle_fail_share",
                value=float(cells.mean()),
                n=len(cells),
            ),
        ]
    return found


def grid_name(grid: SpatialSettings) -> str:
    """Counts and limits in one word, as in `9x9x31-16px-30deg`."""
    counts = f"{grid.num_shifts}x{grid.num_shifts}x{grid.num_angles}"
    return f"{counts}-{grid.max_shift:g}px-{grid.max_angle:g}deg"
