"""Linear centred kernel alignment between the outputs of all pairs of blocks.

Kornblith et al. 2019, sec. 3: CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with the Gram matrices
K = X X^T, L = Y Y^T of n images; it compares outputs of different shapes. `exact` uses the biased
HSIC of all images at once; `minibatch` averages the unbiased HSIC_1 (Song et al. 2012) over
batches before the ratio (Nguyen, Raghu & Kornblith 2021), which estimates the same value
without a bias from the batch size. Its values may leave [0, 1] slightly.

Symbols: n = images of a batch, B = number of blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from components.analyze.blocks import Blocks, Stream
from components.analyze.correlation import chosen_streams
from components.analyze.settings import CorrelationSettings
from components.core.errors import CasemateError
from components.core.types import Array, FloatArray, Images, LogitsFn

CHUNK = 4096  # features that are converted to float64 at a time
FEWEST = 4  # images of a batch: HSIC_1 divides by n - 3


def estimator_of(how: CorrelationSettings, *, num_items: int) -> str:
    """`exact` or `minibatch`, for this number of images."""
    if how.estimator is not None:
        return how.estimator
    return "exact" if num_items <= how.cka_batch else "minibatch"


def even_batches(item_ids: Sequence[str], how: CorrelationSettings) -> list[tuple[str, ...]]:
    """The batches of a study, all of them for `exact`; their sizes differ by at most one.

    Equal sizes, because every batch has the same weight.
    """
    count = len(item_ids)
    if count < FEWEST:
        raise CasemateError(
            "subset.num_items", count, f"is too small for CKA, which needs {FEWEST}"
        )
    if estimator_of(how, num_items=count) == "exact":
        return [tuple(item_ids)]
    num_batches = max(1, min(-(-count // how.cka_batch), count // FEWEST))
    edges = [count * place // num_batches for place in range(num_batches + 1)]
    return [tuple(item_ids[a:b]) for a, b in pairwise(edges)]


@dataclass(frozen=True, eq=False, slots=True)
class MinibatchCka:
    """Sums of HSIC_1 over batches."""

    total: FloatArray  # (B, B)
    num: int

    @classmethod
    def of(cls, grams: Tensor) -> "MinibatchCka":
        """From (B, n, n) Gram matrices of one batch."""
        return cls(unbiased_hsic(grams).cpu().numpy(), 1)

    def merged(self, other: "MinibatchCka") -> "MinibatchCka":
        """The state of both."""
        return MinibatchCka(self.total + other.total, self.num + other.num)

    def matrix(self) -> FloatArray:
        """(B, B) CKA; NaN where HSIC_1 of a block with itself is not positive."""
        return _ratio(self.total / self.num)

    def arrays(self) -> dict[str, Array]:
        """The content of the state."""
        return {"total": self.total, "num": np.array(self.num)}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Array]) -> "MinibatchCka":
        """The state that `arrays` describes."""
        return cls(arrays["total"], int(arrays["num"]))


def exact_cka(grams: Tensor) -> FloatArray:
    """(B, B) CKA from (B, n, n) Gram matrices of all images."""
    rows = grams - grams.mean(dim=1, keepdim=True)
    centred = (rows - rows.mean(dim=2, keepdim=True)).flatten(1)
    found: FloatArray = np.clip(_ratio((centred @ centred.T).cpu().numpy()), 0, 1)
    return found


def unbiased_hsic(grams: Tensor) -> Tensor:
    """(B, B) HSIC_1 of all pairs, from (B, n, n) Gram matrices.

    HSIC_1 = [tr(K L) + (1'K1)(1'L1) / ((n-1)(n-2)) - 2 1'KL1 / (n-2)] / (n (n-3)), zero diagonals.
    """
    n = grams.shape[1]
    if n < FEWEST:
        raise ValueError(f"HSIC_1 needs {FEWEST} images or more, got {n}")
    hollow = grams.clone()
    hollow.diagonal(dim1=1, dim2=2).zero_()
    flat, sums = hollow.flatten(1), hollow.sum(dim=2)
    whole = sums.sum(dim=1)
    traces = flat @ flat.T
    outer = whole[:, None] * whole[None] / ((n - 1) * (n - 2))
    return (traces + outer - 2 * (sums @ sums.T) / (n - 2)) / (n * (n - 3))


def _ratio(hsic: FloatArray) -> FloatArray:
    own = np.diagonal(hsic)
    product = own[:, None] * own[None]
    usable = (own[:, None] > 0) & (own[None] > 0)
    found: FloatArray = np.where(usable, hsic / np.sqrt(np.where(usable, product, 1.0)), np.nan)
    places = np.arange(len(own))
    found[places, places] = np.where(own > 0, 1.0, np.nan)
    return found


def gram(values: Tensor) -> Tensor:
    """(n, n) float64 inner products of (n, ...) outputs around their mean.

    Both forms of HSIC ignore the mean. Features are summed in chunks, so float64 copies stay small.
    """
    if not isinstance(values, Tensor) or values.dtype not in (torch.float32, torch.float64):
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        remedy = f"does not fit outputs of {kind}; blocks must return one float32 tensor"
        raise CasemateError("measure", "cka", remedy)
    rows = values.flatten(1)
    found = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for part in torch.split(rows, CHUNK, dim=1):
        wide = part.double()
        wide = wide - wide.mean(dim=0)  # a common offset would cost digits of the differences
        found += wide @ wide.T
    return found


@torch.no_grad()
def block_grams(
    logits_of: LogitsFn, blocks: Blocks, x: Images, how: CorrelationSettings
) -> dict[str, Tensor]:
    """(B, n, n) Gram matrices by stream, from one forward pass of all n images.

    Each block's output is reduced at once, so memory holds one of them. Hold `attack_mode(model)`
    around the call.
    """
    streams, kept = chosen_streams(blocks, how), _Grams()
    blocks.check_eval()
    blocks.check_named(logits_of, x)
    with ExitStack() as stack:
        for stream in streams:
            for place in stream.positions:
                hook = blocks.sites[place].module.register_forward_hook(kept.keeper(stream, place))
                stack.callback(hook.remove)
        logits_of(x)
    found: dict[str, Tensor] = {}
    for stream in streams:
        grams = [kept[stream.name, place] for place in stream.positions]
        found[stream.name] = torch.stack(grams)
    return found


class _Grams(dict[tuple[str, int], Tensor]):
    """Gram matrices by stream and block."""

    def keeper(self, stream: Stream, place: int) -> Callable[..., None]:
        """A hook that reduces the output of a block at once."""

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            self[stream.name, place] = gram(output[:, :1] if stream.first_token_only else output)

        return keep


def cka_states(
    logits_of: LogitsFn, blocks: Blocks, x: Images, how: CorrelationSettings
) -> dict[str, MinibatchCka]:
    """States of one of `even_batches`, by stream."""
    grams = block_grams(logits_of, blocks, x, how)
    return {name: MinibatchCka.of(values) for name, values in grams.items()}


def exact_matrices(
    logits_of: LogitsFn, blocks: Blocks, x: Images, how: CorrelationSettings
) -> dict[str, FloatArray]:
    """(B, B) exact CKA by stream, of all images of a study."""
    grams = block_grams(logits_of, blocks, x, how)
    return {name: exact_cka(values) for name, values in grams.items()}
