"""How training computes its passes on a device: precision, compiled code, recomputed activations.

What is chosen here changes speed, memory and the last bits of numbers, never the algorithm. Results
record it.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from components.core.arithmetic import TRAINING, Arithmetic
from components.core.errors import CasemateError
from components.core.precision import resolve_precision, switches_of
from components.models.compiling import compile_network
from components.models.pixels import PixelModel
from components.train.settings import TrainSettings

SHORT = {"bf16": "bfloat16", "fp16": "float16"}
# Gradients keep their signs in bfloat16 and weights stay float32 (`autocast_passes`).
FASTEST = ("bfloat16", "tf32")


def precision_on(train: TrainSettings, device: str) -> str:
    """The precision of training passes on a device, in torch's names or `tf32`."""
    asked = SHORT.get(train.precision, train.precision)
    return resolve_precision(asked, device, fastest=FASTEST)


def arithmetic_on(train: TrainSettings, device: str) -> Arithmetic:
    """The switches of float32 products in a training process on a device."""
    return switches_of(precision_on(train, device), TRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What a worker uses; `why_eager` says why a network that should be compiled is not."""

    precision: str
    compiled: bool
    why_eager: str | None
    channels_last: bool
    recomputed: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def prepare_passes(model: PixelModel, train: TrainSettings) -> Passes:
    """Prepare a model on its device as the settings say, before it is wrapped."""
    device = model.mean.device
    last = device.type == "cuda" and is_convolutional(model.net)
    if last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        torch.backends.cudnn.benchmark = True  # shapes repeat: the fastest kernel is searched once
    if train.recompute:
        recompute_activations(model.net)
    why = compile_network(model) if train.compiled else None
    return Passes(
        precision=precision_on(train, device.type),
        compiled=train.compiled and why is None,
        why_eager=why,
        channels_last=last,
        recomputed=train.recompute,
    )


def is_convolutional(net: nn.Module) -> bool:
    """Whether most weights belong to convolutions that mix channels and neighbours."""
    convolved = sum(
        module.weight.numel()
        for module in net.modules()
        if isinstance(module, nn.Conv2d) and module.groups == 1
    )
    return 2 * convolved > sum(weight.numel() for weight in net.parameters())


def recompute_activations(net: nn.Module) -> None:
    """Keep the inputs of blocks only: the backward pass computes the rest once more."""
    switch: Any = getattr(net, "set_grad_checkpointing", None)
    remedy = f"does not fit {type(net).__name__}, which has no switch for it; leave it out"
    if switch is None:
        raise CasemateError("train.recompute", "true", remedy)
    try:
        switch(True)
    except AssertionError as error:  # timm's word for networks that cannot
        raise CasemateError("train.recompute", "true", remedy) from error
