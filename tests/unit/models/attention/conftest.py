"""Small instances of the real timm classes, one per way of computing attention."""

import copy
from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from timm.models.beit import Beit
from timm.models.cait import Cait
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.levit import Levit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import ParallelThingsBlock, ResPostBlock, VisionTransformer
from timm.models.xcit import Xcit
from torch import nn

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
LEVIT = {"embed_dim": (16, 24), "key_dim": 8, "depth": (1, 1), "num_heads": (2, 3)}

NETS: dict[str, Callable[..., nn.Module]] = {
    "vit": lambda **kw: VisionTransformer(**SHAPE, **kw),
    "vit_layerscale": lambda **kw: VisionTransformer(**SHAPE, init_values=0.5, **kw),
    "vit_qk_norm": lambda **kw: VisionTransformer(**SHAPE, qk_norm=True, **kw),
    "vit_post_norm": lambda **kw: VisionTransformer(**SHAPE, block_fn=ResPostBlock, **kw),
    "vit_parallel": lambda **kw: VisionTransformer(**SHAPE, block_fn=ParallelThingsBlock, **kw),
    "deit_distilled": lambda **kw: VisionTransformerDistilled(**SHAPE, **kw),
    "cait": lambda **kw: Cait(**SHAPE, init_values=1.0, **kw),
    "xcit": lambda **kw: Xcit(**SHAPE, **kw),
    "swin": lambda **kw: SwinTransformer(
        img_size=32,
        patch_size=4,
        embed_dim=16,
        depths=(2, 1),
        num_heads=(2, 2),
        window_size=4,
        **kw,
    ),
    "levit": lambda **kw: Levit(img_size=32, stem_type="s8", **LEVIT, **kw),
    "levit_conv": lambda **kw: Levit(img_size=32, stem_type="s8", use_conv=True, **LEVIT, **kw),
    "beit": lambda **kw: Beit(**SHAPE, use_rel_pos_bias=True, init_values=0.5, **kw),
    "beit_shared": lambda **kw: Beit(**SHAPE, use_shared_rel_pos_bias=True, **kw),
    "eva": lambda **kw: Eva(**SHAPE, use_rot_pos_emb=True, swiglu_mlp=True, **kw),
    "eva_split": lambda **kw: Eva(**SHAPE, qkv_fused=False, use_post_norm=True, **kw),
    "eva_rope": lambda **kw: Eva(
        **SHAPE, attn_type="rope", use_rot_pos_emb=True, qk_norm=True, **kw
    ),
}


@cache
def built(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = NETS[name](num_classes=5)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return net.eval()


def make_net(name: str) -> nn.Module:
    """An untrained network in eval mode whose weights are large enough to tell parts apart."""
    return copy.deepcopy(built(name))


def set_fused(net: nn.Module, fused: bool) -> nn.Module:
    for module in net.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return net


# Layer scale only touches what is added to the stream: asked for by name where that matters.
EVERY = [name for name in NETS if name != "vit_layerscale"]


@pytest.fixture(params=EVERY)
def net(request) -> nn.Module:
    return make_net(request.param)


@pytest.fixture(params=list(product(EVERY, ("fused", "explicit"))), ids="-".join)
def net_either_path(request) -> nn.Module:
    """Every network, by its fused and by its explicit path."""
    name, path = request.param
    return set_fused(make_net(name), path == "fused")


@pytest.fixture
def new_net() -> Callable[..., nn.Module]:
    return make_net


@pytest.fixture
def on_path() -> Callable[..., nn.Module]:
    return set_fused


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
