"""Snow: blurred flakes over a whitened image (Hendrycks & Dietterich 2019)."""

import torch
from torch import Tensor

from components.core.settings import settings
from components.data.corruptions.filters import clipped_zoom, motion_blur
from components.data.corruptions.interface import Draws, to_bytes
from components.data.corruptions.settings import SnowSettings

LUMA = (0.299, 0.587, 0.114)


@settings
class Snow(SnowSettings):
    """a x + (1 - a) max(x, 1.5 gray + 0.5), plus the flakes, plus the flakes upside down."""

    def sample(self, generator: torch.Generator, height: int, width: int, severity: int) -> Draws:
        turn = torch.rand((), generator=generator, dtype=torch.float64)
        flakes = torch.randn(height, width, generator=generator)
        return {"angle": -135 + 90 * turn, "normal": flakes}

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        flakes = self.flakes(draws, severity)[..., None]
        weight = self.constants(severity, *images.shape[1:3])[-1]
        levels = images.float()
        gray = (levels * torch.tensor(LUMA, device=levels.device)).sum(dim=-1, keepdim=True)
        white = torch.maximum(levels, 1.5 * gray + 127.5)
        base = levels.mul_(weight).add_(white, alpha=1 - weight)
        return to_bytes(base.add_(flakes).add_(flakes.flip(1, 2)))

    def flakes(self, draws: Draws, severity: int) -> Tensor:
        """(N, H, W) whole gray levels: thresholded noise, enlarged and blurred along a line."""
        normal = draws["normal"]
        mean, deviation, zoom, threshold, radius, sigma, _ = self.constants(
            severity, *normal.shape[1:]
        )
        layer = clipped_zoom((mean + deviation * normal)[..., None], zoom)[..., 0]
        layer = torch.where(layer < threshold, 0, layer)
        whole = to_bytes(layer.mul_(255)).float()
        angles = draws["angle"].tolist()
        return torch.stack([
            motion_blur(flat, radius=int(radius), sigma=sigma, angle=angle)
            for flat, angle in zip(whole, angles, strict=True)
        ])  # fmt: skip
