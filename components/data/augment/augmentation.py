"""The augmentation of a training: its settings and the order in which its parts act."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from components.core.errors import CasemateError
from components.core.types import Images
from components.data.augment.colour import jitter
from components.data.augment.draws import Draws
from components.data.augment.erasing import erase
from components.data.augment.framing import crop_boxes, mirror, pad_crop, resize_crops, rotate
from components.data.augment.rand_augment import RESAMPLING, check_setting, rand_augment
from components.data.augment.repeats import copy_names


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Random framing, then random colours and noise; the defaults change nothing.

    Published recipes (timm) leave `jitter` out where `rand_augment` is on; here each setting does
    what it says, so such a recipe sets one of them.
    """

    size: int  # side of the square result
    crop: str = "none"  # "pad": moved over black; "resized": random area and aspect, scaled
    pad: int = 0  # pixels on each side, for crop "pad"
    scale: tuple[float, float] = (0.08, 1.0)  # share of the image's area, for crop "resized"
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width over height, for crop "resized"
    interpolation: str = "bicubic"  # or "bilinear"; of resized crops and RandAugment
    flip: bool = False  # half of the images mirrored
    rand_augment: str | None = None  # timm's notation, such as rand-m9-mstd0.5-inc1
    fill: tuple[int, ...] = (128,)  # RandAugment beyond the edge, 0 to 255: one, or per channel
    jitter: float = 0.0  # brightness, contrast, saturation times 1 +- this
    rotation: float = 0.0  # degrees either way
    erase_prob: float = 0.0
    erase_area: tuple[float, float] = (0.02, 1 / 3)  # share of the image
    erase_aspect: float = 0.3  # smallest height over width, and its inverse the largest
    clean_first: bool = False  # copies share a framing, and copy 0 is only framed

    def __post_init__(self) -> None:
        def need(fact: bool, name: str, remedy: str) -> None:
            if not fact:
                raise CasemateError(f"train.augment.{name}", getattr(self, name), remedy)

        need(self.size >= 1, "size", "must be at least 1")
        need(self.crop in ("none", "pad", "resized"), "crop", "is not one of none, pad and resized")
        need((self.pad > 0) == (self.crop == "pad"), "pad", "goes with crop=pad and is positive")
        need(0 < self.scale[0] <= self.scale[1], "scale", "must be two areas, small and large")
        need(0 < self.ratio[0] <= self.ratio[1], "ratio", "must be two ratios, small and large")
        need(self.interpolation in RESAMPLING, "interpolation", "is not bicubic or bilinear")
        need(self.jitter >= 0, "jitter", "must not be negative")
        need(0 <= self.rotation <= 180, "rotation", "is not in [0, 180] degrees")
        need(0 <= self.erase_prob <= 1, "erase_prob", "is not in [0, 1]")
        low, high = self.erase_area
        need(0 < low <= high <= 1, "erase_area", "must be two shares, small and large")
        need(0 < self.erase_aspect <= 1, "erase_aspect", "is not in (0, 1]")
        need(all(0 <= value <= 255 for value in self.fill), "fill", "is not in 0 to 255")
        need(len(self.fill) in (1, 3), "fill", "must be one value or three")
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
        on nothing else; the call draws from no shared generator and is safe in any thread.
        """
        self._check(images, item_ids, repeats)
        if not len(images):
            return torch.empty(0, images.shape[1], self.size, self.size, device=images.device)
        draws = Draws(copy_names(item_ids, repeats), run_seed, epoch)
        if not self.clean_first:
            return self._altered(self._framed(images, draws), draws)
        framed = self._framed(images, Draws(tuple(item_ids), run_seed, epoch))
        result = _to_unit(framed)
        rows = torch.nonzero(torch.as_tensor(repeats))[:, 0]
        result[rows] = self._altered(framed[rows], draws.only(rows))
        return result

    def _framed(self, images: Tensor, draws: Draws) -> Tensor:
        """Crop and mirror image, still uint8."""
        words = draws.words().to(images.device)
        if self.crop == "pad":
            images = pad_crop(images, words, pad=self.pad)
        if self.crop == "resized":
            height, width = images.shape[-2:]
            places = crop_boxes(draws, image=(height, width), scale=self.scale, ratio=self.ratio)
            images = resize_crops(images, places, size=self.size, interpolation=self.interpolation)
        return mirror(images, words) if self.flip else images

    def _altered(self, framed: Tensor, draws: Draws) -> Images:
        """RandAugment in 8 bits, as it is defined; the rest on [0, 1]."""
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
            images = erase(
                images,
                draws,
                prob=self.erase_prob,
                area=self.erase_area,
                aspect=self.erase_aspect,
            )
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
        if self.clean_first and repeats is None:
            raise ValueError("clean_first needs `repeats`: which copy each image is")
        _, channels, height, width = images.shape
        if (self.rand_augment or self.jitter) and channels not in (1, 3):
            raise ValueError(f"colours need 1 or 3 channels, not {channels}")
        if self.crop != "resized" and (height, width) != (self.size, self.size):
            remedy = f"keeps the stored {height}x{width} pixels, but size is {self.size}"
            raise CasemateError("train.augment.crop", self.crop, f"{remedy}; choose resized")


def _to_unit(images: Tensor) -> Images:
    return images.to(torch.float32) / 255
