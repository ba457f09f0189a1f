"""Absolute Pearson correlation between the outputs of all pairs of blocks, streamed in float64.

Bhojanapalli et al. 2021, sec. 4 and appendix F: the residual stream after each block, before the
final norm. Means and co-moments are merged by the formula of Chan, Golub & LeVeque 1983, which does
not cancel where a block's mean is far larger than its spread.

Symbols: L = number of blocks, T = tokens, D = channels, G = number of correlations that are
averaged: 1 (`flat`), D (`per_feature`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from components.analyze.blocks import Blocks, Stream
from components.analyze.settings import CorrelationSettings
from components.core.errors import CasemateError
from components.core.types import Array, FloatArray, Images, LogitsFn
from components.evaluate.metrics import Measurement, null
from components.models.attention.features import block_outputs


@dataclass(frozen=True, eq=False, slots=True)
class PooledPearson:
    """Means and co-moments of G paired samples (modes `flat` and `per_feature`)."""

    num: int  # entries of each sample
    mean: FloatArray  # (G, L)
    comoment: FloatArray  # (G, L, L)

    @classmethod
    def of(cls, values: Tensor) -> "PooledPearson":
        """From (G, L, M) float64: M entries of each of the G samples."""
        mean = values.mean(dim=2)
        centred = values - mean[..., None]
        comoment = centred @ centred.transpose(1, 2)
        return cls(values.shape[2], mean.cpu().numpy(), comoment.cpu().numpy())

    def merged(self, other: "PooledPearson") -> "PooledPearson":
        """The state of both."""
        num = self.num + other.num
        apart = other.mean - self.mean
        between = apart[:, :, None] * apart[:, None, :] * (self.num * other.num / num)
        return PooledPearson(
            num,
            self.mean + apart * (other.num / num),
            self.comoment + other.comoment + between,
        )

    def matrix(self) -> FloatArray:
        """(L, L) mean of |rho| over the G samples; NaN where a block is constant in all of them."""
        return _mean_where_defined(absolute_rho(self.comoment))

    def arrays(self) -> dict[str, Array]:
        """The content of the state."""
        return {"num": np.array(self.num), "mean": self.mean, "comoment": self.comoment}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Array]) -> "PooledPearson":
        """The state that `arrays` describes."""
        return cls(int(arrays["num"]), arrays["mean"], arrays["comoment"])


@dataclass(frozen=True, eq=False, slots=True)
class SamplePearson:
    """Sum of |rho| over images (mode `per_sample`)."""

    total: FloatArray  # (L, L)
    num: Array  # (L, L) images in which both blocks vary

    @classmethod
    def of(cls, values: Tensor) -> "SamplePearson":
        """From (L, M) float64 of one image."""
        centred = values - values.mean(dim=1, keepdim=True)
        rho = absolute_rho((centred @ centred.T).cpu().numpy())
        return cls(np.nan_to_num(rho), (~np.isnan(rho)).astype(np.int64))

    def merged(self, other: "SamplePearson") -> "SamplePearson":
        """The state of both."""
        return SamplePearson(self.total + other.total, self.num + other.num)

    def matrix(self) -> FloatArray:
        """(L, L) mean of |rho| over images; NaN where a block is constant in all of them."""
        with np.errstate(invalid="ignore"):
            mean: FloatArray = self.total / self.num
        return mean

    def arrays(self) -> dict[str, Array]:
        """The content of the state."""
        return {"total": self.total, "num": self.num}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Array]) -> "SamplePearson":
        """The state that `arrays` describes."""
        return cls(arrays["total"], arrays["num"])


PearsonState = PooledPearson | SamplePearson


def read_state(arrays: Mapping[str, Array]) -> PearsonState:
    """A stored state of either kind."""
    return (SamplePearson if "total" in arrays else PooledPearson).of_arrays(arrays)


def absolute_rho(comoment: FloatArray) -> FloatArray:
    """(..., L, L) |rho| from co-moments: 1 on the diagonal, NaN where a variance is 0."""
    spread = np.sqrt(np.diagonal(comoment, axis1=-2, axis2=-1))
    product = spread[..., :, None] * spread[..., None, :]
    with np.errstate(invalid="ignore", divide="ignore"):
        rho: FloatArray = np.minimum(np.abs(comoment / product), 1.0)  # NaN stays NaN
    places = np.arange(rho.shape[-1])
    rho[..., places, places] = np.where(spread > 0, 1.0, np.nan)
    rho[product == 0] = np.nan
    return rho


def matrix_measurements(
    matrix: FloatArray, *, stream: str, metric: str, num_items: int
) -> list[Measurement]:
    """One row per pair of blocks i <= j (`all/0-3`); null where the similarity is undefined.

    `metric` names measure and mode or estimator: `pearson_flat`, `cka_minibatch`.
    """
    rows = []
    for i in range(len(matrix)):
        for j in range(i, len(matrix)):
            item, value = f"{stream}/{i}-{j}", float(matrix[i, j])
            if np.isfinite(value):
                rows.append(Measurement(item=item, metric=metric, value=value, n=num_items))
            else:
                rows.append(null(item=item, metric=metric, why="a block is constant"))
    return rows


def _mean_where_defined(values: FloatArray) -> FloatArray:
    defined = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: FloatArray = np.where(defined, values, 0.0).sum(axis=0) / defined.sum(axis=0)
    return mean


@torch.no_grad()
def pearson_states(
    logits_of: LogitsFn, blocks: Blocks, x: Images, how: CorrelationSettings
) -> dict[str, PearsonState]:
    """States of one batch by stream (`all`, `cls`), from one forward pass.

    Images are added one by one, in order: a unit of several batches merges their states. Hold
    `attack_mode(model)` around the call.
    """
    streams = chosen_streams(blocks, how)
    blocks.check_eval()
    blocks.check_named(logits_of, x)
    with block_outputs(blocks.net, blocks.sites) as outputs:
        logits_of(x)
    found = [outputs[name] for name in blocks.names]
    return {stream.name: _state(blocks, stream, found, how) for stream in streams}


def chosen_streams(blocks: Blocks, how: CorrelationSettings) -> list[Stream]:
    """The streams of a network that the settings ask for."""
    streams = [stream for stream in blocks.streams if stream.name in how.tokens]
    if not streams:
        name = type(blocks.net).__name__
        raise CasemateError("tokens", "cls", f"does not exist in {name}; its blocks have no CLS")
    return streams


def check_measure(blocks: Blocks, how: CorrelationSettings) -> None:
    """Raise an error if the measure does not suit the shapes of a family's outputs."""
    if how.measure == "pearson" and blocks.measure == "cka":
        name = type(blocks.net).__name__
        remedy = f"does not fit {name}, whose blocks return different shapes; use cka"
        raise CasemateError("measure", "pearson", remedy)


def _state(
    blocks: Blocks, stream: Stream, outputs: list[Tensor], how: CorrelationSettings
) -> PearsonState:
    values = stream.values(outputs)
    _check_shapes([blocks.names[place] for place in stream.positions], values, stream)
    state: Any = None
    for row in range(len(values[0])):
        image = torch.stack([value[row].double() for value in values])  # (L, T, D)
        one: Any = _of_image(image, how.mode)
        state = one if state is None else state.merged(one)
    found: PearsonState = state
    return found


def _of_image(image: Tensor, mode: str) -> PearsonState:
    if mode == "per_sample":
        return SamplePearson.of(image.flatten(1))
    if mode == "flat":
        return PooledPearson.of(image.flatten(1)[None])
    if image.dim() != 3:
        remedy = (
            f"needs tokens (B, N, C); blocks return (B, {', '.join(map(str, image.shape[1:]))})"
        )
        raise CasemateError("mode", mode, remedy)
    return PooledPearson.of(image.permute(2, 0, 1))


def _check_shapes(names: list[str], values: list[Tensor], stream: Stream) -> None:
    first = values[0]
    for name, value in zip(names, values, strict=True):
        if stream.first_token_only and value.dim() != 3:
            remedy = f"needs tokens (B, N, C); {name} returns {tuple(value.shape)}"
            raise CasemateError("tokens", "cls", remedy)
        if value.shape != first.shape:
            one, other = (tuple(v.shape[1:]) for v in (first, value))
            remedy = f"returns {other}, {names[0]} {one}: paired samples need equal shapes"
            raise CasemateError("measure", "pearson", f"does not fit: {name} {remedy}; use cka")
        if value.dtype not in (torch.float32, torch.float64):
            remedy = f"does not fit: {name} returns {value.dtype}; run the network in float32"
            raise CasemateError("measure", "pearson", remedy)
