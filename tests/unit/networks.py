"""Untrained networks that several tests share."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from components.models.spec import ModelSpec

NetT = TypeVar("NetT", bound=nn.Module)

SMALL_SPEC = ModelSpec(
    "tiny_vit",
    num_classes=5,
    channels=3,
    image_size=16,
    mean=(0.4, 0.5, 0.6),
    std=(0.2, 0.3, 0.25),
    options={"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2},
)


def scattered(make: Callable[[], NetT], *, by: float) -> NetT:
    """The network with weights so large that logits disagree and scales matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = make()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=by)
    return net.eval()
