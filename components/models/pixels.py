"""The input adapter: a model of [0, 1] pixels at native size."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.core.types import Images, Logits
from components.data.ablation import ablate
from components.models.resizing import resized
from components.models.spec import ModelSpec
from components.models.tokens import (
    check_droppable,
    forward_kept,
    kept_indices,
    patch_size_of,
    visible_tokens,
)
from components.models.zoo import network_for


class PixelModel(nn.Module):
    """A network behind up-sampling and normalisation, so that budgets are native [0, 1] pixels."""

    mean: Tensor
    std: Tensor

    def __init__(self, spec: ModelSpec, *, net: nn.Module | None = None) -> None:
        """`net` replaces the network of `spec.architecture`, e.g. by a user's own."""
        super().__init__()
        self.spec = spec
        self.net = net if net is not None else network_for(spec)
        if spec.token_policy == "drop":
            check_droppable(self.net)
        self.register_buffer("mean", torch.tensor(spec.mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(spec.std).view(1, -1, 1, 1), persistent=False)

    def network_input(self, x: Images) -> Tensor:
        """Images as the network sees them: resized, then normalised."""
        self.spec.check_image(x.shape[1:])
        return (self.resized(x) - self.mean).div_(self.std)

    def forward(
        self, x: Images, visible: Tensor | None = None, times: Tensor | None = None
    ) -> Logits:
        """Logits of whole images, or of ablated ones if `visible` pixels are given.

        Denoising networks (`zoo.DENOISERS`) need the (B,) `times` of their noise levels and return
        images on their own scale.
        """
        if visible is not None:
            return self.forward_ablated(x, visible)
        inputs = self.network_input(x)
        logits: Tensor = self.net(inputs) if times is None else self.net(inputs, times)
        return logits

    def forward_ablated(self, x: Images, visible: Tensor) -> Logits:
        """Logits of images that show only `visible` pixels, (H, W) or (B, H, W) bool.

        Hidden pixels are set to 0 before up-sampling and normalisation: no vote depends on them.
        """
        self.spec.check_image(x.shape[1:])
        shown = visible.expand(x.shape[0], *visible.shape[-2:])
        inputs = self.network_input(ablate(x, shown))
        if self.spec.token_policy == "mask":
            logits: Tensor = self.net(inputs)
            return logits
        return forward_kept(self.net, inputs, kept_indices(self.kept_tokens(shown)))

    def num_kept(self, visible: Tensor) -> Tensor:
        """(B,): number of kept tokens of each (B, H, W) mask; equal counts may share a batch."""
        if self.spec.token_policy == "mask":
            return torch.zeros(len(visible), dtype=torch.int64, device=visible.device)
        return self.kept_tokens(visible).sum(dim=1)

    def resized(self, x: Tensor) -> Tensor:
        """(B, C, H, W) at the network's size; weights follow pixel centres."""
        if self.spec.upsample is None:
            return x
        if self.spec.upsample_mode == "bicubic":
            return resized(x, self.spec.upsample)
        size = (self.spec.upsample, self.spec.upsample)
        return F.interpolate(x, size=size, mode=self.spec.upsample_mode)  # align_corners: False

    def resized_mask(self, visible: Tensor) -> Tensor:
        """(B, H, W) bool at the network's size: pixels that depend on a visible pixel."""
        return self.resized(visible[:, None].float())[:, 0] != 0  # bicubic weights can be < 0

    def kept_tokens(self, visible: Tensor) -> Tensor:
        """(B, N) bool: tokens that depend on a visible pixel of (B, H, W) after resizing."""
        return visible_tokens(self.resized_mask(visible), patch_size_of(self.net))
