"""Small models whose weights are large enough for their logits to disagree."""

from collections.abc import Callable

import pytest
import torch

from components.models.pixels import PixelModel
from components.models.spec import ModelSpec

SMALL = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}


def make_spec(architecture: str = "tiny_vit", **changes: object) -> ModelSpec:
    fields = {
        "num_classes": 5,
        "channels": 3,
        "image_size": 16,
        "mean": (0.4, 0.5, 0.6),
        "std": (0.2, 0.3, 0.25),
        "options": SMALL,
    }
    return ModelSpec(architecture, **{**fields, **changes})


def make_model(architecture: str = "tiny_vit", **changes: object) -> PixelModel:
    """An untrained model in eval mode; fresh timm weights are so small that all logits agree."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = PixelModel(make_spec(architecture, **changes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


@pytest.fixture
def new_spec() -> Callable[..., ModelSpec]:
    return make_spec


@pytest.fixture
def new_model() -> Callable[..., PixelModel]:
    return make_model


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
