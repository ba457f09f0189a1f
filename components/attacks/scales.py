"""Factors on attention logits: the same one everywhere, or a set found by gradient ascent.

Adaptive attention scaling (AAS): Jain & Dutta, "Towards Understanding and Improving Adversarial
Robustness of Vision Transformers", sec. 4, Algorithm 1. The text is ambiguous; our reading:
- m counts every softmax attention module, class attention included;
- the step size is 1, and S becomes S' after the ascent of a mini-batch, not inside it;
- gradients are taken at the clamped S' and added to delta, which is then S' - S (no wind-up);
- eq. 3 as printed falls when features grow, so a scale-free distance is the default.
With unit noise around S = 1 the clamp sets half of the entries to 1 and one in six to 1e-7, and
ten small gradients change little: the draw matters more than the ascent. Hence several draws, each
of which gives a candidate.

Symbols: S, S' = factors of the reference and of the perturbed network; delta = S' - S before the
clamp; a, b = features of one image after one block, perturbed and reference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from timm.models.levit import Levit
from torch import Tensor, nn

from components.attacks.gradient import guidance
from components.attacks.interface import Items
from components.attacks.losses import cross_entropy, margin
from components.attacks.settings import ScaleAscentSettings
from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.core.settings import settings
from components.core.types import Images, Labels, Logits, LogitsFn
from components.models.attention.discover import attention_of
from components.models.attention.features import block_outputs
from components.models.attention.scaling import scaled_attention

Scales = tuple[float, ...]  # one factor per attention module, in execution order

LOWEST = 1e-7  # 10^-r of Algorithm 1, r = 7: a factor of 0 would remove the input of attention


def global_scales(net: nn.Module, scale: float) -> Scales:
    """The same factor in every attention module (sec. 3, Table 1)."""
    if not scale > 0:
        raise CasemateError(
            "aas.scale", scale, "is not a factor of attention logits; write one > 0"
        )
    return (float(scale),) * len(attention_of(net))


def unit_distance(a: Tensor, b: Tensor) -> Tensor:
    """(B,) mean over tokens of |a/|a| - b/|b||^2, norms over channels: LPIPS without its weights.

    Zhang et al. 2018, eq. 1, with (B, N, C) features of the attacked network itself.
    """
    return (F.normalize(a, dim=-1) - F.normalize(b, dim=-1)).square().sum(dim=-1).mean(dim=1)


def literal_distance(a: Tensor, b: Tensor) -> Tensor:
    """(B,) |a - b| / (|a| |b|), norms over the whole feature: a summand of eq. 3 as printed."""
    return _norm(a - b) / (_norm(a) * _norm(b))


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """(B,) |a - b|^2 / (|a| |b|) = |a/|a| - b/|b||^2 + (|a| - |b|)^2 / (|a| |b|), free of scale."""
    return _norm(a - b).square() / (_norm(a) * _norm(b))


def _norm(feature: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(feature.flatten(1), dim=1)
    return norm  # its gradient at 0 is 0, not NaN


DISTANCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "unit": unit_distance,
    "eq3_squared": squared_distance,
    "eq3_literal": literal_distance,
}


@settings
class ScaleSearch(ScaleAscentSettings):
    """Algorithm 1: random factors near S, then ascent on how much they change the network.

    The factors increase the `objective` (Table 2): `lpips`, a `distance` of features summed over
    blocks, or a loss of the perturbed network on clean images. The caller takes the `num_items`.
    """

    def __call__(self, model: LogitsFn, net: nn.Module, reference: Items) -> tuple[Scales, ...]:
        """One set of factors per draw, from reference items that the caller fixes for a whole run.

        S starts at 1 and is carried from one mini-batch of `reference` to the next (one mini-batch:
        the search of a single evaluated batch). It is not searched again for every batch under
        attack: an item's result would depend on the other items, and a search per item costs as
        much as the attack. `model` must send its whole input through `net` at once. Hold
        `attack_mode(model)` around the call.
        """
        if net.training:
            raise ValueError("features need eval mode: hold attack_mode(model) around the search")
        return tuple(self._draw(model, net, reference, draw) for draw in range(self.num_draws))

    def _draw(self, model: LogitsFn, net: nn.Module, reference: Items, draw: int) -> Scales:
        scales = torch.ones(len(attention_of(net)))
        edges = [*range(0, len(reference), self.batch_size), len(reference)]
        for first, last in pairwise(edges):
            generator = generator_for(reference.run_seed, "attention scales", draw, first)
            noise = self.noise * torch.randn(len(scales), generator=generator)
            batch = reference.take(torch.arange(first, last, device=reference.x.device))
            scales = self.ascent(model, net, batch, scales=scales, delta=noise)
        return tuple(scales.tolist())

    def ascent(
        self, model: LogitsFn, net: nn.Module, batch: Items, *, scales: Tensor, delta: Tensor
    ) -> Tensor:
        """S' after lines 4 to 7 of Algorithm 1 on one mini-batch."""
        with torch.no_grad():
            fixed = _run(model, net, batch.x, scales)
        moved = (scales + delta).clamp(LOWEST, 1)
        for step in range(self.num_steps):
            with torch.enable_grad():
                leaf = moved.detach().requires_grad_()
                values = self._values(_run(model, net, batch.x, leaf), fixed, batch.y, step)
                (gradient,) = torch.autograd.grad(values.mean(), leaf)
            if not bool(gradient.isfinite().all()):
                raise FloatingPointError(
                    f"gradient of attention scales {moved.tolist()}: {gradient}"
                )
            moved = (scales + delta + self.step_size * gradient).clamp(LOWEST, 1)
            delta = moved - scales
        return moved

    def _values(self, moved: "_Run", fixed: "_Run", y: Labels, step: int) -> Tensor:
        """(B,) objective."""
        if self.objective == "lpips":
            distance = DISTANCES[self.distance]
            pairs = zip(moved.features, fixed.features, strict=True)
            return torch.stack([distance(a, b) for a, b in pairs]).sum(dim=0)
        if self.objective == "ce":
            return cross_entropy(moved.logits, y)
        if self.objective == "margin":
            return margin(moved.logits, y)
        probs, guide = moved.logits.softmax(dim=1), fixed.logits.softmax(dim=1)
        away = (probs - guide).square().sum(dim=1)
        return margin(probs, y) + guidance(step, num_steps=self.num_steps) * away


@dataclass(frozen=True, slots=True)
class _Run:
    """One forward pass of a network with scaled attention."""

    logits: Logits
    features: list[Tensor]  # (B, N, C) after every block


def _run(model: LogitsFn, net: nn.Module, x: Images, scales: Tensor) -> _Run:
    with scaled_attention(net, scales), block_outputs(net) as outputs:
        logits = model(x)
    features = [_tokens(net, output) for output in outputs.values()]
    if any(len(feature) != len(x) for feature in features):
        raise ValueError(f"the model splits or pads its input: {len(x)} rows, others in its blocks")
    return _Run(logits, features)


def _tokens(net: nn.Module, output: Tensor) -> Tensor:
    """(B, N, C); maps of tokens keep channels last, but for LeViT's convolutional form."""
    if output.dim() == 4 and isinstance(net, Levit):
        return output.flatten(2).transpose(1, 2)
    return output.flatten(1, -2)
