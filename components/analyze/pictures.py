"""Perturbations as pictures, and how far they follow the patch grid of a network.

Pictures: Bhojanapalli et al. 2021, Fig. 5, and the thesis "Adversarially Robust Vision
Transformers", Figs. 11 and 13: [-eps, eps] becomes [0, 1], zero is mid gray. The alignment score
measures a remark of the former: perturbations of a ViT change at the borders of its patches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from components.analyze.settings import PerturbationSettings
from components.attacks.gradient import sign_ascent
from components.attacks.interface import Items
from components.attacks.starts import random_point
from components.core.errors import CasemateError
from components.core.types import Array, FloatArray, Images, LogitsFn
from components.evaluate.metrics import Measurement, null

LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue


def perturbed_images(logits_of: LogitsFn, items: Items, how: PerturbationSettings) -> Images:
    """The last iterate of PGD in l-inf from a uniform start, for every item, broken or not.

    Hold `attack_mode(model)` around the call.
    """
    start = random_point(items, norm="linf", eps=how.eps, stream="perturbation")
    return sign_ascent(
        logits_of,
        items.x,
        items.y,
        start=start,
        eps=how.eps,
        step_size=how.step_size_at(),
        num_steps=how.num_steps,
    )


def to_picture(delta: Tensor, *, eps: float) -> Images:
    """(delta + eps) / (2 eps): zero is exactly 0.5, eps is 1, -eps is 0."""
    limit = torch.tensor(eps, dtype=delta.dtype, device=delta.device)
    return (0.5 + delta / limit / 2).clamp(0, 1)


def gray(images: Tensor) -> Tensor:
    """(B, H, W) luma of (B, 3, H, W), or the single channel."""
    if images.shape[1] == 1:
        return images[:, 0]
    if images.shape[1] != 3:
        raise ValueError(f"expected one or three channels, got {images.shape[1]}")
    weights = torch.tensor(LUMA, dtype=images.dtype, device=images.device)
    return torch.einsum("bchw,c->bhw", images, weights)


def patch_size_of(net: Any, how: PerturbationSettings, *, scale: float) -> int:
    """Side of the patches in pixels of the images: that of `how`, else of the network.

    `scale` is how many times larger the network sees the images (`upsample` / `image_size`).
    """
    if how.patch_size is not None:
        return how.patch_size
    side = getattr(getattr(net, "patch_embed", None), "patch_size", None)
    name = type(net).__name__
    if side is None:
        remedy = f"is missing: {name} has no patches; write the side to compare with"
        raise CasemateError("patch_size", "", remedy)
    tall, wide = side if isinstance(side, tuple) else (side, side)
    if tall != wide or tall / scale != int(tall / scale) or tall / scale < 2:
        remedy = f"is missing: patches of {name}, {tall}x{wide} at scale {scale:g}, are not squares"
        raise CasemateError("patch_size", "", f"{remedy} of whole pixels from 2 on; write a side")
    return int(tall / scale)


@dataclass(frozen=True, slots=True)
class Alignment:
    """How much more a perturbation changes between patches than inside them."""

    score: float  # infinite where nothing changes inside
    rank: int  # among the p grids; 1: no shifted grid scores higher
    z: float | None  # distance from the shifted grids in their standard deviations


@dataclass(frozen=True, eq=False, slots=True)
class EdgeState:
    """Sums over images of the mean change between neighbouring columns, and rows."""

    columns: FloatArray  # (W - 1,)
    rows: FloatArray  # (H - 1,)
    num: int

    @classmethod
    def of(cls, delta: Tensor) -> "EdgeState":
        """From (B, C, H, W) perturbations, image by image."""
        levels = gray(delta.double())
        across = (levels[:, :, 1:] - levels[:, :, :-1]).abs().mean(dim=1)  # D(x), (B, W - 1)
        down = (levels[:, 1:] - levels[:, :-1]).abs().mean(dim=2)
        return cls(across.sum(dim=0).cpu().numpy(), down.sum(dim=0).cpu().numpy(), len(delta))

    def merged(self, other: "EdgeState") -> "EdgeState":
        """The state of both."""
        return EdgeState(self.columns + other.columns, self.rows + other.rows, self.num + other.num)

    def arrays(self) -> dict[str, Array]:
        """The content of the state."""
        return {"columns": self.columns, "rows": self.rows, "num": np.array(self.num)}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Array]) -> "EdgeState":
        """The state that `arrays` describes."""
        return cls(arrays["columns"], arrays["rows"], int(arrays["num"]))

    def alignment(self, patch_size: int) -> Alignment | None:
        """Of the grid of this patch against its shifted copies; None if nothing changes at all."""
        sides = (len(self.columns) + 1, len(self.rows) + 1)
        if patch_size < 2 or any(side < 2 * patch_size for side in sides):
            remedy = f"does not tile images of {sides[1]}x{sides[0]} pixels at least twice"
            raise CasemateError("patch_size", patch_size, f"{remedy}; write 2 or more, and smaller")
        if not (self.columns.any() or self.rows.any()):
            return None
        scores = [self._score(patch_size, shift) for shift in range(patch_size)]
        own, others = scores[0], np.array(scores[1:])
        spread = float(others.std(ddof=1)) if len(others) > 1 else 0.0
        usable = np.isfinite(own) and spread > 0
        return Alignment(
            score=own,
            rank=1 + int((others > own).sum()),
            z=float((own - others.mean()) / spread) if usable else None,
        )

    def _score(self, patch_size: int, shift: int) -> float:
        """Mean change at the borders of a shifted grid over that elsewhere, mean of both axes."""
        found = []
        for profile in (self.columns, self.rows):
            border = np.arange(len(profile)) % patch_size == (patch_size - 1 + shift) % patch_size
            at, elsewhere = profile[border].mean(), profile[~border].mean()
            found.append(at / elsewhere if elsewhere > 0 else (np.inf if at > 0 else 1.0))
        return float(np.mean(found))


def alignment_measurements(state: EdgeState, *, patch_size: int) -> list[Measurement]:
    """Score, rank and z-score (level: pixels of the patch)."""
    found = state.alignment(patch_size)
    names = ("score", "rank", "z")
    place = {"item": "patch_alignment", "level": float(patch_size)}
    if found is None:
        return [null(metric=name, why="no perturbation", **place) for name in names]  # type: ignore[arg-type]
    rows = []
    for name in names:
        value = getattr(found, name)
        if value is None or not np.isfinite(value):
            few = name == "z" and patch_size == 2 and np.isfinite(found.score)
            why = "a single shifted grid" if few else "nothing changes inside patches"
            rows.append(null(metric=name, why=why, **place))  # type: ignore[arg-type]
        else:
            rows.append(Measurement(metric=name, value=value, n=state.num, **place))  # type: ignore[arg-type]
    return rows
