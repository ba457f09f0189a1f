"""Architectures by name: timm's, variants of them, our own and user-defined ones."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import timm
import torch
from timm.layers import PatchEmbed, to_2tuple
from timm.models.xcit import ConvPatchEmbed
from torch import nn

from components.core import user_code
from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.models.adapt import set_xcit_patch
from components.models.names import VARIANTS
from components.models.networks import program, robustbench
from components.models.networks.preact import preact_resnet18, wrn_28_10
from components.models.networks.tiny import tiny_vit, tiny_xcit
from components.models.networks.unet import tiny_unet, unet
from components.models.spec import ModelSpec

OWN: Mapping[str, Callable[..., nn.Module]] = {
    "tiny_vit": tiny_vit,
    "tiny_xcit": tiny_xcit,
    "preact_resnet18": preact_resnet18,
    "wrn_28_10": wrn_28_10,
}
# Networks that estimate clean images from noisy ones and their noise levels.
DENOISERS: Mapping[str, Callable[..., nn.Module]] = {"tiny_unet": tiny_unet, "unet": unet}
WEIGHT_OPTIONS = ("pretrained", "checkpoint_path")  # of timm; building downloads nothing

COUNTS = (
    *("depth", "depths", "layers", "cls_attn_layers", "embed_dim", "channels", "widths"),
    *("num_heads", "patch_size", "stem_patch", "window_size"),
)  # options that are at least 1 and at most MOST; none is negative
MOST = 2**14


class Sizes(NamedTuple):
    """Sizes of a network's input and output, given by the data."""

    image_size: int
    channels: int
    num_classes: int


@dataclass(frozen=True, slots=True)
class Maker:
    """How the network of one name is built."""

    make: Callable[..., nn.Module]
    arguments: Callable[[Sizes], dict[str, Any]]  # the arguments that the data determine
    variant: Mapping[str, Any] = field(default_factory=dict)  # options implied by the name
    classifies: bool = True  # False: estimates images


def _own(architecture: str) -> Maker | None:
    make = OWN.get(architecture) or DENOISERS.get(architecture)
    return make and Maker(make, Sizes._asdict, classifies=architecture in OWN)


def _timm(architecture: str) -> Maker | None:
    if not timm.is_model(architecture):
        return None
    fixed = timm.get_pretrained_cfg(architecture).fixed_input_size  # of position embeddings

    def arguments(sizes: Sizes) -> dict[str, Any]:
        named = {"in_chans": sizes.channels, "num_classes": sizes.num_classes}
        return {**named, "img_size": sizes.image_size} if fixed else named

    return Maker(partial(timm.create_model, architecture), arguments)


def _variant(architecture: str) -> Maker | None:
    base, options = VARIANTS.get(architecture, (None, {}))
    maker = _timm(base) if base else None
    return maker and replace(maker, variant=options)


def _users(architecture: str) -> Maker | None:
    """A user-defined factory: `build(*, num_classes, channels, image_size, **options)`."""
    if not user_code.is_reference(architecture):
        return None
    return Maker(partial(_users_network, architecture), Sizes._asdict)


def _program(architecture: str) -> Maker | None:
    """A saved program, which has its sizes."""
    if not program.is_program(architecture):
        return None
    return Maker(partial(program.load_program, architecture), _no_arguments)


def _robustbench(architecture: str) -> Maker | None:
    """A network of the package robustbench, which has its sizes."""
    if not robustbench.is_robustbench(architecture):
        return None
    entry = robustbench.Entry.of(architecture.removeprefix(robustbench.PREFIX))
    return Maker(partial(robustbench.build, entry), _no_arguments)


def _no_arguments(_: Sizes) -> dict[str, Any]:
    return {}


FAMILIES: tuple[Callable[[str], Maker | None], ...] = (
    *(_users, _own, _variant, _timm),
    *(_program, _robustbench),
)


def find_maker(architecture: str) -> Maker | None:
    """The maker of a network, from the first family that has its name."""
    return next(filter(None, (find(architecture) for find in FAMILIES)), None)


def build_network(
    architecture: str,
    *,
    image_size: int,
    channels: int,
    num_classes: int,
    options: Mapping[str, Any],
) -> nn.Module:
    """The bare network for normalised images of side `image_size`, with fresh weights.

    `options` go to the architecture's own maker, except `stem_patch`: an XCiT's patch side, smaller
    than the one it was designed with.
    """
    maker = find_maker(architecture)
    if maker is None:
        raise _unknown(architecture)
    arguments = maker.arguments(Sizes(image_size, channels, num_classes))
    _check_options(options, taken={*arguments, "model_name"})
    chosen = {**maker.variant, **options}
    stem_patch = chosen.pop("stem_patch", None)
    try:
        net = maker.make(**arguments, **chosen)
    except (TypeError, AssertionError, ValueError, LookupError, ArithmeticError) as error:
        raise CasemateError(
            "model.options", dict(options), f"do not fit {architecture} at {image_size}px: {error}"
        ) from error
    except (MemoryError, RuntimeError) as error:
        if "allocate" not in str(error):
            raise
        remedy = f"at {image_size}px does not fit into the memory of this machine"
        raise CasemateError("model.architecture", architecture, remedy) from error
    if stem_patch is not None:
        set_xcit_patch(net, stem_patch)
    _check_patches(net, image_size)
    return net


def network_for(spec: ModelSpec) -> nn.Module:
    """The bare network of a model, with fresh weights."""
    return build_network(
        spec.architecture,
        image_size=spec.network_size,
        channels=spec.channels,
        num_classes=spec.num_classes,
        options=spec.options,
    )


def _users_network(architecture: str, **arguments: Any) -> nn.Module:
    """The network of a user-defined factory."""
    sizes = {key: arguments.pop(key) for key in Sizes._fields}
    taken = sizes_taken(architecture)
    options = _users_options(architecture, arguments, given=taken)
    chosen = {key: sizes[key] for key in taken}
    try:
        net = user_code.load(architecture, field="architecture")(**chosen, **options)
    except Exception as error:
        if isinstance(error, RuntimeError) and torch.get_default_device().type == "meta":
            raise  # it computes with values, which shapes do not have
        remedy = f"fails to build: {type(error).__name__}: {' '.join(str(error).split())}"
        raise CasemateError("model.architecture", architecture, remedy) from error
    if not isinstance(net, nn.Module):
        remedy = f"returns a {type(net).__name__}, not an nn.Module"
        raise CasemateError("model.architecture", architecture, remedy)
    return net


def sizes_taken(architecture: str) -> tuple[str, ...]:
    """The sizes that a user-defined factory takes; recipes need all of them."""
    names = user_code.argument_names(architecture, field="architecture")
    return tuple(name for name in Sizes._fields if names is None or name in names)


def _users_options(
    architecture: str, options: Mapping[str, Any], *, given: tuple[str, ...] = Sizes._fields
) -> dict[str, Any]:
    """Checked options of a user-defined factory; problems refer to the `model` section."""
    try:
        return user_code.checked_options(architecture, options, field="architecture", given=given)
    except SettingError as error:
        first = error.problems[0]
        raise CasemateError(f"model.{first.field}", first.value, first.remedy) from error


def is_known(architecture: str) -> bool:
    """Whether `build_network` can build a classifier of that name."""
    maker = find_maker(architecture)
    return maker is not None and maker.classifies


def check_known(architecture: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise an error for an unknown name, without building a network.

    `options` are checked if that needs no network: for a user-defined factory.
    """
    if user_code.is_reference(architecture):
        _users_options(architecture, options or {})
    elif (maker := find_maker(architecture)) is None:
        raise _unknown(architecture)
    elif maker.arguments is _no_arguments:
        remedy = (
            "cannot be trained, it has its weights; attack, evaluate or certify it with --model"
        )
        raise CasemateError("model.architecture", architecture, remedy)


def _unknown(architecture: str) -> CasemateError:
    family = architecture.split("_")[0]
    close = get_close_matches(architecture, [*OWN, *VARIANTS, *timm.list_models()], n=3)
    close += [*OWN, *(name for name in VARIANTS if name.startswith(family))]
    close = list(dict.fromkeys([*close, *timm.list_models(f"{family}*")[:5]]))
    return CasemateError(
        "model.architecture", architecture, f"is unknown here and in timm; for example {close}"
    )


def _check_options(options: Mapping[str, Any], *, taken: Container[str]) -> None:
    for key, value in options.items():
        if key in taken:
            raise CasemateError(f"model.options.{key}", value, "follows from the data; remove it")
        if key in WEIGHT_OPTIONS:
            raise CasemateError(
                f"model.options.{key}", value, "is not an option here; use model.pretrained"
            )
        _check_number(key, value)


def _check_number(key: str, value: Any) -> None:
    """Raise an error for values that timm accepts silently: no blocks, a rate above 1."""
    for number in value if isinstance(value, list | tuple) else [value]:
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not isfinite(number):
            raise CasemateError(f"model.options.{key}", value, "is not a finite number")
        if key.endswith("_rate") and not 0 <= number < 1:
            raise CasemateError(f"model.options.{key}", value, "is not a rate; it is in [0, 1)")
        if number < (least := 1 if key in COUNTS else 0):
            raise CasemateError(f"model.options.{key}", value, f"must be at least {least}")
        if key in COUNTS and number > MOST:
            raise CasemateError(f"model.options.{key}", value, f"must be at most {MOST:,}")


def _check_patches(net: nn.Module, image_size: int) -> None:
    """Raise an error if patches do not tile the image: timm would ignore its last columns."""
    embed = getattr(net, "patch_embed", None)
    if not isinstance(embed, PatchEmbed | ConvPatchEmbed) or getattr(
        embed, "dynamic_img_pad", False
    ):
        return
    for side in to_2tuple(embed.patch_size):
        if image_size % side:
            raise CasemateError(
                "model.options.patch_size",
                side,
                f"does not divide the image side {image_size}; change it or set model.upsample",
            )
