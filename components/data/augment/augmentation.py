"""Augmentation of training images: settings and order of the operations."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Self

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from components.core.errors import CasemateError
from components.core.settings import Count, Problem, Share, settings, values_of
from components.core.types import Images
from components.data.augment.colour import jitter
from components.data.augment.draws import Draws
from components.data.augment.erasing import erase
from components.data.augment.framing import (
    crop_boxes,
    mirrored,
    pad_crop,
    random_flip,
    resize_crops,
    rotate,
)
from components.data.augment.rand_augment import check_setting, rand_augment
from components.data.augment.repeats import copy_names
from components.data.settings import AugmentSettings

Gray = Annotated[int, Ge(0), Le(255)]


@settings
class Augmentation(AugmentSettings):
    """Random crops and flips, then random colours and noise; the defaults change nothing.

    Published recipes (timm) leave `jitter` out where `rand_augment` is on; here both are applied,
    so such a recipe sets only one of them.
    """

    size: Count
    """Side of the square result."""
    fill: tuple[Gray, ...] = (128,)
    """Fill value of RandAugment beyond the edge: one, or one per channel."""
    erase_area: tuple[Share, Share] = (0.02, 1 / 3)
    """Smallest and largest share of the image."""
    erase_aspect: Annotated[float, Gt(0), Le(1)] = 0.3
    """Smallest height over width; its inverse is the largest."""

    @classmethod
    def of(cls, augment: AugmentSettings, *, size: int) -> Self:
        """The augmentation of a recipe for result images of side `size`."""
        return cls(**values_of(augment), size=size)

    def problems(self) -> Iterator[Problem]:
        yield from AugmentSettings.problems(self)
        low, high = self.erase_area
        if not 0 < low <= high:
            yield Problem(
                "erase_area", list(self.erase_area), "must be two shares, small and large"
            )
        if len(self.fill) not in (1, 3):
            yield Problem("fill", list(self.fill), "must be one value or three")
        if self.rand_augment is not None:
            check_setting(self.rand_augment)

    def apply(
        self,
        images: Tensor,
        item_ids: Sequence[str],
        *,
        run_seed: int,
        epoch: int,
        repeats: Sequence[int] | None = None,
    ) -> Images:
        """(B, C, size, size) float32 in [0, 1] of (B, C, H, W) uint8 images.

        A result depends on (settings, run seed, epoch, item id, copy in `repeats`, its pixels) and
        on nothing else; no shared generator is used, so calls are thread-safe.
        """
        self._check(images, item_ids, repeats)
        if not len(images):
            return torch.empty(0, images.shape[1], self.size, self.size, device=images.device)
        draws = Draws(copy_names(item_ids, repeats), run_seed, epoch)
        if not self.clean_copy:
            return self._altered(self._framed(images, draws), draws)
        framed = self._framed(images, Draws(tuple(item_ids), run_seed, epoch))
        result = _to_unit(framed)
        rows = torch.nonzero(torch.as_tensor(repeats))[:, 0]
        result[rows] = self._altered(framed[rows], draws.only(rows))
        return result

    def _framed(self, images: Tensor, draws: Draws) -> Tensor:
        """Random crop and flip, still uint8."""
        words = draws.words().to(images.device)
        if self.crop == "pad":
            images = pad_crop(images, words, pad=self.pad)
        if self.crop == "resized":
            height, width = images.shape[-2:]
            places = crop_boxes(draws, image=(height, width), scale=self.scale, ratio=self.ratio)
            return resize_crops(
                images,
                places,
                size=self.size,
                interpolation=self.interpolation,
                flips=mirrored(words).tolist() if self.flip else None,
            )
        return random_flip(images, words) if self.flip else images

    def _altered(self, framed: Tensor, draws: Draws) -> Images:
        """RandAugment on uint8, as defined; the other operations on [0, 1]."""
        if self.rand_augment is not None:
            framed = rand_augment(
                framed,
                draws,
                setting=self.rand_augment,
                fill=self.fill,
                interpolation=self.interpolation,
            )
        images = _to_unit(framed)
        if self.jitter:
            images = jitter(images, draws, strength=self.jitter)
        if self.rotation:
            images = rotate(images, draws, degrees=self.rotation)
        if self.erase_prob:
            prob, area, aspect = self.erase_prob, self.erase_area, self.erase_aspect
            images = erase(images, draws, prob=prob, area=area, aspect=aspect)
        return images

    def _check(
        self, images: Tensor, item_ids: Sequence[str], repeats: Sequence[int] | None
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(f"not uint8 (B, C, H, W): {images.dtype} {tuple(images.shape)}")
        if len(item_ids) != len(images):
            raise ValueError(f"{len(item_ids)} item ids for {len(images)} images")
        if repeats is not None and len(repeats) != len(images):
            raise ValueError(f"{len(repeats)} repeats for {len(images)} images")
        if self.clean_copy and repeats is None:
            raise ValueError("clean_copy needs `repeats`: which copy each image is")
        _, channels, height, width = images.shape
        if (self.rand_augment or self.jitter) and channels not in (1, 3):
            raise ValueError(f"colours need 1 or 3 channels, not {channels}")
        if self.crop != "resized" and (height, width) != (self.size, self.size):
            remedy = f"keeps the stored {height}x{width} pixels, but size is {self.size}"
            raise CasemateError("train.augment.crop", self.crop, f"{remedy}; choose resized")


def _to_unit(images: Tensor) -> Images:
    unit = images.to(torch.float32, memory_format=torch.contiguous_format)
    return unit.div_(255)
