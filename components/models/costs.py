"""Costs of a network per image: weights, multiply-accumulates, memory for the backward pass.

Everything is counted on torch's meta device, from shapes alone: the largest network takes half a
second and no memory. A multiply-accumulate counts 1, as in the GFLOPs that papers on vision print;
the FLOPs of hardware sheets are twice that. Matrix products (attention's too) and convolutions
count; normalisation, activations, softmax and sums are left out, as is usual.
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
from components.models.zoo import build_network, network_for

# A prime that divides no size of a network: counts that are multiples of it scale with images, all
# others are shared by images (position codes), so one pass separates the two.
BATCH = 1009
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FORMULAS = {  # torch's table has fused attention on GPUs only
    **flop_registry,
    _FUSED: flop_registry[torch.ops.aten._scaled_dot_product_flash_attention],
}


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one network and of one image in it."""

    params: int
    flops: int  # multiply-accumulates of one forward pass
    activation_bytes: int  # float32 that autograd keeps for the backward pass


def network_of_shapes(
    architecture: str,
    *,
    image_size: int,
    channels: int = 3,
    num_classes: int,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The network of `build_network` in eval mode on the meta device: shapes without values."""
    with torch.device("meta"), _NoInitialValues():
        return build_network(
            architecture,
            image_size=image_size,
            channels=channels,
            num_classes=num_classes,
            options=options or {},
        ).eval()


def network_of_spec(spec: ModelSpec) -> nn.Module:
    """The network of a model in the same way."""
    with torch.device("meta"), _NoInitialValues():
        return network_for(spec).eval()


def costs_of_shapes(net: nn.Module, *, image_size: int, channels: int = 3) -> Costs:
    """Costs of a network on the meta device."""
    counter = _MacCounter()  # type: ignore[no-untyped-call]
    with torch.device("meta"), counter, _FusedAttention():
        images = torch.empty(BATCH, channels, image_size, image_size)
        try:
            kept = [_per_image(size) for size in kept_sizes(net, images)]
        except RuntimeError as error:
            name, remedy = type(net).__name__, f"depends on values, not only on shapes: {error}"
            raise CasemateError("model.architecture", name, remedy) from error
    return Costs(
        params=sum(p.numel() for p in net.parameters()),
        flops=counter.macs,
        activation_bytes=sum(kept),
    )


def _per_image(count: int) -> int:
    """Count of a single image from that of a batch; 0 for costs that images share.

    If images of a batch attend to each other, counts grow with the square of the batch: for one
    image, every factor of the batch size is divided out.
    """
    if count % BATCH:
        return 0
    while count and count % BATCH == 0:
        count //= BATCH
    return count


def kept_sizes(net: nn.Module, images: Tensor) -> list[int]:
    """Bytes of each storage that autograd keeps of a forward pass, weights and buffers left out.

    Views of one storage, such as query, key and value, count once.
    """
    own = {t.untyped_storage()._cdata for t in [*net.parameters(), *net.buffers()]}
    kept: dict[int, torch.UntypedStorage] = {}  # keeps the storages alive, so that no id is reused

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        net(images)
    return [storage.nbytes() for storage in kept.values()]


class _MacCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts per image by torch's formulas; its FlopCounterMode is three times as slow."""

    macs = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if formula := _FORMULAS.get(func._overloadpacket):
            self.macs += _per_image(formula(*args, **kwargs, out_val=out) // 2)
        return out


class _NoInitialValues(TorchFunctionMode):
    """Skips initialisation, which takes most of the time of building a large network."""

    FILLERS = (
        *("uniform_", "kaiming_uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_"),
        *("fill_", "zero_", "constant_"),
    )

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in self.FILLERS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


class _FusedAttention(TorchFunctionMode):
    """Counts the memory of fused kernels on the meta device: no attention matrix.

    The meta device would take the explicit path, which real devices use only for a learned bias and
    for queries that are not (B, heads, T, d).
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
