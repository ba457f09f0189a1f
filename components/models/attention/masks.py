"""Which tokens may attend to which: forbidden logits become minus infinity before the softmax."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from components.core.errors import CasemateError
from components.models.attention.discover import AttentionSite, attention_of, check_patchable
from components.models.attention.softmax import SoftmaxTap, tapped

MASKABLE = ("tokens", "talking_heads", "class")
REASONS = {
    "channels": "its softmax runs over channels",
    "windows": "its tokens move between windows",
    "grid": "its grid of tokens shrinks between stages",
}


@contextmanager
def masked_pairs(
    net: nn.Module, allowed: Tensor, *, names: Collection[str] | None = None
) -> Iterator[None]:
    """Query i sees key j only where `allowed[..., i, j]`: bool, (N, N) or (B, N, N).

    N counts the tokens of the block's own sequence: prefix and patches in ViT, patches in CaiT,
    whose class attention has no such pairs and is unchanged. `names` selects attention modules.
    """
    if allowed.dtype != torch.bool or allowed.dim() not in (2, 3):
        raise ValueError("pairs must be bool, (N, N) or (B, N, N)")
    if allowed.shape[-1] != allowed.shape[-2]:
        raise ValueError(f"pairs must be square, got {tuple(allowed.shape)}")
    pairs = allowed[None] if allowed.dim() == 2 else allowed
    sites = [site for site in _maskable(net, names) if site.kind != "class"]
    if not sites:
        raise ValueError("no chosen attention module has token pairs; use keys for class attention")
    with _masked(sites, pairs[:, None]):
        yield


@contextmanager
def masked_keys(
    net: nn.Module, allowed: Tensor, *, names: Collection[str] | None = None
) -> Iterator[None]:
    """Token j of sample b is visible to queries only where `allowed[b, j]`: bool, (B, N) or (1, N).

    N as in `masked_pairs`. Class attention puts its class token, always visible, in front.
    """
    if allowed.dtype != torch.bool or allowed.dim() != 2:
        raise ValueError("keys must be bool, (B, N)")
    with _masked(_maskable(net, names), allowed[:, None, None, :]):
        yield


def _maskable(net: nn.Module, names: Collection[str] | None) -> list[AttentionSite]:
    sites = attention_of(net, names)
    check_patchable(net)
    for site in sites:
        if site.kind not in MASKABLE:
            raise CasemateError(
                site.name,
                type(site.module).__name__,
                f"takes no token mask: {REASONS[site.kind]}; "
                "masks work for ViT, DeiT, CaiT, BEiT, Eva and class attention",
            )
    return sites


@contextmanager
def _masked(sites: list[AttentionSite], allowed: Tensor) -> Iterator[None]:
    if not allowed.any(dim=-1).all():  # softmax of an empty set is NaN
        raise ValueError("every query needs at least one key that it may attend to")
    with ExitStack() as stack:
        for site in sites:
            shown = _with_class_token(allowed) if site.kind == "class" else allowed
            stack.enter_context(tapped([(site.module, _MaskTap(site.name, shown))]))
            if site.kind == "talking_heads":
                stack.enter_context(_no_weight_beyond(site.module, shown))
        yield


def _with_class_token(allowed: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(allowed[..., :1]), allowed], dim=-1)


class _MaskTap(SoftmaxTap):
    def __init__(self, name: str, allowed: Tensor) -> None:
        super().__init__()
        self.name = name
        self.allowed = allowed  # (B or 1, 1, Nq or 1, Nk)

    def explicit(self, logits: Tensor) -> Tensor:
        return logits.masked_fill(~self._fitting(logits.shape, logits.device), -torch.inf)

    def fused(self, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        shape = torch.Size([*query.shape[:-1], key.shape[-2]])
        allowed = self._fitting(shape, query.device)
        if mask is None:
            return allowed.expand(shape)
        if mask.dtype == torch.bool:
            return mask & allowed
        return torch.where(allowed, mask, -torch.inf)

    def _fitting(self, shape: torch.Size, device: torch.device) -> Tensor:
        """The mask on the device of the logits; raises an error if shapes do not match."""
        batch, _, queries, keys = self.allowed.shape
        wanted = (shape[0], shape[-2], shape[-1])
        if batch not in (1, shape[0]) or queries not in (1, shape[-2]) or keys != shape[-1]:
            raise ValueError(
                f"{self.name} has (samples, queries, keys) {wanted}, "
                f"the mask is for {(batch, queries, keys)}"
            )
        return self.allowed.to(device)


@contextmanager
def _no_weight_beyond(attn: Any, allowed: Tensor) -> Iterator[None]:
    """Zero the weights of hidden keys that the bias of talking heads adds after the softmax."""
    hidden = ~allowed.permute(0, 2, 3, 1)  # heads come last here

    def silence(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.masked_fill(hidden.to(output.device), 0)

    handle = attn.proj_w.register_forward_hook(silence)
    try:
        yield
    finally:
        handle.remove()
