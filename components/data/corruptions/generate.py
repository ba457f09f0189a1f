"""Corrupted copies of images: all randomness belongs to (seed, item, corruption, severity)."""

from collections.abc import Sequence
from typing import TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.core.seeding import generator_for
from components.data.corruptions.encoding import as_released
from components.data.corruptions.interface import Corruption, Draws
from components.data.corruptions.settings import (
    CORRUPTIONS,
    Fidelity,
    options_of,
    unit_of,
)
from components.data.sources.names import SEVERITIES

Pixels = TypeVar("Pixels", Tensor, NDArray[np.uint8])

STREAM = "corruption"
SMALLEST_SIDE = 8
CHUNK_ELEMENTS = 224 * 224 * 3  # of a pass on CPU: intermediate results stay in its cache


def corrupt(
    images: Pixels, *, name: str, severity: int, seed: int, item_ids: Sequence[str],
    fidelity: Fidelity = "raw", textures: str | None = None,
) -> Pixels:  # fmt: skip
    """Images (N, H, W, 3) uint8 under one corruption, as the type they came in.

    An image's result depends on its pixels, (seed, item id, name, severity) and the settings, not
    on the batch. `fidelity="released"` adds the JPEG files of the released ImageNet-C. `textures`
    is the folder of the photographs for frost; None: procedural ones.
    """
    writable = images if isinstance(images, Tensor) else np.require(images, requirements=["C", "W"])
    pixels = torch.as_tensor(writable)
    _check(pixels, name, severity, item_ids, fidelity)
    operator = corruption(name, textures=textures)
    unit = unit_of(name, severity)
    height, width = pixels.shape[1:3]
    result = torch.empty_like(pixels, memory_format=torch.contiguous_format)
    for rows in _chunks(pixels):
        draws = [
            operator.sample(generator_for(seed, STREAM, item, unit), height, width, severity)
            for item in item_ids[rows]
        ]
        part = operator.apply(pixels[rows], _stacked(draws, pixels.device), severity)
        result[rows] = part if fidelity == "raw" else as_released(part)
    return result if isinstance(images, Tensor) else result.numpy()


def corruption(name: str, *, textures: str | None = None) -> Corruption:
    """The corruption of this name."""
    made: Corruption = CORRUPTIONS[name].load()(**options_of(name, textures=textures))
    return made


def _check(
    images: Tensor, name: str, severity: int, item_ids: Sequence[str], fidelity: str
) -> None:
    if name not in CORRUPTIONS:
        raise ValueError(f"name: {name!r} is unknown; choose one of {', '.join(CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity: {severity} is not one of 1 to 5")
    if fidelity not in get_args(Fidelity):
        raise ValueError(f"fidelity: {fidelity!r} is neither raw nor released")
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        found = f"{images.dtype} {tuple(images.shape)}"
        raise ValueError(f"images: {found}; expected uint8 (N, H, W, 3)")
    if min(images.shape[1:3]) < SMALLEST_SIDE:
        raise ValueError(f"images: {tuple(images.shape)}; sides must be {SMALLEST_SIDE} or more")
    if isinstance(item_ids, str) or len(item_ids) != len(images):
        raise ValueError(f"item_ids: {len(item_ids)} for {len(images)} images")


def _chunks(images: Tensor) -> list[slice]:
    """Rows that are corrupted together: all of them on a GPU, few large ones on CPU."""
    size = max(1, CHUNK_ELEMENTS // images[0].numel()) if len(images) else 1
    size = size if images.device.type == "cpu" else max(1, len(images))
    return [slice(start, start + size) for start in range(0, len(images), size)]


def _stacked(draws: list[Draws], device: torch.device) -> Draws:
    if len(draws) == 1:
        return {key: value[None].to(device) for key, value in draws[0].items()}
    return {key: torch.stack([one[key] for one in draws]).to(device) for key in draws[0]}
