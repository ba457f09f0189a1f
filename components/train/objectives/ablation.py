"""Training on ablated images with one visible band or square (Salman et al. 2022, sec. 2, A.3).

Positions are uniform, edges included, where a band wraps around. Models that drop
tokens without a visible pixel compute only the others, so an ablated step is cheap.
"""

import torch
from torch import Tensor, nn

from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.core.types import Logits
from components.data.ablation import column_mask
from components.models.masked_votes import group_by_tokens
from components.models.pixels import PixelModel
from components.train.objectives.base import Batch, LossOut, Objective, cross_entropy
from components.train.objectives.settings import (
    AblationTrainingSettings,
    ColumnsTrainingSettings,
)


class AblationTraining(Objective):
    """Cross-entropy on ablations whose visible side is `size` pixels.

    `position: batch` uses one position per global batch, as published; `image` gives
    each its own: gradients are more diverse, groups with equal numbers of tokens smaller.
    """

    settings: AblationTrainingSettings

    def __init__(
        self,
        settings: ColumnsTrainingSettings | AblationTrainingSettings,
        *,
        label_smoothing: float,
    ) -> None:
        super().__init__(settings.ablation, label_smoothing=label_smoothing)

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        logits = ablated_logits(wrapped, bare, batch, self.visible(batch))
        loss = cross_entropy(logits, batch, label_smoothing=self.label_smoothing)
        return LossOut(loss, logits.detach())

    def validation_logits(self, bare: nn.Module, batch: Batch) -> Logits:
        return ablated_logits(bare, bare, batch, self.visible(batch, "-val"))

    def not_shardable(self, model: PixelModel) -> str | None:
        if self.settings.position == "image" and model.spec.token_policy == "drop":
            return "train.objective.position: image with dropped tokens, which takes uneven passes"
        return None

    def visible(self, batch: Batch, suffix: str = "") -> Tensor:
        """(H, W) bool, or (B, H, W) with a position for each image."""
        stream, device = f"{self.settings.shape}s{suffix}", batch.images.device
        if self.settings.position == "batch":
            return self._mask(batch, stream, batch.step).to(device, non_blocking=True)
        masks = [self._mask(batch, f"{stream}-image", item) for item in batch.item_ids]
        return torch.stack(masks).to(device, non_blocking=True)

    def _mask(self, batch: Batch, stream: str, which: object) -> Tensor:
        """(H, W) bool from a start that is a function of (seed, stream, epoch, which)."""
        generator = generator_for(batch.seed, stream, batch.epoch, which)
        height, width = batch.images.shape[-2:]
        size = self.settings.size
        if size > min(height, width):
            remedy = f"is wider than the image, {height}x{width}"
            raise CasemateError("train.objective.size", size, remedy)

        def band(side: int) -> Tensor:
            return column_mask(side, int(torch.randint(side, (), generator=generator)), size)

        everywhere = torch.ones(height, width, dtype=torch.bool)
        if self.settings.shape == "column":
            return everywhere & band(width)
        if self.settings.shape == "row":
            return everywhere & band(height)[:, None]
        return band(height)[:, None] & band(width)


def ablated_logits(wrapped: nn.Module, bare: nn.Module, batch: Batch, visible: Tensor) -> Logits:
    """Logits of the visible pixels, in one pass for each number of tokens that is kept."""
    if visible.dim() == 2:
        shared: Logits = wrapped(batch.images, visible)
        return shared
    assert isinstance(bare, PixelModel)
    groups = group_by_tokens(bare, visible, device=visible.device)
    models = [wrapped, *[bare] * (len(groups) - 1)]  # one synchronising pass, see `Objective`
    logits = [
        model(batch.images[rows], visible[rows]) for model, rows in zip(models, groups, strict=True)
    ]
    return torch.cat(logits)[torch.cat(groups).argsort()]
