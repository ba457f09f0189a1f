"""Denoisers that start from weights on disk: `model.pretrained: diffusers:<folder>`."""

from typing import Any

from components.core.errors import CasemateError
from components.denoising.loading import DIFFUSERS, describe_source, load_denoiser
from components.models.importing.match import ImportReport, load_matching
from components.models.networks.unet import TimedUNet
from components.models.pixels import PixelModel

KEY = "model.pretrained"
_OF_THE_DATA = ("in_channels", "out_channels", "sample_size")  # set by `unet` itself


def network_of(source: str) -> tuple[str, dict[str, Any]]:
    """Architecture and options of a model that can load the weights of `source`."""
    found = describe_source(source)
    if found.architecture is not None:
        return found.architecture, dict(found.options)
    options = {
        key: value
        for key, value in found.options.items()
        if not key.startswith("_") and key not in _OF_THE_DATA
    }
    if found.options.get("out_channels", 3) == 2 * found.options.get("in_channels", 3):
        options["learn_variance"] = True
    return "unet", options


def load_pretrained_denoiser(model: PixelModel, source: str) -> ImportReport:
    """Fill a denoiser with the weights of `source` in place; every tensor must fit."""
    loaded = load_denoiser(source).network
    assert isinstance(model.net, TimedUNet)
    assert isinstance(loaded, TimedUNet)
    if model.net.patch != loaded.patch:
        remedy = f"is not that of {source.removeprefix(DIFFUSERS)}, which is {loaded.patch}"
        raise CasemateError("model.options.patch", model.net.patch, remedy)
    return load_matching(
        model.net.unet,
        loaded.unet.state_dict(),
        origin=(KEY, source),
        remedy="leave out model.options to use those of the folder",
    )
