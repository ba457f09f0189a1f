"""Models to attack and certify: from a folder, or around a user's network."""

from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.errors import CasemateError, first_line
from components.core.settings import MAX_SIDE

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
    device: str = "cpu",
) -> "PixelModel":
    """A classifier of pixels in [0, 1]: from a model folder, or around your own network.

    Your network returns logits of `(images - mean) / std`, or of the pixels themselves if both are
    omitted. Without `num_classes` one forward pass determines it; `channels` is 3
    by default. The network is put into eval mode and moved to `device`. A model's
    digest covers its weights, these settings and the name of its class, not the code of the class.

    >>> from pipelines import api
    >>> from torch import nn
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    >>> model = api.load_model(network, image_size=8)
    >>> model.spec.num_classes
    10
    """
    from torch import nn

    options = {"num_classes": num_classes, "image_size": image_size, "channels": channels}
    _check_device(device)
    if isinstance(model, str | Path):
        from components.models import checkpoint

        given = {**options, "mean": mean, "std": std}
        for key, value in given.items():
            if value is not None:
                raise CasemateError(key, value, "does not apply to a folder: model.json defines it")
        folder = Path(model).expanduser()
        if folder.is_file():
            raise CasemateError("model", folder, "is a file; name the model folder")
        inside = folder / "model"  # `folder` may be that of a training
        return checkpoint.load_model(
            inside if (inside / "model.json").is_file() else folder, device=device
        )
    if not isinstance(model, nn.Module):
        remedy = "is neither an nn.Module nor the path of a model folder"
        raise CasemateError("model", repr(model), remedy)
    if image_size is None:
        raise CasemateError("image_size", None, "is missing: the side of the images in pixels")
    channels = 3 if channels is None else channels
    for key, value, most in (("image_size", image_size, MAX_SIDE), ("channels", channels, None)):
        if type(value) is not int or value < 1 or (most and value > most):
            wanted = f"from 1 to {most}" if most else "above 0"
            raise CasemateError(key, repr(value), f"is not a whole number {wanted}")
    _check_normalisation(mean, std, channels)
    return _own_model(model, num_classes, image_size, channels, mean=mean, std=std, device=device)


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


def _check_normalisation(
    mean: Sequence[float] | None, std: Sequence[float] | None, channels: int
) -> None:
    from components.models.settings import normalisation_problems

    for key, values in (("mean", mean), ("std", std)):
        if values is not None and not _are_numbers(values, channels):
            raise CasemateError(key, repr(values), f"needs {channels} numbers, one per channel")
    for problem in normalisation_problems(mean, std):
        raise CasemateError(problem.field, problem.value, problem.remedy)


def _are_numbers(values: object, count: int) -> bool:
    listed = isinstance(values, Sequence) and len(values) == count
    return listed and all(isinstance(value, Real) for value in values)  # type: ignore[attr-defined]


def _own_model(
    net: "nn.Module",
    num_classes: int | None,
    image_size: int,
    channels: int,
    *,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    device: str,
) -> "PixelModel":
    import torch

    from components.models.pixels import PixelModel
    from components.models.spec import ModelSpec

    net = net.to(device).eval()
    zeros = torch.zeros(1, channels, image_size, image_size, device=device)
    try:
        with torch.no_grad():
            logits = net(zeros)
    except Exception as error:
        size = f"{channels}x{image_size}x{image_size}"
        remedy = f"fails on an image of {size}: {first_line(error)}; check image_size and channels"
        raise CasemateError("model", type(net).__name__, remedy) from error
    shape = tuple(getattr(logits, "shape", ()))
    if len(shape) != 2 or shape[0] != 1 or num_classes not in (None, shape[1]):
        expected = f"(1, {num_classes or 'classes'})"
        remedy = f"returned {shape or type(logits).__name__} for one image, not {expected} logits"
        raise CasemateError("model", type(net).__name__, remedy)
    spec = ModelSpec(
        architecture=f"{type(net).__module__}.{type(net).__qualname__}",
        num_classes=int(shape[1]),
        channels=channels,
        image_size=image_size,
        mean=tuple(mean or (0.0,) * channels),
        std=tuple(std or (1.0,) * channels),
    )
    return PixelModel(spec, net=net).to(device).eval()
