"""Random erasing of pixels in [0, 1] (Zhong et al. 2020, arXiv:1708.04896, Algorithm 1)."""

import numpy as np
import torch

from components.core.types import Images
from components.data.augment.boxes import UNIFORMS, Boxes, random_boxes
from components.data.augment.draws import Draws


def erase_boxes(
    draws: Draws, *, image: tuple[int, int], prob: float, area: tuple[float, float], aspect: float
) -> Boxes:
    """Rectangles to erase; `found`: the image is selected and one of ten attempts fits.

    At least one row and one column of the image are kept, as in timm.
    """
    table = draws.uniforms("erase", UNIFORMS + 1)
    boxes = random_boxes(
        table[:, 1:],
        image=image,
        largest=(image[0] - 1, image[1] - 1),
        smallest=0,
        area=area,
        ratio=(aspect, 1 / aspect),
    )
    return boxes._replace(found=boxes.found & (table[:, 0] <= prob))


def erase(
    images: Images, draws: Draws, *, prob: float, area: tuple[float, float], aspect: float
) -> Images:
    """Fill rectangles with noise, each pixel normal (mean 1/2, deviation 1/4) truncated to [0, 1].

    The usual N(0, 1) is meant for normalised images and would leave the pixel range.
    """
    height, width = images.shape[-2:]
    boxes = erase_boxes(draws, image=(height, width), prob=prob, area=area, aspect=aspect)
    result = images.clone()
    for row in np.flatnonzero(boxes.found).tolist():
        top, left, tall, wide = boxes.places[row].tolist()
        noise = torch.empty(images.shape[1], tall, wide)
        torch.nn.init.trunc_normal_(
            noise, mean=0.5, std=0.25, a=0.0, b=1.0, generator=draws.generator("erase", row)
        )
        result[row, :, top : top + tall, left : left + wide] = noise.to(images)
    return result
