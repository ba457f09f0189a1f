"""Small networks of every family that analyses support, with weights that matter."""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from timm.layers import BatchNormAct2d
from timm.models.beit import Beit
from timm.models.cait import Cait
from timm.models.deit import VisionTransformerDistilled
from timm.models.levit import Levit
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.resnetv2 import ResNetV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from torch import nn

from tests.unit.networks import scattered

SHAPE = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 4, "num_heads": 2}
SWIN = {"patch_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
LEVIT = {"embed_dim": (16, 24), "key_dim": 8, "depth": (1, 1), "num_heads": (2, 3)}
CHANNELS = (8, 12, 16, 24)
V2 = {"channels": (16, 24), "num_classes": 5, "stem_chs": 8, "norm_layer": BatchNormAct2d}
PLAIN: dict[str, object] = {"num_classes": 5, "channels": CHANNELS, "zero_init_last": False}


class Users(nn.Module):
    """A user's own transformer: torch's encoder layers behind a linear patch embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, 16))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], dim=1)
        for layer in self.layers:
            tokens = layer(tokens)
        logits: torch.Tensor = self.head(tokens[:, 0])
        return logits


NETS: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: VisionTransformer(**SHAPE, num_classes=5),
    "gap": lambda: VisionTransformer(**SHAPE, num_classes=5, class_token=False, global_pool="avg"),
    "registers": lambda: VisionTransformer(
        **SHAPE, num_classes=5, class_token=False, reg_tokens=2, global_pool="avg"
    ),
    "deit": lambda: VisionTransformerDistilled(**SHAPE, num_classes=5),
    "cait": lambda: Cait(**SHAPE, num_classes=5, init_values=1.0),
    "xcit": lambda: Xcit(**{**SHAPE, "patch_size": 8}, num_classes=5),
    "swin": lambda: SwinTransformer(img_size=16, num_classes=5, **SWIN),
    "beit": lambda: Beit(**SHAPE, num_classes=5, use_rel_pos_bias=True, init_values=0.5),
    "levit": lambda: Levit(img_size=32, stem_type="s8", num_classes=5, **LEVIT),
    "resnet": lambda: ResNet(BasicBlock, (2, 1, 1, 2), **PLAIN),
    "resnet_se": lambda: ResNet(Bottleneck, (1, 2, 1, 1), **PLAIN, block_args={"attn_layer": "se"}),
    "resnetv2": lambda: ResNetV2([2, 2], **V2),
    "resnetv2_post": lambda: ResNetV2([2, 1], **V2, preact=False),
    "users": Users,
}


@cache
def built(name: str) -> nn.Module:
    return scattered(NETS[name], by=0.1)


@pytest.fixture
def new_net() -> Callable[[str], nn.Module]:
    """An untrained network in eval mode whose blocks all change its logits."""
    return lambda name: copy.deepcopy(built(name))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
