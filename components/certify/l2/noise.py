"""Predictions under Gaussian noise, a block of draws at a time, the same on every worker.

Draw i of an item depends on (run seed, stream, item id, i) and the recorded generator alone, and
every forward pass has the same number of rows, because logits change in the last bits with the
batch shape and a near tie could flip a vote.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.core.errors import CasemateError
from components.core.evaluations import EVALUATIONS
from components.core.noise_streams import NoiseKind
from components.core.precision import reduced
from components.core.prefetch import cores_left, made_ahead
from components.core.seeding import DrawSpan, device_normals, standard_normals
from components.core.settings import FLOAT32
from components.core.transfers import sent
from components.core.types import Images, Logits, LogitsFn
from components.denoising.classifier import DenoisedClassifier
from components.denoising.samplers import draws_of_samples
from components.models.logits import check_independent_rows
from components.models.pixels import PixelModel

FAR = 4  # standard deviations of noise: pixels of draws are rarely farther outside [0, 1]


def noisy_draws(
    image: Tensor,
    draws: DrawSpan,
    *,
    sigma: float,
    noise: NoiseKind = "numpy",
    device: torch.device | str = "cpu",
) -> Images:
    """(N, C, H, W) float32: image + sigma * z_i in pixels of [0, 1], not clipped.

    Noise that is clipped here would not be Gaussian; the model itself may clip. Generator `philox`
    works on `device`; `numpy` on the host, in pinned memory where a GPU will fetch it.
    """
    _check_image(image)
    if not 0 <= draws.start < draws.stop:
        raise ValueError(f"need 0 <= start < stop, got {draws}")
    if noise == "philox":
        made = device_normals(draws, shape=tuple(image.shape), device=device)
        return made.mul_(float(float32_at_least(sigma))).add_(sent(image, device))
    pinned = torch.device(device).type == "cuda"
    rows = torch.empty(draws.size, *image.shape, pin_memory=pinned)
    values: NDArray[np.float32] = rows.numpy()
    standard_normals(draws, shape=tuple(image.shape), out=values)
    values *= float32_at_least(sigma)
    values += image.numpy()
    return rows


def predict_block(
    logits_of: LogitsFn | DenoisedClassifier,
    image: Tensor,
    draws: DrawSpan,
    *,
    sigma: float,
    micro_batch: int,
    device: torch.device | str,
    noise: NoiseKind = "numpy",
    precision: str = FLOAT32,
) -> NDArray[np.uint16]:
    """(N,) predicted classes of these draws; ties go to the lowest class.

    Blocks start at multiples of `micro_batch`: then the forward passes, hence the votes, do not
    depend on how an item's draws are split into blocks. While the device computes a pass, a thread
    prepares the noise of the next one; predictions stay on the device until the block is done.
    """
    if micro_batch < 1 or draws.start % micro_batch:
        raise ValueError(f"a block must start at a multiple of {micro_batch=}, got {draws.start}")
    kind = torch.device(device).type
    predictions, broken = [], []
    with torch.inference_mode():
        for span, rows in _passes(image, sigma, draws, micro_batch, noise, device):
            noisy = _padded(sent(rows, device), micro_batch)
            with reduced(precision, kind):
                logits = _logits(logits_of, noisy, span, noise).float()
            EVALUATIONS.add(len(rows))
            predictions.append(logits.argmax(dim=1))  # first maximum
            broken.append(~logits.isfinite().all())
        found = torch.cat(predictions)[: draws.size].cpu().numpy()  # drop the padding
        bad = torch.stack(broken).cpu().numpy()
    if bad.any():
        low = draws.start + micro_batch * int(bad.argmax())
        high = min(low + micro_batch, draws.stop) - 1
        remedy = f"gets logits that are not finite for draws {low} to {high}; look for NaN or "
        remedy += "overflow in the weights"
        raise CasemateError("model", f"item {draws.item_id!r}", remedy)
    return found.astype(np.uint16)


def _passes(
    image: Tensor,
    sigma: float,
    draws: DrawSpan,
    micro_batch: int,
    noise: NoiseKind,
    device: torch.device | str,
) -> Iterator[tuple[DrawSpan, Images]]:
    """The draws of each forward pass, those of the next one made ahead where a core is free."""
    spans = [
        draws._replace(start=low, stop=min(low + micro_batch, draws.stop))
        for low in range(draws.start, draws.stop, micro_batch)
    ]

    def draw(span: DrawSpan) -> tuple[DrawSpan, Images]:
        return span, noisy_draws(image, span, sigma=sigma, noise=noise, device=device)

    on_host = noise == "numpy"  # a device queues its own noise
    free = torch.device(device).type != "cpu" or cores_left(torch.get_num_threads())
    yield from made_ahead(draw, spans, in_thread=on_host and free and len(spans) > 1)


def _logits(
    logits_of: LogitsFn | DenoisedClassifier, noisy: Images, span: DrawSpan, noise: NoiseKind
) -> Logits:
    """Logits of one pass; a denoiser that samples gets normals of the same draws."""
    if not isinstance(logits_of, DenoisedClassifier):
        return logits_of(noisy)
    draws = draws_of_samples(span, shape=tuple(noisy.shape[1:]), noise=noise, device=noisy.device)
    return logits_of(noisy, lambda step: _padded(draws(step), len(noisy)))  # type: ignore[no-any-return]


def _padded(rows: Tensor, count: int) -> Tensor:
    """`count` rows: every pass has the same shape, filled up with copies of the first row."""
    if len(rows) == count:
        return rows
    return torch.cat([rows, rows[:1].expand(count - len(rows), *rows.shape[1:])])


def _check_image(image: Tensor) -> None:
    if image.ndim != 3 or image.dtype != torch.float32 or image.device.type != "cpu":
        raise ValueError(f"expected (C, H, W) float32 on the CPU, got {image.dtype} {image.shape}")
    if not bool(((image >= 0) & (image <= 1)).all()):  # nan fails both
        raise ValueError("pixels must be finite and in [0, 1]")


def float32_at_least(sigma: float) -> np.float32:
    """sigma in float32, rounded up: a claim is sound only if at least `sigma` was added."""
    if not (0 < sigma < np.inf):
        raise ValueError(f"sigma must be positive and finite, got {sigma}")
    scale = np.float32(sigma)
    return scale if float(scale) >= sigma else np.nextafter(scale, np.float32(np.inf))


def check_draws_alone(
    classify: PixelModel | DenoisedClassifier, images: Images, *, sigma: float
) -> None:
    """Reject a network whose prediction for a draw depends on other draws; on a few images."""
    logits_of: LogitsFn = classify
    if isinstance(classify, DenoisedClassifier):
        logits_of = partial(_without_sampling_noise, classify)
    name = classify.spec.architecture
    check_independent_rows(logits_of, images, network=classify, name=name, beyond=FAR * sigma)


def _without_sampling_noise(classify: DenoisedClassifier, x: Images) -> Logits:
    found: Logits = classify(x, lambda step: torch.zeros(x.shape))
    return found
