"""What a network costs per image: weights, multiply-accumulates, memory kept for the backward pass.

Everything is counted on torch's meta device, from shapes alone: the largest network takes a second
and no memory. A multiply-accumulate counts 1, as in the GFLOPs that papers on vision print; the
FLOPs of hardware sheets are twice that. Matrix products (attention's too) and convolutions count;
normalisation, activations, softmax and sums are left out, as is usual.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from components.core.errors import CasemateError
from components.models.spec import ModelSpec
from components.models.zoo import build_network

BATCH = 2**30  # so many images that what they share (codes of positions) rounds to nothing each
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FORMULAS = {  # torch's table knows fused attention on GPUs only
    **flop_registry,
    _FUSED: flop_registry[torch.ops.aten._scaled_dot_product_flash_attention],
}


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one network, and of each image of a large batch."""

    params: int
    flops: int  # multiply-accumulates of one forward pass
    activation_bytes: int  # float32 that autograd keeps for the backward pass


def costs_of(
    architecture: str,
    *,
    image_size: int,
    channels: int = 3,
    num_classes: int,
    options: Mapping[str, Any] | None = None,
) -> Costs:
    """Costs of the network that `build_network` makes of the same arguments."""
    with torch.device("meta"):
        net = build_network(
            architecture,
            image_size=image_size,
            channels=channels,
            num_classes=num_classes,
            options=options or {},
        ).eval()
        images = torch.empty(BATCH, channels, image_size, image_size)
        counter = _MacCounter()  # type: ignore[no-untyped-call]
        try:
            with counter, _FusedAttention():
                kept = kept_bytes(net, images)
        except RuntimeError as error:
            raise CasemateError(
                "model.architecture", architecture, f"looks at values, not shapes alone: {error}"
            ) from error
    return Costs(
        params=sum(p.numel() for p in net.parameters()),
        flops=counter.macs // BATCH,
        activation_bytes=kept // BATCH,
    )


def costs_of_spec(spec: ModelSpec) -> Costs:
    """Costs of a model; its adapter multiplies no matrices and keeps nothing."""
    return costs_of(
        spec.architecture,
        image_size=spec.network_size,
        channels=spec.channels,
        num_classes=spec.num_classes,
        options=spec.options,
    )


def kept_bytes(net: nn.Module, images: Tensor) -> int:
    """Bytes that autograd keeps of a forward pass, weights and buffers left out.

    Views of one storage, such as query, key and value, count once.
    """
    own = {t.untyped_storage()._cdata for t in [*net.parameters(), *net.buffers()]}
    kept: dict[int, torch.UntypedStorage] = {}  # holds the storages, so that no id is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        net(images)
    return sum(storage.nbytes() for storage in kept.values())


class _MacCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts by torch's table of formulas; its own FlopCounterMode is three times as slow."""

    macs = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if formula := _FORMULAS.get(func._overloadpacket):
            self.macs += formula(*args, **kwargs, out_val=out) // 2
        return out


class _FusedAttention(TorchFunctionMode):
    """Makes the meta device keep what fused kernels keep: no attention matrix.

    Left alone it takes the explicit path, which real devices avoid where they can: not for a bias
    that learns, nor for queries that are not (B, heads, T, d).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, bias = args[0], kwargs.get("attn_mask")
        fusible = query.ndim == 4 and (bias is None or not bias.requires_grad)
        return _FUSED(*args, **kwargs)[0] if fusible else func(*args, **kwargs)
