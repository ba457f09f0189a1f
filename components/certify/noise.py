"""Predictions under Gaussian noise, a block of draws at a time, the same on every worker.

Draw i of an item depends on (run seed, stream, item id, i) alone, and every forward pass has the
same number of rows, because logits change in the last bits with the batch shape and a near tie
could flip a vote.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.core.seeding import standard_normal
from components.core.types import Images, LogitsFn


def noisy_draws(
    image: Tensor, *, sigma: float, run_seed: int, stream: str, item_id: str, start: int, stop: int
) -> Images:
    """(stop - start, C, H, W) float32: image + sigma * z_i in pixels of [0, 1], not clipped.

    Clipping here would make the noise something else than Gaussian; a model may clip for itself.
    """
    _check_image(image)
    if not 0 <= start < stop:
        raise ValueError(f"need 0 <= start < stop, got {start=}, {stop=}")
    scale = _float32_at_least(sigma)
    shape = tuple(image.shape)
    draws = np.stack(
        [standard_normal(run_seed, stream, item_id, index, shape) for index in range(start, stop)]
    )
    return image + torch.from_numpy(scale * draws)


def predict_block(
    logits_of: LogitsFn,
    image: Tensor,
    *,
    sigma: float,
    run_seed: int,
    stream: str,
    item_id: str,
    start: int,
    stop: int,
    micro_batch: int,
    device: torch.device | str,
) -> NDArray[np.uint16]:
    """(stop - start,) predicted classes of these draws; ties go to the lowest class.

    Blocks start at multiples of `micro_batch`: then the forward passes, hence the votes, do not
    depend on how the draws of an item are cut into blocks.
    """
    if micro_batch < 1 or start % micro_batch:
        raise ValueError(f"a block must start at a multiple of {micro_batch=}, got {start=}")
    parts = []
    for low in range(start, stop, micro_batch):
        high = min(low + micro_batch, stop)
        rows = noisy_draws(
            image,
            sigma=sigma,
            run_seed=run_seed,
            stream=stream,
            item_id=item_id,
            start=low,
            stop=high,
        )
        padding = rows[:1].expand(micro_batch - len(rows), -1, -1, -1)
        with torch.inference_mode():
            logits = logits_of(torch.cat([rows, padding]).to(device)).float().cpu().numpy()
        if np.isnan(logits).any():
            raise ValueError(
                f"the model returned nan for item {item_id}, draws {low} to {high - 1}"
            )
        parts.append(logits[: len(rows)].argmax(axis=1))  # numpy: first maximum
    return np.concatenate(parts).astype(np.uint16)


def _check_image(image: Tensor) -> None:
    if image.ndim != 3 or image.dtype != torch.float32 or image.device.type != "cpu":
        raise ValueError(f"expected (C, H, W) float32 on the CPU, got {image.dtype} {image.shape}")
    if not bool(((image >= 0) & (image <= 1)).all()):  # nan fails both
        raise ValueError("pixels must be finite and in [0, 1]")


def _float32_at_least(sigma: float) -> np.float32:
    """sigma in float32, rounded up: a claim is sound only if at least that much was added."""
    if not (0 < sigma < np.inf):
        raise ValueError(f"sigma must be positive and finite, got {sigma}")
    scale = np.float32(sigma)
    return scale if float(scale) >= sigma else np.nextafter(scale, np.float32(np.inf))
