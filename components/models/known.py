"""Properties of networks that follow from name and options alone. Needs no torch.

Torch and timm take seconds to import, and most recipes name one of a few networks with ordinary
options. The properties here are those of the network that `build_network` makes. Other networks
and other options are not covered; the network must be built and inspected.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Known:
    """Properties of a network that can be built."""

    drops_tokens: bool = False  # a plain vision transformer
    scales_attention: bool = False
    has_blocks: bool = False  # residual blocks that analyses find


Rule = Callable[[Options, int], bool]

# Names whose networks differ only in size, with the side of their patches.
_VIT = re.compile(
    r"deit_(?:tiny|small|base)_patch(16)_224|vit_(?:tiny|small|base)_patch(16|32)_224"
    r"|vit_large_patch(16|32)_224"
    r"|vit_(?:base_patch(16|32)|large_patch(16|32)|huge_patch(14))_224\.orig_in21k"
    r"|vit_base_patch(16|32)_224\.augreg_in1k|deit3_large_patch(16)_224\.fb_in1k"
)
_XCIT = re.compile(r"xcit_(?:nano|tiny|small|medium|large)_12_p(8|16)_224")
_CAIT = re.compile(r"cait_s(?:12|24)_224")
_RESNET = re.compile(r"(?:resnet(?:18|50|101)|wide_resnet(?:50|101)_2)(?:\.tv_in1k)?|resnet50_gelu")
_BIT = re.compile(r"resnetv2_(?:50x[13]|101x[13]|152x4)_bit\.goog_in21k")
# timm's hub has weights of these, for three channels.
_WITH_WEIGHTS = re.compile(
    r"deit_(?:tiny|small|base)_patch16_224|vit_(?:tiny|small|base)_patch16_224"
    r"|resnet(?:18|50|101)\.tv_in1k|wide_resnet(?:50|101)_2\.tv_in1k"
    r"|vit_(?:base_patch(?:16|32)|large_patch(?:16|32)|huge_patch14)_224\.orig_in21k"
    r"|vit_base_patch(?:16|32)_224\.augreg_in1k|deit3_large_patch16_224\.fb_in1k"
    r"|resnetv2_(?:50x[13]|101x[13]|152x4)_bit\.goog_in21k"
)
_SIZES_AND_RATES = {"patch_size", "drop_path_rate"}  # do not change the function of the weights

_DOWN = {"DownBlock2D", "AttnDownBlock2D"}
_UP = {"UpBlock2D", "AttnUpBlock2D"}


def known_network(architecture: str, options: Options, *, image_size: int) -> Known | None:
    """Properties of a network for images of this side; None: not covered, build it."""
    for pattern, rule, known in _RULES:
        if named := re.fullmatch(pattern, architecture):
            defaults = {"patch_size": int(named[named.lastindex])} if named.lastindex else {}
            return known if rule({**defaults, **options}, image_size) else None
    return None


def starts_from_timm(architecture: str, options: Options) -> bool:
    """Whether timm certainly has weights for this network with three input channels."""
    return bool(_WITH_WEIGHTS.fullmatch(architecture)) and options.keys() <= _SIZES_AND_RATES


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= 10_000


def _are_counts(values: object) -> bool:
    return isinstance(values, list | tuple) and bool(values) and all(map(_is_count, values))


def _is_rate(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1  # type: ignore[operator]


def _is_halved(side: int, *, patch: Any, times: int = 0) -> bool:
    """Whether patches tile a side and their number can be halved `times` times."""
    return _is_count(patch) and times < 10 and bool(side % (patch << times) == 0)


def _given(options: Options, **checks: Callable[[Any], bool]) -> bool:
    """Whether all options are among `checks` and have values that their checks pass."""
    return all(key in checks and checks[key](value) for key, value in options.items())


def _vit(options: Options, side: int) -> bool:
    counts = dict.fromkeys(("patch_size", "depth"), _is_count)
    patch = options["patch_size"]
    return _given(options, **counts, drop_path_rate=_is_rate) and _is_halved(side, patch=patch)


def _tiny_vit(options: Options, side: int) -> bool:
    given = {"patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4, **options}
    if not _given(given, **dict.fromkeys(("patch_size", *_TINY), _is_count)):
        return False
    whole_heads = bool(given["embed_dim"] % given["num_heads"] == 0)
    return whole_heads and _is_halved(side, patch=given["patch_size"])


_TINY = ("embed_dim", "depth", "num_heads")


def _tiny_xcit(options: Options, side: int) -> bool:
    """Built with patches of 8 pixels first; the stem halves the width three times."""
    given = {"patch_size": 4, "embed_dim": 64, **options}
    fits = given["patch_size"] in (2, 4, 8) and side % 8 == 0 and _tiny_vit(given, side)
    return fits and bool(given["embed_dim"] % 8 == 0)


def _xcit(options: Options, side: int) -> bool:
    """`stem_patch` removes the first strides of the stem, so it is at most the patch size."""
    patch = options["patch_size"]
    checks = {
        "patch_size": lambda value: type(value) is int and value in (8, 16),
        "stem_patch": lambda value: type(value) is int and value in (1, 2, 4, 8, patch),
        "drop_path_rate": _is_rate,
    }
    return _given(options, **checks) and _is_halved(side, patch=patch)


def _cait(options: Options, side: int) -> bool:
    return _given(options, drop_path_rate=_is_rate) and side % 16 == 0


def _resnet(options: Options, side: int) -> bool:
    return _given(options, drop_path_rate=_is_rate)


def _preact(options: Options, side: int) -> bool:
    if not options:
        return True
    both = options.keys() == {"layers", "widths"} and all(map(_are_counts, options.values()))
    if not both or any(width % 8 for width in options["widths"]):
        return False
    return len(options["layers"]) == len(options["widths"])


def _tiny_unet(options: Options, side: int) -> bool:
    given = {"widths": (8, 16, 32), "patch": 1, **options}
    if not _given(given, widths=_are_counts, patch=_is_count):
        return False
    widths = given["widths"]
    return all(width % 8 == 0 for width in widths) and _is_halved(
        side, times=len(widths) - 1, patch=given["patch"]
    )


def _unet(options: Options, side: int) -> bool:
    """Plain UNets only, with all options given: diffusers has many more."""
    parts = ("down_block_types", "up_block_types", "block_out_channels")
    if not all(isinstance(options.get(key), list | tuple) for key in parts):
        return False
    down, up, widths = (options[key] for key in parts)
    blocks: dict[str, Callable[[Any], bool]] = {
        "down_block_types": lambda names: all(name in _DOWN for name in names),
        "up_block_types": lambda names: all(name in _UP for name in names),
        "block_out_channels": _are_counts,
        "layers_per_block": _is_count,
        "attention_head_dim": _is_count,
        "dropout": _is_rate,
    }
    if not _given(options, **blocks):
        return False
    head = options.get("attention_head_dim", 8)
    fits = all(width % 32 == 0 and width % head == 0 for width in widths)
    agrees = all(len(a) == len(b) for a, b in pairwise((down, up, widths)))
    return fits and agrees and _is_halved(side, times=len(widths) - 1, patch=1)


_PLAIN = Known(drops_tokens=True, scales_attention=True, has_blocks=True)
_ATTENDS, _RESIDUAL = Known(scales_attention=True, has_blocks=True), Known(has_blocks=True)
_RULES: tuple[tuple[str | re.Pattern[str], Rule, Known], ...] = (
    (_VIT, _vit, _PLAIN),
    ("tiny_vit", _tiny_vit, _PLAIN),
    ("tiny_xcit", _tiny_xcit, _ATTENDS),
    (_XCIT, _xcit, _ATTENDS),
    (_CAIT, _cait, _ATTENDS),
    (_RESNET, _resnet, _RESIDUAL),
    (_BIT, _resnet, _RESIDUAL),
    ("preact_resnet18|wrn_28_10", _preact, _RESIDUAL),
    ("tiny_unet", _tiny_unet, Known()),
    ("unet", _unet, Known()),
)
