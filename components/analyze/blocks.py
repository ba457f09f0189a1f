"""The blocks of a network, and what their outputs mean, for all analyses.

Transformers come from `models/attention/discover.py`; here are ResNets and modules that a user
names. Every context manager on blocks restores the network exactly, also after an exception.

| family | outputs | class token |
|---|---|---|
| ViT, DeiT, BEiT, Eva | (B, N, C) tokens | token 0 of every block |
| CaiT, XCiT | patch blocks, then class blocks | of class blocks only |
| Swin, LeViT, ResNet | maps that shrink from stage to stage | none |
"""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from timm.models import resnet, resnetv2
from timm.models.cait import Cait
from timm.models.levit import Levit
from timm.models.swin_transformer import SwinTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn

from components.analyze.settings import BlockSettings, Measure, Tokens
from components.core.errors import CasemateError
from components.core.hints import did_you_mean
from components.core.types import Images, LogitsFn
from components.models.attention.discover import (
    FAMILIES,
    LAYOUTS,
    WORKING,
    BlockSite,
    Layout,
    blocks_of,
    check_patchable,
)

SUPPORTED = f"{WORKING}, ResNet, or modules named in blocks.names"
CLASS_BLOCKS: dict[type[nn.Module], str] = {Cait: "blocks_token_only.", Xcit: "cls_attn_blocks."}
SHRINKING = (SwinTransformer, Levit, resnet.ResNet, resnetv2.ResNetV2)
RESNETS: dict[type[nn.Module], str] = {  # names of blocks
    resnet.ResNet: r"layer\d+\.\d+",
    resnetv2.ResNetV2: r"stages\.\d+\.blocks\.\d+",
}
# Last part of the residual branch of a block, before the shortcut is added.
LAST_PARTS: dict[type[nn.Module], str] = {
    resnet.BasicBlock: "bn2",
    resnet.Bottleneck: "bn3",
    resnetv2.PreActBasic: "conv2",
    resnetv2.PreActBottleneck: "conv3",
    resnetv2.Bottleneck: "norm3",
}


@dataclass(frozen=True, slots=True)
class Stream:
    """Outputs that are compared with each other: of these blocks, these tokens."""

    name: Tokens
    positions: tuple[int, ...]  # in `Blocks.sites`
    first_token_only: bool = False

    def values(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """(B, ...) per block of the stream, from the outputs of all blocks."""
        chosen = [outputs[position] for position in self.positions]
        return [value[:, :1] for value in chosen] if self.first_token_only else chosen


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of a network in execution order."""

    net: nn.Module
    sites: tuple[BlockSite, ...]
    streams: tuple[Stream, ...]
    num_prefix_tokens: int  # before the patches, in the blocks that have both; maybe registers only
    measure: Measure  # that suits the shapes of the outputs
    named: bool = False  # by the user: checked by a forward pass

    @property
    def names(self) -> list[str]:
        """Paths of the blocks in the network."""
        return [site.name for site in self.sites]

    @property
    def has_class_token(self) -> bool:
        """Whether the blocks carry a class token beside the patches."""
        return self.num_prefix_tokens > 0 and any(stream.name == "cls" for stream in self.streams)

    def check_eval(self) -> None:
        """Raise an error in training mode: batch statistics and dropout would be analysed."""
        if self.net.training:
            raise ValueError("analyses need eval mode: hold attack_mode(model) around the call")

    @torch.no_grad()
    def check_named(self, logits_of: LogitsFn, x: Images) -> None:
        """Refuse named blocks that do not run once each, in this order, with the batch first.

        One image is enough: a sequence or windows in the first dimension are more than one.
        """
        if not self.named:
            return
        calls: list[str] = []
        with ExitStack() as stack:
            for site in self.sites:

                def look(module: nn.Module, args: Any, output: Any, name: str = site.name) -> None:
                    calls.append(name)
                    self._check_output(name, output)

                stack.callback(site.module.register_forward_hook(look).remove)
            logits_of(x[:1])
        self.check_calls(calls)

    def _check_output(self, name: str, output: Any) -> None:
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            raise CasemateError("blocks.names", name, f"returns a {kind}, not one tensor")
        if len(output) != 1:
            shape = "x".join(map(str, output.shape))
            remedy = f"returns {shape} for one image; the first dimension must be that of images"
            raise CasemateError("blocks.names", name, remedy)
        if self.num_prefix_tokens and output.ndim == 3 and output.shape[1] < self.num_prefix_tokens:
            remedy = f"is more than the {output.shape[1]} tokens of {name}"
            raise CasemateError("blocks.num_prefix_tokens", self.num_prefix_tokens, remedy)

    def check_calls(self, calls: Sequence[str]) -> None:
        """Refuse blocks that ran in another order, or not once each."""
        if list(calls) != self.names:
            ran = ", ".join(calls) or "none of them"
            remedy = f"do not run once each in this order, but: {ran}; name other blocks"
            raise CasemateError("blocks.names", ", ".join(self.names), remedy)


def find_blocks(net: nn.Module, how: BlockSettings | None = None) -> Blocks:
    """The blocks of a bare network (`PixelModel.net`): of its family, or those that `how` names."""
    check_patchable(net)
    if how is not None and how.names is not None:
        return _named_blocks(net, how.names, how.num_prefix_tokens)
    sites = tuple(_sites(net))
    if isinstance(net, SHRINKING):
        return Blocks(net, sites, (Stream("all", _places(sites)),), 0, "cka")
    prefix = next((CLASS_BLOCKS[kind] for kind in CLASS_BLOCKS if isinstance(net, kind)), None)
    if prefix is not None:
        late = [site.name.startswith(prefix) for site in sites]
        early = tuple(place for place, is_late in enumerate(late) if not is_late)
        last = tuple(place for place, is_late in enumerate(late) if is_late)
        parts = (Stream("all", early), Stream("cls", last, first_token_only=True))
        return Blocks(net, sites, tuple(p for p in parts if p.positions), 0, "pearson")
    streams = _token_streams(sites, has_cls=_has_class_token(net))
    return Blocks(net, sites, streams, _num_prefix_tokens(net), "pearson")


def _sites(net: nn.Module) -> list[BlockSite]:
    pattern = next((RESNETS[kind] for kind in RESNETS if isinstance(net, kind)), None)
    if pattern is None:
        if not isinstance(net, tuple(FAMILIES)):
            raise CasemateError(
                "model.architecture",
                type(net).__name__,
                f"has no blocks that analyses know; they work for {SUPPORTED}",
            )
        return blocks_of(net)
    named = [(name, part) for name, part in net.named_modules() if re.fullmatch(pattern, name)]
    return [BlockSite(name, module, _resnet_layout(name, module)) for name, module in named]


def _resnet_layout(name: str, module: Any) -> Layout:
    """A block behind an identity shortcut returns its input when removed, another its shortcut.

    Inputs of post-activation blocks are not negative, so their last ReLU changes nothing.
    """
    if type(module) not in LAST_PARTS:
        raise CasemateError(
            "model.architecture",
            type(module).__name__,
            f"at {name} is a block that analyses do not know; they work for {SUPPORTED}",
        )
    if module.downsample is None:
        return Layout({})
    gated = getattr(module, "se", None) is not None
    return Layout({"block": "se" if gated else LAST_PARTS[type(module)]}, stream=None)


def _named_blocks(net: nn.Module, names: Sequence[str], num_prefix_tokens: int | None) -> Blocks:
    known = _known_sites(net)
    paths = [path for path, _ in net.named_modules() if path]
    found: list[str] = []
    for name in names:
        pattern = re.escape(name).replace(r"\*", r"[^.]+")
        fitting = [path for path in paths if re.fullmatch(pattern, path)]
        if not fitting:
            raise CasemateError("blocks.names", repr(name), did_you_mean(name, paths))
        found += [path for path in fitting if path not in found]
    sites = tuple(known.get(path) or _site(path, net.get_submodule(path)) for path in found)
    given = num_prefix_tokens is not None
    count = _num_prefix_tokens(net) if num_prefix_tokens is None else num_prefix_tokens
    streams = _token_streams(sites, has_cls=count > 0 if given else _has_class_token(net))
    measure: Measure = "cka" if isinstance(net, SHRINKING) else "pearson"
    return Blocks(net, sites, streams, count, measure, named=True)


def _site(path: str, module: nn.Module) -> BlockSite:
    """A block that a user names: timm's types have the parts that they have elsewhere."""
    return BlockSite(path, module, LAYOUTS.get(type(module), Layout({})))


def _known_sites(net: nn.Module) -> dict[str, BlockSite]:
    if not isinstance(net, (*FAMILIES, *RESNETS)):
        return {}
    return {site.name: site for site in _sites(net)}


def _num_prefix_tokens(net: Any) -> int:
    """Of the sequences inside the blocks; CaiT and XCiT add the class token later."""
    inside = isinstance(net, tuple(FAMILIES)) and not isinstance(net, (*CLASS_BLOCKS, *SHRINKING))
    return int(net.num_prefix_tokens) if inside else 0


def _has_class_token(net: Any) -> bool:
    """Prefix tokens may also be registers alone."""
    return _num_prefix_tokens(net) > 0 and getattr(net, "cls_token", None) is not None


def _token_streams(sites: Sequence[BlockSite], *, has_cls: bool) -> tuple[Stream, ...]:
    places = _places(sites)
    streams = (Stream("all", places), Stream("cls", places, first_token_only=True))
    return streams if has_cls else streams[:1]


def _places(sites: Sequence[BlockSite]) -> tuple[int, ...]:
    return tuple(range(len(sites)))
