"""Layouts of published weights: wrappers around the network and names of its tensors.

| layout | wrapped as | names |
|---|---|---|
| `timm` | nothing, `module.` or `_orig_mod.` | timm's |
| `deit` | the same | timm's, older ones (facebookresearch/deit) |
| `xcit` | the same | facebookresearch/xcit, or timm's as in Debenedetti's releases |
| `robustbench` | `model.` beside `normalize.mean`, `.std`; or `mu`, `sigma` | the network's own, \
or those of TRADES' wide ResNets and of kuangliu's PreAct ResNets |
| `smoothed-vit` | `module.model.` beside `module.normalizer.`, `module.attacker.` | timm's |
| `hf-vit` | `vit.`, query, key and value apart | Hugging Face's |
"""

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vit_names
from torch import Tensor, nn

from components.core.errors import CasemateError
from components.models.adapt import State, is_resizable

AUTO = "auto"
# A name that a file of the layout must contain; `None`: no such name.
_REQUIRED: Mapping[str, str | None] = {
    "hf-vit": r"embeddings\.patch_embeddings\.projection\.weight$",
    "smoothed-vit": r"(^|\.)new_mean$",
    "robustbench": None,
    "xcit": r"(^|\.)cls_attn_blocks\.",
    "deit": r"(^|\.)patch_embed\.proj\.weight$",
    "timm": None,
}
LAYOUTS = tuple(_REQUIRED)
# A name that only files of the layout contain, most specific first; other files are timm's.
_TELLTALE = {
    "hf-vit": _REQUIRED["hf-vit"],
    "smoothed-vit": _REQUIRED["smoothed-vit"],
    "robustbench": r"(^|\.)(normalize\.mean|mu)$",
    "xcit": r"(^|\.)pos_embeder\.",
}
_WRAPPERS = ("module.", "_orig_mod.", "model.")
_ATTACKER = "attacker."  # the robustness library stores the network a second time in its attacker
_MEAN = re.compile(r"(normalizer(\.1|\.normalizer)?\.new_mean|normalize\.mean|mean|mu)")
_STD = re.compile(r"(normalizer(\.1|\.normalizer)?\.new_std|normalize\.std|std|sigma)")


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """Tensors of the bare network, and the normalisation of its wrapper if there was one."""

    layout: str
    state: dict[str, Tensor]
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None


def unwrap(tensors: State, *, layout: str = AUTO) -> Unwrapped:
    """Remove the wrappers of the layout; Hugging Face's names become timm's."""
    chosen = _detect(tensors) if layout == AUTO else _confirm(tensors, layout)
    state, statistics = dict(tensors), {}
    while True:
        for key, pattern in (("mean", _MEAN), ("std", _STD)):
            for name in [name for name in state if pattern.fullmatch(name)]:
                statistics[key] = tuple(state.pop(name).double().flatten().tolist())
        state = {name: value for name, value in state.items() if not name.startswith(_ATTACKER)}
        shared = [w for w in _WRAPPERS if state and all(name.startswith(w) for name in state)]
        if not shared:
            break
        state = {name.removeprefix(shared[0]): value for name, value in state.items()}
    if chosen == "hf-vit":
        state = _from_hugging_face(state)
    return Unwrapped(chosen, state, statistics.get("mean"), statistics.get("std"))


def _detect(tensors: State) -> str:
    for layout, pattern in _TELLTALE.items():
        if pattern and any(re.search(pattern, name) for name in tensors):
            return layout
    return "timm"


def _confirm(tensors: State, layout: str) -> str:
    if layout not in LAYOUTS:
        raise CasemateError("--layout", layout, f"is unknown; one of {[AUTO, *LAYOUTS]}")
    pattern = _REQUIRED[layout]
    if pattern and not any(re.search(pattern, name) for name in tensors):
        raise CasemateError(
            "--layout",
            layout,
            f"does not fit: no tensor's name matches {pattern}; this looks like {_detect(tensors)}",
        )
    return layout


Renames = Iterable[tuple[str, str | Callable[[re.Match[str]], str]]]  # patterns, applied in turn


def _rename(state: State, renames: Renames) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed


_HF_NAMES: Renames = (
    (r"^(?:vit|deit)\.", ""),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^encoder\.layer\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.attention\.", ".attn."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^(?:cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)


def _from_hugging_face(state: State) -> dict[str, Tensor]:
    """timm's names; query, key and value stacked into one projection, in that order."""
    renamed = _rename(state, _HF_NAMES)
    for query in [name for name in renamed if re.search(r"\.attn\.query\.(weight|bias)$", name)]:
        parts = [query.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if all(part in renamed for part in parts):
            fused = torch.cat([renamed.pop(part) for part in parts])
            renamed[query.replace(".query.", ".qkv.")] = fused
    return renamed


_WIDE_RESNET_NAMES: Renames = (
    (r"^conv1\.", "stem.conv."),
    (
        r"^block(\d+)\.layer\.(\d+)\.",
        lambda found: f"stages.{int(found[1]) - 1}.blocks.{found[2]}.",
    ),
    (r"^bn1\.", "norm."),
    (r"\.bn(\d)\.", r".norm\1."),
    (r"\.convShortcut\.", ".downsample.conv."),
    (r"^fc\.", "head.fc."),
)


_PREACT_NAMES: Renames = (
    (r"^conv1\.", "stem.conv."),
    (r"^layer(\d+)\.(\d+)\.", lambda found: f"stages.{int(found[1]) - 1}.blocks.{found[2]}."),
    (r"^bn\.", "norm."),
    (r"\.bn(\d)\.", r".norm\1."),
    (r"\.shortcut\.0\.", ".downsample.conv."),
    (r"^linear\.", "head.fc."),
)


def _from_cifar_resnet(state: State, net: nn.Module) -> dict[str, Tensor]:
    """timm's names for the pre-activation networks of TRADES and RobustBench.

    Their heads are linear maps, ours is a convolution of 1 x 1 pixels. RobustBench's PreAct ResNets
    come in two kinds: with a norm before the head, shortcuts start after the first norm and ReLU,
    as in our network; without it, they start before, which is a different function.
    """
    if any(name.startswith("block1.layer.") for name in state):
        renamed = _rename(state, _WIDE_RESNET_NAMES)
    elif "layer1.0.bn1.weight" in state and "linear.weight" in state:
        if "bn.weight" not in state:
            raise CasemateError(
                "weights",
                "PreAct ResNet",
                "has no norm before its head (`bn`) and takes shortcuts before the norm of a "
                "block: a different function from preact_resnet18, cannot be imported",
            )
        renamed = _rename(state, _PREACT_NAMES)
    else:
        return dict(state)
    if (head := renamed.get("head.fc.weight")) is not None and head.ndim == 2:
        renamed["head.fc.weight"] = head[:, :, None, None]
    return renamed


def to_timm_names(state: State, net: nn.Module) -> dict[str, Tensor]:
    """Current timm names for the tensors of `net`'s family, by timm's own conversion if any.

    timm would also resample; size-dependent tensors are not passed to it, so that only
    `adapt.fit_sizes` resamples and reports it.
    """
    kept = {name: value for name, value in state.items() if is_resizable(name)}
    others = {name: value for name, value in state.items() if name not in kept}
    try:
        return {**_conversion_for(net)(others, net), **kept}
    except (KeyError, AttributeError, RuntimeError, AssertionError) as error:
        raise CasemateError(
            "--architecture",
            type(net).__name__,
            f"cannot take these weights: timm's conversion failed at {error}",
        ) from error


def _conversion_for(net: nn.Module) -> Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]]:
    if isinstance(net, VisionTransformer):
        return partial(vit_names, adapt_layer_scale=True)  # DeiT III calls layer scales gamma_1, _2
    if isinstance(net, ResNetV2):
        return _from_cifar_resnet
    family = importlib.import_module(type(net).__module__)
    convert: Callable[..., dict[str, Tensor]] = getattr(
        family, "checkpoint_filter_fn", lambda tensors, net: tensors
    )
    return convert
