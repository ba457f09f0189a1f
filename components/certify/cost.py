"""Shapes of the networks behind a certificate, from which its cost is computed."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from components.models.costs import Costs

NO_DENOISER = Costs(params=0, flops=0, activation_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedModel:
    """A classifier and the denoiser in front of it, shapes only."""

    key: str  # key of the certificate in the recipe, for errors
    net: nn.Module
    costs: Costs
    channels: int
    num_classes: int
    side: int  # side of the images
    upsample: int | None  # side of the network's input, if it differs
    upsample_mode: str
    token_policy: str  # as trained
    trained_ablation: tuple[str, int] | None  # kind and visible side in training
    denoiser: Costs = NO_DENOISER
    denoiser_calls: int = 0  # calls for each noisy copy

    @property
    def seen(self) -> int:
        """Side of the network's input."""
        return self.upsample or self.side

    def resized(self, visible: Tensor) -> Tensor:
        """(K, H, W) bool at the network's size, as the model's own adapter resizes them."""
        if self.upsample is None:
            return visible
        size = (self.upsample, self.upsample)
        return F.interpolate(visible[:, None].float(), size=size, mode=self.upsample_mode)[:, 0] > 0
