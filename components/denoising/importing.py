"""The door for denoisers of other projects: a file and what it is, to a model folder's model."""

from dataclasses import dataclass
from pathlib import Path

from components.core.digests import digest_file
from components.core.errors import CasemateError
from components.denoising.diffusion import Diffusion
from components.denoising.guided import is_guided, learns_variance, to_diffusers, unet_config
from components.models.importing.match import ImportReport, load_matching
from components.models.importing.read import read_checkpoint
from components.models.networks.unet import TimedUNet
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec

REMEDY = "check the width of heads, and that the file is a UNet of guided- or improved-diffusion"


@dataclass(frozen=True, slots=True)
class DenoiserTarget:
    """What a file of weights does not say of itself; the defaults are DDS's ImageNet model."""

    image_size: int = 256
    schedule: str = "linear"
    num_timesteps: int = 1000
    rescaled_time: bool = False  # times of 0..1000 whatever the number of timesteps
    head_width: int = 64
    attention_order: str = "legacy"


def denoiser_spec(
    *,
    architecture: str,
    channels: int,
    image_size: int,
    options: dict[str, object],
    trained_for: dict[str, object],
    diffusion: Diffusion,
) -> ModelSpec:
    """The spec of a denoiser: images enter on [-1, 1], and its diffusion travels with it."""
    return ModelSpec(
        architecture=architecture,
        num_classes=0,  # it tells none apart
        channels=channels,
        image_size=image_size,
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
        options=options,
        trained_for={**trained_for, "diffusion": diffusion.to_dict()},
    )


def import_denoiser(
    path: Path, target: DenoiserTarget, *, entry: str | None = None
) -> tuple[PixelModel, ImportReport]:
    """The denoiser that `path` holds, in eval mode, and what became of each tensor."""
    checkpoint = read_checkpoint(path, entry=entry)
    state = {name.removeprefix("module."): value for name, value in checkpoint.tensors.items()}
    if not is_guided(state):
        raise CasemateError("weights", path, "is no UNet of guided- or improved-diffusion")
    scale = 1000 / target.num_timesteps if target.rescaled_time else 1.0
    variance = "learned_range" if learns_variance(state) else "fixed_large"
    spec = denoiser_spec(
        architecture="unet",
        channels=state["input_blocks.0.0.weight"].shape[1],
        image_size=target.image_size,
        options=unet_config(state, head_width=target.head_width),
        trained_for={"imported_from": path.name, "sha256": digest_file(path)},
        diffusion=Diffusion.named(
            target.schedule, target.num_timesteps, variance_type=variance, time_scale=scale
        ),
    )
    model = PixelModel(spec)
    assert isinstance(model.net, TimedUNet)
    report = load_matching(
        model.net.unet,
        to_diffusers(state, head_width=target.head_width, order=target.attention_order),
        origin=("weights", str(path)),
        remedy=REMEDY,
    )
    return model.eval(), report
