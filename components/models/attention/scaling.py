"""One factor per attention module on its pre-softmax logits: softmax(s * Q K^T / sqrt(d)) V.

Jain & Dutta, "Towards Understanding and Improving Adversarial Robustness of Vision Transformers",
eq. 2; there lambda, here one entry of `scales` (S, one per softmax attention module).

The factor goes into the weights in which the logits are linear (the query rows of a projection, the
affine part of a query norm, XCiT's temperature), not into timm's `scale`, which the fused path
ignores. So position biases and Swin's window mask stay as they are, hooks and folding use one
formula, and a factor of 1 changes no bit: w * 1 = w in floating point.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from timm.models.cait import ClassAttn, TalkingHeadAttn
from timm.models.levit import Attention as LevitAttention
from timm.models.levit import AttentionDownsample
from timm.models.xcit import XCA
from torch import Tensor, nn

from components.core.errors import CasemateError
from components.models.attention.discover import (
    AttentionSite,
    attention_of,
    check_patchable,
    check_uncompiled,
)


@dataclass(frozen=True, slots=True, eq=False)
class LogitWeight:
    """A parameter in whose rows (all, if None) the logits are linear."""

    owner: nn.Module
    name: str
    rows: Tensor | None = None  # bool, along the first dimension

    def times(self, scale: Tensor) -> Tensor:
        """The weight with its rows multiplied by a scale, differentiable in both."""
        weight: Tensor = getattr(self.owner, self.name)
        scale = scale.to(weight)
        if self.rows is None:
            return weight * scale
        factors = torch.where(self.rows.to(weight.device), scale, torch.ones_like(scale))
        return weight * factors.view(-1, *[1] * (weight.dim() - 1))


def logit_weights(site: AttentionSite) -> list[LogitWeight]:
    """The weights that are multiplied by the factor of one attention module."""
    attn: Any = site.module
    if isinstance(attn, XCA):
        return [LogitWeight(attn, "temperature")]
    if isinstance(attn, TalkingHeadAttn):
        return _affine(attn.proj_l)
    if isinstance(attn, ClassAttn):
        return _affine(attn.q)
    if isinstance(attn, AttentionDownsample):
        return _affine(attn.q.ln.bn)
    if isinstance(attn, LevitAttention):  # query, key and value of one head are adjacent
        channel = torch.arange(attn.qkv.bn.num_features) % (2 * attn.key_dim + attn.val_dim)
        return _affine(attn.qkv.bn, channel < attn.key_dim)
    return _query_weights(site.name, attn)


def _query_weights(name: str, attn: Any) -> list[LogitWeight]:
    """Token and window attention: the last affine map of the queries."""
    norm = getattr(attn, "q_norm", None)
    if norm is not None and not isinstance(norm, nn.Identity):
        if getattr(norm, "weight", None) is None:
            raise CasemateError(
                "model.architecture",
                f"{name}.q_norm",
                "normalises queries without weights, so there is no weight to scale",
            )
        return _affine(norm)
    if attn.qkv is None:
        return _affine(attn.q_proj)
    out = attn.qkv.weight.shape[0]
    weights = _affine(attn.qkv, torch.arange(out) < out // 3)
    if getattr(attn, "q_bias", None) is not None:  # BEiT and Eva store the bias outside the layer
        weights.append(LogitWeight(attn, "q_bias"))
    return weights


def _affine(layer: nn.Module, rows: Tensor | None = None) -> list[LogitWeight]:
    present = [name for name in ("weight", "bias") if getattr(layer, name, None) is not None]
    return [LogitWeight(layer, name, rows) for name in present]


class _ScaleHook:
    """Multiplies the logit weights of one module while it runs.

    An object with bound methods, not a closure: a deep copy of the network (weight averaging) then
    reads its own scales and touches its own layers. The product is formed in every forward pass, so
    it follows the optimizer and each pass has its own graph.
    """

    def __init__(
        self, module: nn.Module, weights: list[LogitWeight], *, holder: Any, index: int
    ) -> None:
        self.weights = weights
        self.holder = holder  # the module that has `attention_scales`
        self.index = index
        self.handles = [
            module.register_forward_pre_hook(self.before, prepend=True),
            module.register_forward_hook(self.after, always_call=True),
        ]

    def before(self, module: nn.Module, args: Any) -> None:
        scale = self.holder.attention_scales[self.index]
        for weight in self.weights:
            vars(weight.owner)[weight.name] = weight.times(scale)  # hides it: see shadow.py

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.clear()

    def clear(self) -> None:
        for weight in self.weights:
            vars(weight.owner).pop(weight.name, None)

    def remove(self) -> None:
        self.clear()  # an interrupt skips even `always_call`
        for handle in self.handles:
            handle.remove()


def _carriers(net: nn.Module, scales: Tensor) -> list[tuple[nn.Module, list[LogitWeight]]]:
    """All attention modules with their logit weights, collected before any change."""
    sites = attention_of(net)
    if scales.shape != (len(sites),):
        raise ValueError(
            f"need one scale for each of {len(sites)} attention modules, got {tuple(scales.shape)}"
        )
    return [(site.module, logit_weights(site)) for site in sites]


def _install(carriers: list[tuple[nn.Module, list[LogitWeight]]], holder: Any) -> list[_ScaleHook]:
    return [
        _ScaleHook(module, weights, holder=holder, index=index)
        for index, (module, weights) in enumerate(carriers)
    ]


@contextmanager
def scaled_attention(net: nn.Module, scales: Tensor) -> Iterator[None]:
    """Inside, module i of `attention_of(net)` multiplies its logits by `scales[i]`.

    Gradients flow into `scales`. Backward passes may run after the context has ended.
    """
    carriers = _carriers(net, scales)
    check_patchable(net)
    hooks = _install(carriers, SimpleNamespace(attention_scales=scales))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def attach_scales(net: nn.Module, scales: Tensor) -> None:
    """Scale until `detach_scales`, from `net.attention_scales`, for training.

    A `Parameter` is learned with the network, another tensor becomes a buffer; both are in the
    state dict, so attach scales before loading the weights of a resumed network.
    """
    carriers = _carriers(net, scales)
    check_uncompiled(net)
    if hasattr(net, "attention_scales"):
        raise ValueError("the network has scales already; detach them first")
    if isinstance(scales, nn.Parameter):
        net.register_parameter("attention_scales", scales)
    else:
        net.register_buffer("attention_scales", scales)
    holder: Any = net
    holder.attention_hooks = _install(carriers, net)


def detach_scales(net: nn.Module) -> Tensor:
    """Remove attached scales and return them; `fold_scales` makes them permanent."""
    holder: Any = net
    if not hasattr(net, "attention_scales"):
        raise ValueError("the network has no attached scales")
    for hook in holder.attention_hooks:
        hook.remove()
    scales: Tensor = holder.attention_scales.detach()
    del holder.attention_hooks, holder.attention_scales
    return scales


@torch.no_grad()
def fold_scales(net: nn.Module, scales: Tensor) -> None:
    """Multiply the scales into the weights, in place: equal to attached scales, without hooks."""
    for scale, (_, weights) in zip(scales, _carriers(net, scales), strict=True):
        for weight in weights:
            getattr(weight.owner, weight.name).copy_(weight.times(scale))
