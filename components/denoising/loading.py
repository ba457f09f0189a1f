"""Denoisers on disk: our model folders and folders of diffusers.

| source | holds |
|---|---|
| `model:<folder>` | `model.json` with the diffusion in `trained_for`, `model.safetensors` |
| `diffusers:<folder>` | `unet/`, `scheduler/`, or the files of both side by side |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from components.core.digests import digest_file, digest_json
from components.core.documents import parse_json
from components.core.errors import CasemateError
from components.core.folders import Folder, absolute, fetched, folder_at
from components.denoising.classifier import DenoisedClassifier
from components.denoising.denoiser import Denoiser
from components.denoising.diffusion import Diffusion
from components.denoising.samplers import make_sampler
from components.models.checkpoint import load_model, read_header
from components.models.costs import network_of_shapes
from components.models.networks.unet import TimedUNet, check_config
from components.models.pixels import PixelModel

KEY = "denoiser"
OURS, DIFFUSERS = "model:", "diffusers:"
SCHEDULER, CONFIG = "scheduler_config.json", "config.json"


@dataclass(frozen=True, slots=True)
class Description:
    """Properties of a denoiser that do not need its weights."""

    diffusion: Diffusion
    channels: int
    architecture: str | None  # None: `options` are the configuration of diffusers' UNet2DModel
    options: Mapping[str, Any]

    @property
    def predicts_variance(self) -> bool:
        """Whether the second half of the output channels predicts the variance."""
        if self.architecture is not None:
            return bool(self.options.get("learn_variance", False))
        made, given = (self.options.get(f"{end}_channels", 3) for end in ("out", "in"))
        return bool(made == 2 * given)

    def network(self, *, image_size: int, channels: int) -> nn.Module:
        """The network on the meta device: shapes without values."""
        if self.architecture is not None:
            return network_of_shapes(
                self.architecture,
                image_size=image_size,
                channels=channels,
                num_classes=0,
                options=self.options,
            )
        from diffusers import UNet2DModel

        try:
            with torch.device("meta"):
                return TimedUNet(UNet2DModel.from_config(dict(self.options))).eval()
        except (RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
            reason = " ".join(str(error).split())
            raise CasemateError(
                KEY, CONFIG, f"does not describe a UNet2DModel: {reason}"
            ) from error


def is_source(text: str) -> bool:
    """Whether the text names a folder, not a model of the recipe."""
    return text.startswith((OURS, DIFFUSERS))


def source_of(folder: Folder) -> str:
    """The source that names this folder."""
    kind = OURS if (folder / "model.json").is_file() else DIFFUSERS
    return f"{kind}{absolute(folder)}"


def folder_of(source: str) -> Path:
    """The folder that a source names."""
    _, _, path = source.partition(":")
    folder = fetched(folder_at(path))
    if not folder.is_dir():
        raise CasemateError(KEY, source, "is not a folder; write diffusers:PATH or model:PATH")
    return folder


def load_denoiser(source: str, *, device: str | torch.device = "cpu") -> Denoiser:
    """The denoiser of a source, frozen and with finite weights; nothing is downloaded."""
    folder = folder_of(source)
    denoiser = _from_diffusers(folder) if source.startswith(DIFFUSERS) else _from_model(folder)
    weights = denoiser.network.state_dict().items()
    if broken := [name for name, tensor in weights if not tensor.isfinite().all()]:
        remedy = f"holds NaN or infinity in {broken[0]}"
        others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise CasemateError(KEY, source, remedy + others)
    return denoiser.to(device)


def load_denoised(
    classifier: Folder | PixelModel,
    source: str,
    *,
    sampler: Mapping[str, Any],
    image_size: int,
    sigma: float,
    device: str | torch.device = "cpu",
) -> DenoisedClassifier:
    """A classifier, loaded or in a model folder, behind a denoiser, ready for many passes."""
    denoiser = load_denoiser(source, device=device).with_fast_layout(image_size)
    loaded = classifier
    if not isinstance(loaded, PixelModel):
        loaded = load_model(loaded, device=device)
    return DenoisedClassifier(
        make_sampler(sampler, denoiser),
        loaded,
        image_size=image_size,
        sigma=sigma,
    ).eval()


def describe_source(source: str) -> Description:
    """Noise levels and channels of a source; no weights are read."""
    folder = folder_of(source)
    if source.startswith(OURS):
        spec = read_header(folder)["spec"]
        values = spec["trained_for"].get("diffusion")
        if values is None:
            raise CasemateError(KEY, folder, f"holds a classifier ({spec['architecture']})")
        diffusion = Diffusion.from_dict(values)
        return Description(diffusion, spec["channels"], spec["architecture"], spec["options"])
    network, scheduler = _parts(folder)
    config = _network_config(network)
    diffusion = Diffusion.from_config(_read(scheduler / SCHEDULER))
    return Description(diffusion, config.get("in_channels", 3), None, config)


def source_digest(source: str) -> str:
    """Digest of the content of a source, independent of its location."""
    folder = folder_of(source)
    if source.startswith(OURS):
        return str(read_header(folder)["digest"])
    network, scheduler = _parts(folder)
    files = [scheduler / SCHEDULER, *sorted(network.glob("*.safetensors")), network / CONFIG]
    files += sorted(network.glob("*.bin"))
    return digest_json([[path.name, digest_file(path)] for path in files])


def save_diffusers(folder: Path, denoiser: Denoiser) -> None:
    """Write a folder that diffusers, and `diffusers:<folder>`, can read."""
    from diffusers import DDPMScheduler

    if denoiser.diffusion.time_scale != 1:
        remedy = "cannot be written in the format of diffusers, which uses whole timesteps"
        raise CasemateError(f"{KEY}.time_scale", denoiser.diffusion.time_scale, remedy)
    assert isinstance(denoiser.network, TimedUNet)
    if denoiser.network.patch != 1:
        remedy = "cannot be written in the format of diffusers, whose networks have no patches"
        raise CasemateError(f"{KEY}.patch", denoiser.network.patch, remedy)
    denoiser.network.unet.save_pretrained(folder / "unet")
    DDPMScheduler.from_config(denoiser.diffusion.config).save_pretrained(folder / "scheduler")


def denoiser_of(network: TimedUNet, diffusion: Diffusion) -> Denoiser:
    """A denoiser with the properties of its network."""
    return Denoiser(
        network,
        diffusion,
        channels=network.channels,
        stride=network.stride,
        takes_fractions=network.takes_fractions,
    )


def _from_model(folder: Path) -> Denoiser:
    model = load_model(folder)
    values = model.spec.trained_for.get("diffusion")
    if values is None or not isinstance(model.net, TimedUNet):
        raise CasemateError(KEY, folder, f"holds a classifier ({model.spec.architecture})")
    return denoiser_of(model.net, Diffusion.from_dict(values))


def _from_diffusers(folder: Path) -> Denoiser:
    from diffusers import UNet2DModel

    network, scheduler = _parts(folder)
    _network_config(network)
    try:
        net = UNet2DModel.from_pretrained(network, local_files_only=True, low_cpu_mem_usage=False)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CasemateError(KEY, network, f"cannot be loaded: {reason}") from error
    return denoiser_of(TimedUNet(net), Diffusion.from_config(_read(scheduler / SCHEDULER)))


def _network_config(network: Path) -> dict[str, Any]:
    """The configuration of a network that is supported as a denoiser."""
    config = _read(network / CONFIG)
    name = config.get("_class_name", "UNet2DModel")
    if name != "UNet2DModel":
        raise CasemateError(KEY, network, f"holds a {name}; only UNet2DModel is supported")
    check_config(config)
    return config


def _parts(folder: Path) -> tuple[Path, Path]:
    """Folders of network and scheduler: separate, as in saved pipelines, or the same one."""
    network = folder / "unet" if (folder / "unet" / CONFIG).is_file() else folder
    apart = (folder / "scheduler" / SCHEDULER).is_file()
    scheduler = folder / "scheduler" if apart else folder
    for path in (network / CONFIG, scheduler / SCHEDULER):
        if not path.is_file():
            raise CasemateError(KEY, path, "is missing; is this a folder of diffusers?")
    return network, scheduler


def _read(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_bytes())
    except ValueError as error:
        raise CasemateError(KEY, path, f"is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CasemateError(KEY, path, "is not a mapping")
    return values
