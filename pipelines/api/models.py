"""Models to attack and certify: from any place, or around a user's network."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.errors import CasemateError, first_line
from components.models.places.registry import FORMS

if TYPE_CHECKING:
    from torch import nn

    from components.models.pixels import PixelModel


def load_model(
    model: "str | Path | nn.Module",
    *,
    num_classes: int | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    weights: str | Path | None = None,
    device: str = "cpu",
) -> "PixelModel":
    """A classifier of pixels in [0, 1]: from any place, or around your own network.

    Places: a model folder (or its URI), `timm:NAME`, `hf:ORG/NAME`,
    `robustbench:NAME@cifar10/Linf`, `python:FILE.py:FACTORY` (`weights`: the file of its state
    dict), a .pt2 file of torch.export, or a TorchScript file. The last three run code: load only
    what you trust.

    Your network returns logits of `(images - mean) / std`, or of the pixels themselves if both are
    omitted. Without `num_classes` one forward pass determines it; `channels` is 3
    by default. The network is put into eval mode and moved to `device`. A model's
    digest covers its weights and these settings; of a place it also covers the code or program, of
    an `nn.Module` the name of its class.

    >>> from pipelines import api
    >>> from torch import nn
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    >>> model = api.load_model(network, image_size=8)
    >>> model.spec.num_classes
    10
    """
    from torch import nn

    from components.models.places.load import load_any
    from components.models.places.registry import ModelFacts
    from components.models.places.wrapping import model_around

    _check_device(device)
    facts = ModelFacts(
        weights=None if weights is None else str(weights),
        num_classes=num_classes,
        image_size=image_size,
        channels=channels,
        mean=mean,
        std=std,
    )
    if isinstance(model, str | Path):
        return load_any(str(model), facts, device=device)
    if not isinstance(model, nn.Module):
        remedy = f"is neither an nn.Module nor the name of a model: {FORMS}"
        raise CasemateError("model", repr(model), remedy)
    if weights is not None:
        raise CasemateError("weights", weights, "does not apply to an nn.Module, which has weights")
    kind = type(model)
    architecture = f"{kind.__module__}.{kind.__qualname__}"
    return model_around(model, architecture, facts, name=kind.__name__, device=device)


def check_model(model: object) -> None:
    """Raise an error for anything but a loaded model."""
    from components.models.pixels import PixelModel

    if not isinstance(model, PixelModel):
        remedy = "is not a loaded model; use api.load_model(network, image_size=...) or its folder"
        raise CasemateError("model", type(model).__name__, remedy)


def check_seed(seed: object) -> None:
    """Raise an error for anything but a whole number from 0."""
    if type(seed) is not int or seed < 0:
        raise CasemateError("seed", repr(seed), "is not a whole number of at least 0")


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        remedy = f"is not usable here: {first_line(error)}"
        raise CasemateError("device", repr(device), remedy) from error
