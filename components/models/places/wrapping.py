"""Networks as models of pixels: what they return is checked."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from components.core.errors import CasemateError, first_line, last_line
from components.core.settings import MAX_SIDE
from components.models.pixels import PixelModel
from components.models.places.registry import ModelFacts
from components.models.settings import normalisation_problems
from components.models.spec import ModelSpec

ROWS = (1, 3)  # images of the batches that a network is tried on


def model_around(
    net: nn.Module,
    architecture: str,
    facts: ModelFacts,
    *,
    name: str,
    device: str = "cpu",
    **further: Any,
) -> PixelModel:
    """The model of a network; passes over black images check its logits and count its classes.

    `name` is that of the network in errors, `further` are fields of the spec.
    """
    channels = 3 if facts.channels is None else facts.channels
    check_sizes(facts.image_size, channels)
    _check_normalisation(facts.mean, facts.std, channels)
    facts.check_pair()
    assert facts.image_size is not None
    _check_weights(net, name)
    net = net.to(device).eval()
    spec = ModelSpec(
        architecture=architecture,
        num_classes=_count_classes(net, facts, channels=channels, name=name, device=device),
        channels=channels,
        image_size=facts.image_size,
        mean=tuple(facts.mean or (0.0,) * channels),
        std=tuple(facts.std or (1.0,) * channels),
        **further,
    )
    return PixelModel(spec, net=net).to(device).eval()


def _count_classes(
    net: nn.Module, facts: ModelFacts, *, channels: int, name: str, device: str
) -> int:
    side = facts.image_size
    assert side is not None
    for rows in ROWS:
        try:
            with torch.no_grad():
                logits = net(torch.zeros(rows, channels, side, side, device=device))
        except Exception as error:
            images = "an image" if rows == 1 else f"{rows} images"
            scripted = "TorchScript" in first_line(error)  # whose last line has the cause
            why = last_line(error) if scripted else first_line(error)
            remedy = f"fails on {images} of {channels}x{side}x{side}: {why}"
            also = "check image_size and channels" if rows == 1 else "it must take any batch"
            raise CasemateError("model", name, f"{remedy}; {also}") from error
        shape = tuple(getattr(logits, "shape", ()))
        if len(shape) != 2 or shape[0] != rows or facts.num_classes not in (None, shape[1]):
            expected = f"({rows}, {facts.num_classes or 'classes'})"
            images = "one image" if rows == 1 else f"{rows} images"
            returned = shape or type(logits).__name__
            remedy = f"returned {returned} for {images}, not {expected} logits"
            if not shape:
                remedy += "; let it return the logits alone"
            raise CasemateError("model", name, remedy)
    return int(shape[1])


def _check_weights(net: nn.Module, name: str) -> None:
    """All in float32, and the parameters finite; a buffer may hold infinities, as masks do."""
    for key, tensor in net.state_dict().items():
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            remedy = f"has {key} in {tensor.dtype}; convert it with float(): images are float32"
            raise CasemateError("model", name, remedy)
    for key, tensor in net.named_parameters():
        if not bool(tensor.isfinite().all()):
            remedy = f"has values in {key} that are not finite; look for NaN in its training"
            raise CasemateError("model", name, remedy)


def check_sizes(image_size: object, channels: object) -> None:
    """Raise an error for sizes that are missing or not whole numbers."""
    if image_size is None:
        raise CasemateError("image_size", "", "is missing: the side of the images in pixels")
    for key, value, most in (("image_size", image_size, MAX_SIDE), ("channels", channels, None)):
        if type(value) is not int or value < 1 or (most and value > most):
            wanted = f"from 1 to {most}" if most else "above 0"
            raise CasemateError(key, repr(value), f"is not a whole number {wanted}")


def _check_normalisation(
    mean: Sequence[float] | None, std: Sequence[float] | None, channels: int
) -> None:
    for key, values in (("mean", mean), ("std", std)):
        if values is not None and not _are_numbers(values, channels):
            raise CasemateError(key, repr(values), f"needs {channels} numbers, one per channel")
    for problem in normalisation_problems(mean, std):
        raise CasemateError(problem.field, problem.value, problem.remedy)


def _are_numbers(values: object, count: int) -> bool:
    listed = isinstance(values, Sequence) and len(values) == count
    return listed and all(isinstance(value, Real) for value in values)  # type: ignore[attr-defined]
