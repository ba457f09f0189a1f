"""Elastic: a random affine map, then smooth displacements (Hendrycks & Dietterich 2019)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from components.core.settings import settings
from components.data.corruptions.filters import gaussian_filter
from components.data.corruptions.interface import Draws, planes, planes_to_bytes
from components.data.corruptions.settings import ElasticTransformSettings


def affine_coordinates(jitter: Tensor, *, height: int, width: int) -> Tensor:
    """(N, H, W, 2) source x, y of each pixel under the map that moves three points by `jitter`.

    The points lie a third of the shorter side around the centre; `jitter` (N, 3, 2) moves them.
    """
    reach = max(1, min(height, width) // 3)
    x, y = width // 2, height // 2
    points = torch.tensor(
        [[x + reach, y + reach], [x + reach, y - reach], [x - reach, y - reach]],
        dtype=torch.float64, device=jitter.device,
    )  # fmt: skip
    moved = points + jitter.double()
    homogeneous = F.pad(moved, (0, 1), value=1.0)  # (N, 3, 3): rows x', y', 1
    back = torch.linalg.solve(homogeneous, points.expand_as(moved)).float()  # (N, 3, 2)
    across = torch.arange(width, device=jitter.device).view(1, 1, -1, 1)
    down = torch.arange(height, device=jitter.device).view(1, -1, 1, 1)
    of_x, of_y, constant = (row[:, None, None, :] for row in back.unbind(dim=1))
    places: Tensor = across * of_x + down * of_y + constant
    return places


def sampled(levels: Tensor, coordinates: Tensor, *, align_corners: bool) -> Tensor:
    """(N, C, H, W) read at x, y (N, H, W, 2), bilinear, mirrored border.

    `align_corners`: about the edge pixels (dcb|abcd|cba), else about the edge (cba|abcd|dcb).
    """
    sizes = torch.tensor([levels.shape[3], levels.shape[2]], device=levels.device)
    last = sizes - 1
    grid = 2 * coordinates / last - 1 if align_corners else (2 * coordinates + 1) / sizes - 1
    return F.grid_sample(
        levels, grid, mode="bilinear", padding_mode="reflection", align_corners=align_corners
    )


@settings
class ElasticTransform(ElasticTransformSettings):
    """Affine map, mirrored about the edge pixels, then displacements, mirrored about the edge."""

    def sample(self, generator: torch.Generator, height: int, width: int, severity: int) -> Draws:
        *_, jitter = self.constants(severity, height, width)
        corners = (2 * torch.rand(3, 2, generator=generator) - 1) * jitter
        fields = 2 * torch.rand(2, height, width, generator=generator) - 1
        return {"jitter": corners, "uniform": fields}

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        height, width = images.shape[1:3]
        strength, sigma, _ = self.constants(severity, height, width)
        coordinates = affine_coordinates(draws["jitter"], height=height, width=width)
        warped = sampled(planes(images), coordinates, align_corners=True)
        if strength > 0:
            fields = gaussian_filter(draws["uniform"], sigma, border="reflect", truncate=3.0)
            across = torch.arange(width, device=images.device).expand(height, width)
            down = torch.arange(height, device=images.device)[:, None].expand(height, width)
            places = torch.stack([across, down]) + strength * fields
            warped = sampled(warped, places.permute(0, 2, 3, 1), align_corners=False)
        return planes_to_bytes(warped)
