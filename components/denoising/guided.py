"""Checkpoints of guided-diffusion and improved-diffusion as networks of diffusers.

Both projects build the same UNet (Dhariwal & Nichol 2021; Nichol & Dhariwal 2021), a list of input
blocks, a middle and a list of output blocks, numbered throughout. diffusers groups the same layers
by resolution. The architecture is inferred from the tensors; the width or number of attention heads
and the order of queries, keys and values cannot be inferred and must be given.

| theirs | diffusers' |
|---|---|
| `in_layers.0`, `.2` | `norm1`, `conv1` |
| `emb_layers.1` | `time_emb_proj` |
| `out_layers.0`, `.3` | `norm2`, `conv2` |
| `skip_connection` | `conv_shortcut` |
| `norm`, `qkv`, `proj_out` | `group_norm`, `to_q` + `to_k` + `to_v`, `to_out.0` |
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from components.core.errors import CasemateError

State = Mapping[str, Tensor]
KEY = "weights"
ORDERS = ("legacy", "new")
_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_OUTSIDE = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "middle_block.0": "mid_block.resnets.0",
    "middle_block.1": "mid_block.attentions.0",
    "middle_block.2": "mid_block.resnets.1",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}


class Level(NamedTuple):
    """The layers of one resolution: their width, and whether they have attention."""

    width: int
    attends: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The inferred architecture, and the new place of each block."""

    levels: tuple[Level, ...]
    num_layers: int  # residual blocks per level, on the way down
    resnet_resampling: bool  # resolution changes inside residual blocks
    places: Mapping[str, str]  # their prefixes -> diffusers' prefixes


def is_guided(state: State) -> bool:
    """Whether these tensors are named as in guided-diffusion."""
    return "input_blocks.0.0.weight" in state and "time_embed.0.weight" in state


def layout_of(state: State) -> Layout:
    """The architecture inferred from names and shapes."""
    if not is_guided(state):
        raise CasemateError(KEY, "tensors", "are not those of guided- or improved-diffusion")
    if "label_emb.weight" in state:
        remedy = (
            "makes the model class-conditional; a denoiser must not be conditioned on the label"
        )
        raise CasemateError(KEY, "label_emb.weight", remedy)
    inputs, outputs = (_num_blocks(state, kind) for kind in ("input_blocks", "output_blocks"))
    if inputs != outputs or inputs < 2:
        remedy = f"differ in number from the input_blocks, {inputs}; the file is incomplete"
        raise CasemateError(KEY, f"{outputs} output_blocks", remedy)
    widths: list[int] = []
    attends: list[bool] = []
    counts, resampling = [0], False
    places = dict(_OUTSIDE)
    for number in range(1, inputs):
        block = f"input_blocks.{number}"
        level = len(counts) - 1
        if _is_down(state, number):
            resampling = f"{block}.0.op.weight" not in state
            places[f"{block}.0"] = f"down_blocks.{level}.downsamplers.0"
            places[f"{block}.0.op"] = f"down_blocks.{level}.downsamplers.0.conv"
            counts.append(0)
            continue
        if not counts[-1]:
            widths.append(_tensor(state, f"{block}.0.out_layers.3.weight").shape[0])
            attends.append(f"{block}.1.qkv.weight" in state)
        places[f"{block}.0"] = f"down_blocks.{level}.resnets.{counts[-1]}"
        places[f"{block}.1"] = f"down_blocks.{level}.attentions.{counts[-1]}"
        counts[-1] += 1
    if len(set(counts)) != 1:
        raise CasemateError(KEY, counts, "residual blocks per level differ; this is not supported")
    places |= _places_up(state, num_levels=len(counts), num_layers=counts[0], attends=attends)
    levels = tuple(Level(w, a) for w, a in zip(widths, attends, strict=True))
    return Layout(levels, counts[0], resampling, places)


def attention_widths(state: State) -> list[int]:
    """Distinct channel counts of all attention layers, levels and middle."""
    return sorted({v.shape[0] // 3 for name, v in state.items() if name.endswith(".qkv.weight")})


def head_width_of(state: State, *, num_heads: int) -> int | None:
    """Channels per head if every attention has `num_heads`; None: all channels of a level.

    `UNet2DModel` has one `attention_head_dim` for all levels, whose None means one head each:
    several heads at levels of different widths are not supported.
    """
    widths = attention_widths(state)
    if bad := [width for width in widths if width % num_heads]:
        raise CasemateError("--num-heads", num_heads, f"do not divide {bad[0]} channels")
    if num_heads > 1 and len(widths) > 1:
        listed = ", ".join(f"{width // num_heads} of {width}" for width in widths)
        remedy = (
            f"would have several widths ({listed} channels), but diffusers' UNet2DModel has one "
            "attention_head_dim for all levels: this model cannot be converted"
        )
        raise CasemateError("--num-heads", num_heads, remedy)
    return widths[0] // num_heads if len(widths) == 1 else None


def unet_config(state: State, *, head_width: int | None) -> dict[str, Any]:
    """The arguments of `UNet2DModel` for these tensors, without the sizes of input and output."""
    layout = layout_of(state)
    resnet = "resnet" if layout.resnet_resampling else "conv"
    plain = ("ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D")
    if not layout.resnet_resampling:
        plain = ("DownBlock2D", "UpBlock2D")
    for width in attention_widths(state):
        if head_width and width % head_width:
            raise CasemateError("--head-width", head_width, f"does not divide {width} channels")
    down = [("AttnDownBlock2D" if level.attends else plain[0]) for level in layout.levels]
    up = [("AttnUpBlock2D" if level.attends else plain[1]) for level in reversed(layout.levels)]
    time_width = _tensor(state, "middle_block.0.emb_layers.1.weight").shape[0]
    scale = time_width == 2 * layout.levels[-1].width
    return {
        "block_out_channels": [level.width for level in layout.levels],
        "layers_per_block": layout.num_layers,
        "down_block_types": down,
        "up_block_types": up,
        "downsample_type": resnet,
        "upsample_type": resnet,
        "resnet_time_scale_shift": "scale_shift" if scale else "default",
        "attention_head_dim": head_width,
        "attn_norm_num_groups": 32,  # otherwise diffusers omits the norm with scale and shift
        "learn_variance": learns_variance(state),
    }


def learns_variance(state: State) -> bool:
    """Whether there are twice as many output channels as input channels."""
    given = _tensor(state, "input_blocks.0.0.weight").shape[1]
    return bool(_tensor(state, "out.2.weight").shape[0] == 2 * given)


def to_diffusers(
    state: State, *, head_width: int | None, order: str = "legacy"
) -> dict[str, Tensor]:
    """The same tensors under the names of `UNet2DModel`, with separate queries, keys and values."""
    if order not in ORDERS:
        raise CasemateError("--attention-order", order, f"is unknown; one of {list(ORDERS)}")
    places = layout_of(state).places
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        prefix = _longest_prefix(name, places)
        place, rest = places[prefix], name.removeprefix(f"{prefix}.")
        if match := re.fullmatch(r"qkv\.(weight|bias)", rest):
            for part, tensor in zip("qkv", _split(value, head_width, order), strict=True):
                renamed[f"{place}.to_{part}.{match[1]}"] = tensor
        else:
            new = _rename(rest)
            flat = value.squeeze(-1) if new.startswith("to_out") and value.ndim == 3 else value
            renamed[f"{place}.{new}"] = flat
    return renamed


def _tensor(state: State, name: str) -> Tensor:
    """A tensor that is needed to infer the architecture."""
    if name not in state:
        remedy = "is missing: the architecture of the UNet cannot be inferred without it"
        raise CasemateError(KEY, name, remedy)
    return state[name]


def _num_blocks(state: State, kind: str) -> int:
    numbers = {int(m[1]) for name in state if (m := re.match(rf"{kind}\.(\d+)\.", name))}
    if numbers != set(range(len(numbers))):
        raise CasemateError(KEY, kind, f"lack number {min(set(range(len(numbers))) - numbers)}")
    return len(numbers)


def _is_down(state: State, number: int) -> bool:
    """Whether a block halves the resolution: a strided convolution or a residual block.

    The tensors of a down-sampling residual block look like those of others. It has no attention and
    does not change the width; its position follows from the output blocks, of which there is one
    more per level.
    """
    block = f"input_blocks.{number}"
    if f"{block}.0.op.weight" in state:
        return True
    inputs, outputs = (_num_blocks(state, kind) for kind in ("input_blocks", "output_blocks"))
    if any(name.endswith(".0.op.weight") for name in state):
        return False
    # n levels of r blocks: inputs = n r + n, the first convolution and n - 1 halvings included,
    # outputs = n (r + 1): equal. Their up-sampling blocks, counted, are n - 1.
    ups = sum(1 for n in range(outputs) if _up_index(state, n) is not None)
    per_level = inputs // (ups + 1)
    return number % per_level == 0


def _up_index(state: State, number: int) -> int | None:
    """Index of the up-sampling layer inside an output block; None if there is none."""
    block = f"output_blocks.{number}"
    last = max(
        int(m[1]) for name in state if (m := re.match(rf"{re.escape(block)}\.(\d+)\.", name))
    )
    if last == 0:
        return None
    is_conv = f"{block}.{last}.conv.weight" in state
    is_resnet = f"{block}.{last}.in_layers.2.weight" in state
    return last if is_conv or is_resnet else None


def _places_up(
    state: State, *, num_levels: int, num_layers: int, attends: list[bool]
) -> dict[str, str]:
    places = {}
    for number in range(_num_blocks(state, "output_blocks")):
        level, layer = divmod(number, num_layers + 1)
        block, up = f"output_blocks.{number}", f"up_blocks.{level}"
        places[f"{block}.0"] = f"{up}.resnets.{layer}"
        if attends[num_levels - 1 - level]:
            places[f"{block}.1"] = f"{up}.attentions.{layer}"
        if (index := _up_index(state, number)) is not None:
            places[f"{block}.{index}"] = f"{up}.upsamplers.0"
    return places


def _longest_prefix(name: str, places: Mapping[str, str]) -> str:
    found = [prefix for prefix in places if name.startswith(f"{prefix}.")]
    if not found:
        raise CasemateError(KEY, name, "is not part of a guided- or improved-diffusion UNet")
    return max(found, key=len)


def _rename(rest: str) -> str:
    for theirs, ours in _RESNET.items():
        if rest.startswith(f"{theirs}."):
            return f"{ours}.{rest.removeprefix(f'{theirs}.')}"
    if rest.startswith("proj_out."):
        return rest.replace("proj_out.", "to_out.0.")
    if rest.startswith("norm."):
        return f"group_{rest}"
    return rest


def _split(qkv: Tensor, head_width: int | None, order: str) -> list[Tensor]:
    """Queries, keys and values of all heads, from a fused 1 x 1 convolution or its bias.

    `legacy` stores queries, keys and values head by head; `new` stores the queries of all heads,
    then the keys, then the values. For one head (no width) both are the same.
    """
    flat = qkv.squeeze(-1) if qkv.ndim == 3 else qkv
    if order == "new" or head_width is None:
        return list(flat.chunk(3))
    heads = flat.reshape(-1, 3, head_width, *flat.shape[1:])
    return [heads[:, part].flatten(0, 1) for part in range(3)]
