"""Spatter: drops of water or mud (Hendrycks & Dietterich 2019).

Water follows the edges of the drops, which the published code finds with OpenCV (Canny, distance
transform, histogram equalisation); so does this one, if the extra `spatter` is installed.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.core.errors import CasemateError
from components.core.settings import settings
from components.data.corruptions.filters import gaussian_filter
from components.data.corruptions.interface import MARGIN, Draws, to_bytes
from components.data.corruptions.settings import SpatterSettings

WATER = (175.0, 238.0, 238.0)
MUD = (63.0, 42.0, 20.0)
FEWEST_MUD = 0.8  # thinner mud is removed
EMBOSS = ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))


def opencv() -> Any:
    """The module cv2."""
    try:
        import cv2
    except ImportError as error:
        remedy = "needs OpenCV for water drops; install the extra: pip install 'casemate[spatter]'"
        raise CasemateError("corruption", "spatter", remedy) from error
    return cv2


def water_weight(liquid: NDArray[np.float64], strength: float) -> NDArray[np.float32]:
    """(H, W) weight of the water: the liquid times its embossed distance to the drops' edges."""
    cv2 = opencv()
    layer = (liquid * 255).astype(np.int64).astype(np.uint8)  # wraps above 255, as published
    distance = cv2.distanceTransform(255 - cv2.Canny(layer, 50, 150), cv2.DIST_L2, 5)
    capped = cv2.blur(np.minimum(distance, 20), (3, 3)).astype(np.uint8)
    relief = cv2.filter2D(cv2.equalizeHist(capped), cv2.CV_8U, np.array(EMBOSS))
    weight: NDArray[np.float32] = layer * cv2.blur(relief, (3, 3)).astype(np.float32)
    return weight * np.float32(strength / max(weight.max(), 1))  # whole numbers: 0 or at least 1


@settings
class Spatter(SpatterSettings):
    """Water is added, mud covers."""

    def sample(self, generator: torch.Generator, height: int, width: int, severity: int) -> Draws:
        return {"normal": torch.randn(height, width, generator=generator)}

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        mean, deviation, sigma, threshold, strength, mode = self.constants(
            severity, *images.shape[1:3]
        )
        # float64: rounding next to a threshold would move a pixel by the weight of the mud
        liquid = gaussian_filter(mean + deviation * draws["normal"].double(), sigma)
        liquid = torch.where(liquid < threshold, 0, liquid)
        if mode == 0:
            weights = [water_weight(layer, strength) for layer in liquid.cpu().numpy()]
            weight = torch.from_numpy(np.stack(weights)).to(images.device)[..., None]
            water = torch.tensor(WATER, device=images.device)
            return to_bytes(torch.addcmul(images.float(), weight, water), margin=MARGIN)
        covered = gaussian_filter((liquid > threshold).double(), strength)
        weight = torch.where(covered < FEWEST_MUD, 0, covered).float()[..., None]
        mud = torch.tensor(MUD, device=images.device)
        return to_bytes(images.float() * (1 - weight) + weight * mud, margin=MARGIN)
