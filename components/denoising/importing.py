"""Import denoisers of other projects: a file and its description give a model."""

from dataclasses import dataclass
from pathlib import Path

from components.core.digests import digest_file
from components.core.errors import CasemateError
from components.denoising.diffusion import Diffusion
from components.denoising.guided import (
    State,
    head_width_of,
    is_guided,
    layout_of,
    learns_variance,
    to_diffusers,
    unet_config,
)
from components.models.importing.match import ImportReport, load_matching
from components.models.importing.read import read_checkpoint
from components.models.networks.unet import TimedUNet
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec

HEAD_WIDTH = 64  # of guided-diffusion's models for ImageNet
MIN_TIMESTEPS = 10  # as for denoisers that recipes train
REMEDY = "check the head width, and that the file is a UNet of guided- or improved-diffusion"


@dataclass(frozen=True, slots=True)
class DenoiserTarget:
    """What cannot be inferred from a weights file; defaults are those of DDS's ImageNet model.

    Heads are given by their width, or by their number at every level with attention.
    """

    image_size: int = 256
    schedule: str = "linear"
    num_timesteps: int = 1000
    rescaled_time: bool = False  # times are 0..1000 for any number of timesteps
    head_width: int | None = None  # None: HEAD_WIDTH, or derived from num_heads
    num_heads: int | None = None
    attention_order: str = "legacy"


def denoiser_spec(
    *,
    architecture: str,
    channels: int,
    image_size: int,
    options: dict[str, object],
    diffusion: Diffusion,
    trained_for: dict[str, object] | None = None,
) -> ModelSpec:
    """The spec of a denoiser: input images are on [-1, 1]; its diffusion is in `trained_for`."""
    return ModelSpec(
        architecture=architecture,
        num_classes=0,  # no classes
        channels=channels,
        image_size=image_size,
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
        options=options,
        trained_for={**(trained_for or {}), "diffusion": diffusion.to_dict()},
    )


def import_denoiser(
    path: Path, target: DenoiserTarget, *, entry: str | None = None
) -> tuple[PixelModel, ImportReport]:
    """The denoiser in `path`, in eval mode, and the import report."""
    checkpoint = read_checkpoint(path, entry=entry)
    state = {name.removeprefix("module."): value for name, value in checkpoint.tensors.items()}
    if not is_guided(state):
        raise CasemateError("weights", path, "is not a UNet of guided- or improved-diffusion")
    _check_sizes(state, target)
    head_width = _head_width(state, target)
    scale = 1000 / target.num_timesteps if target.rescaled_time else 1.0
    variance = "learned_range" if learns_variance(state) else "fixed_large"
    spec = denoiser_spec(
        architecture="unet",
        channels=state["input_blocks.0.0.weight"].shape[1],
        image_size=target.image_size,
        options=unet_config(state, head_width=head_width),
        trained_for={"imported_from": path.name, "sha256": digest_file(path)},
        diffusion=Diffusion.named(
            target.schedule, target.num_timesteps, variance_type=variance, time_scale=scale
        ),
    )
    model = PixelModel(spec)
    assert isinstance(model.net, TimedUNet)
    report = load_matching(
        model.net.unet,
        to_diffusers(state, head_width=head_width, order=target.attention_order),
        origin=("weights", str(path)),
        remedy=REMEDY,
    )
    return model.eval(), report


def attention_heads(model: PixelModel) -> dict[int, int]:
    """Number of heads by channels of the attention layers of a denoiser."""
    from diffusers.models.attention_processor import Attention

    found = [module for module in model.modules() if isinstance(module, Attention)]
    return dict(sorted((int(module.inner_dim), int(module.heads)) for module in found))


def _head_width(state: State, target: DenoiserTarget) -> int | None:
    if target.num_heads is None:
        return target.head_width or HEAD_WIDTH
    if target.head_width is not None:
        raise CasemateError("--num-heads", target.num_heads, "and --head-width: give one of them")
    return head_width_of(state, num_heads=target.num_heads)


def _check_sizes(state: State, target: DenoiserTarget) -> None:
    """Raise an error for an unsupported image size or number of timesteps."""
    stride = 2 ** (len(layout_of(state).levels) - 1)
    if target.image_size % stride:
        remedy = f"is not a multiple of {stride}, which this UNet needs"
        raise CasemateError("--image-size", target.image_size, remedy)
    if target.num_timesteps < MIN_TIMESTEPS:
        remedy = f"are too few: at least {MIN_TIMESTEPS}, as many as the model was trained with"
        raise CasemateError("--timesteps", target.num_timesteps, remedy)
