"""Blocks of all families: what they are, what their outputs mean, refusals, restored networks."""

from functools import partial

import pytest
import torch
from timm.models.cait import LayerScaleBlockClassAttn
from timm.models.vgg import VGG
from torch import nn

from components.analyze.blocks import find_blocks
from components.analyze.cka import exact_matrices
from components.analyze.correlation import pearson_states
from components.analyze.lesions import Lesion, lesion_predictions, lesions_of
from components.analyze.prefixes import SharedPasses
from components.analyze.settings import BlockSettings, CorrelationSettings, LesionSettings
from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.models.attention.features import block_outputs
from components.models.attention.lesions import removable_parts, without

BLOCKS = {
    "vit": [f"blocks.{i}" for i in range(4)],
    "deit": [f"blocks.{i}" for i in range(4)],
    "beit": [f"blocks.{i}" for i in range(4)],
    "cait": [*(f"blocks.{i}" for i in range(4)), "blocks_token_only.0", "blocks_token_only.1"],
    "xcit": [*(f"blocks.{i}" for i in range(4)), "cls_attn_blocks.0", "cls_attn_blocks.1"],
    "swin": [f"layers.{i}.blocks.{j}" for i in range(2) for j in range(2)],
    "resnet": ["layer1.0", "layer1.1", "layer2.0", "layer3.0", "layer4.0", "layer4.1"],
    "resnetv2": [f"stages.{i}.blocks.{j}" for i in range(2) for j in range(2)],
}
PREFIX = {
    "vit": 1,
    "gap": 0,
    "registers": 2,
    "deit": 2,
    "beit": 1,
    "cait": 0,
    "xcit": 0,
    "swin": 0,
    "resnet": 0,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_the_table(new_net, name):
    found = find_blocks(new_net(name))
    assert found.names == BLOCKS[name]
    measure = "cka" if name in ("swin", "resnet", "resnetv2") else "pearson"
    assert found.measure == measure


@pytest.mark.parametrize(("name", "count"), PREFIX.items())
def test_prefix_tokens(new_net, name, count):
    found = find_blocks(new_net(name))
    assert found.num_prefix_tokens == count
    has_cls = name in ("vit", "deit", "beit", "cait", "xcit")
    assert [s.name for s in found.streams] == (["all", "cls"] if has_cls else ["all"])


@pytest.mark.parametrize("name", ["cait", "xcit"])
def test_two_part_networks_have_two_streams(new_net, x, name):
    found = find_blocks(new_net(name))
    with block_outputs(found.net, found.sites) as outputs:
        found.net(x)
    patches, cls = (stream.values(list(outputs.values())) for stream in found.streams)
    assert [value.shape[1] for value in patches] == [16 if name == "cait" else 4] * 4
    assert [value.shape[1] for value in cls] == [1, 1]
    last = outputs[found.names[-1]]
    assert torch.equal(cls[-1], last[:, :1])


def test_a_user_names_blocks(new_net, x):
    net = new_net("users")
    found = find_blocks(net, BlockSettings(names=("layers.*",), num_prefix_tokens=1))
    assert found.names == ["layers.0", "layers.1", "layers.2"]
    assert [s.name for s in found.streams] == ["all", "cls"]
    picked = find_blocks(net, BlockSettings(names=("layers.2", "layers.0")))
    assert picked.names == ["layers.2", "layers.0"]  # a wrong order is refused when it runs
    with pytest.raises(CasemateError, match=r"layers\.2, layers\.0 do not run once each in this"):
        SharedPasses(net, picked, x).logits((None, None))
    with pytest.raises(CasemateError, match=r"'layer\.0' is unknown; did you mean 'layers.0'"):
        find_blocks(net, BlockSettings(names=("layer.0",)))


class SequenceFirst(nn.Module):
    """Blocks whose first dimension is that of tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=False, dropout=0.0)
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2)[:, :1].reshape(len(x), -1, 8).transpose(0, 1)
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens.mean(dim=0)


def test_outputs_without_the_batch_first_are_refused(x):
    net = SequenceFirst().eval()
    blocks = find_blocks(net, BlockSettings(names=("layers.*",)))
    for study in (pearson_states, exact_matrices):
        with pytest.raises(CasemateError, match=r"layers\.0 returns .*x1x8 for one image"):
            study(net, blocks, x, CorrelationSettings())
    with pytest.raises(CasemateError, match="for one image; the first dimension"):
        lesion_predictions(net, blocks, x, lesions_of(blocks, LesionSettings(), seed=0))


def test_more_prefix_tokens_than_tokens_are_refused(new_net, x):
    net = new_net("users")
    blocks = find_blocks(net, BlockSettings(names=("layers.*",), num_prefix_tokens=99))
    with pytest.raises(CasemateError, match="num_prefix_tokens: 99 is more than the"):
        pearson_states(net, blocks, x, CorrelationSettings())


class ClassAttention(nn.Module):
    """A user's network with class-attention blocks of timm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.b = nn.ModuleList([LayerScaleBlockClassAttn(8, 2, init_values=1.0) for _ in range(3)])
        self.token = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, cls = x.flatten(2)[:, :1].reshape(len(x), -1, 8), self.token.expand(len(x), -1, -1)
        for block in self.b:
            cls = block(tokens, cls)
        return cls[:, 0]


def test_class_attention_of_a_user_is_removed_from_the_class_token(x):
    net = ClassAttention().eval()
    blocks = find_blocks(net, BlockSettings(names=("b.*",)))
    found = lesion_predictions(net, blocks, x, [Lesion("block", ()), Lesion("block", (1,))])
    assert found[0].tolist() == net(x).argmax(dim=1).tolist()
    del net.b[1]
    assert found[1].tolist() == net(x).argmax(dim=1).tolist()


def test_named_blocks_of_a_known_family_keep_their_parts(new_net):
    found = find_blocks(new_net("vit"), BlockSettings(names=("blocks.1", "blocks.3")))
    assert found.num_prefix_tokens == 1
    assert removable_parts(found.sites[0]) == ["block", "attn", "mlp"]
    assert find_blocks(new_net("resnet"), BlockSettings(names=("layer1.*",))).measure == "cka"


def test_other_networks_are_refused_by_name(new_net):
    with pytest.raises(CasemateError) as refusal:
        find_blocks(VGG(cfg=[8, "M"], num_classes=5))
    assert "\n" not in str(refusal.value)
    for word in ("VGG", "ViT, DeiT, CaiT, XCiT, Swin", "BEiT", "ResNet", "blocks.names"):
        assert word in str(refusal.value)
    with pytest.raises(CasemateError, match="Users has no blocks that analyses know"):
        find_blocks(new_net("users"))
    with pytest.raises(CasemateError, match="is compiled at"):
        find_blocks(torch.compile(new_net("vit")))


def test_settings_refuse_what_would_be_ignored():
    with pytest.raises(SettingError, match="num_prefix_tokens: 1 would be ignored"):
        BlockSettings(num_prefix_tokens=1)
    with pytest.raises(SettingError, match="names a block twice"):
        BlockSettings(names=("a", "a"))


class Offset(torch.nn.Module):
    """A channel attention that is not zero at zero."""

    def forward(self, x):
        return x + 0.5


@pytest.mark.parametrize("name", ["resnet", "resnet_se", "resnetv2", "resnetv2_post"])
def test_a_removed_residual_block_leaves_its_shortcut(new_net, name):
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    net = new_net(name)
    if name == "resnet_se":
        for block in net.layer2:
            block.se = Offset()
    blocks = find_blocks(net)
    plain = net(x)
    for place, site in enumerate(blocks.sites):
        assert removable_parts(site) == ["block"]
        seen = {}
        hook = site.module.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.update(x=args[0])
        )
        with without(site, "block"), block_outputs(net, blocks.sites) as outputs:
            lesioned = net(x)
        hook.remove()
        stream, block = seen["x"], site.module
        if block.downsample is not None:
            preact = hasattr(block, "norm1") and name == "resnetv2"
            stream = block.downsample(block.norm1(stream) if preact else stream)
            if name == "resnetv2_post":
                stream = block.act3(stream)
            elif name != "resnetv2":
                stream = torch.relu(stream)
        assert torch.equal(outputs[blocks.names[place]], stream)
        assert not torch.allclose(lesioned, plain, atol=1e-4)
    assert torch.equal(net(x), plain)


@pytest.mark.parametrize("name", ["vit", "cait", "xcit", "swin", "resnet", "users"])
def test_networks_are_bit_equal_after_an_analysis_and_after_an_exception(new_net, x, name):
    net = new_net(name)
    how = BlockSettings(names=("layers.*",)) if name == "users" else None
    blocks = find_blocks(net, how)
    plain, before = net(x), {key: value.clone() for key, value in net.state_dict().items()}
    inside = [part.__class__ for part in net.modules()]
    passes = SharedPasses(net, blocks, x)
    passes.logits((None,) * len(blocks.sites))
    passes.logits((None,) * len(blocks.sites))

    def fail(images):
        raise ZeroDivisionError

    passes.logits_of = fail
    with pytest.raises(ZeroDivisionError):
        passes.logits((None,) * len(blocks.sites))
    for part in net.modules():
        assert "forward" not in vars(part)
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    assert [part.__class__ for part in net.modules()] == inside
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(net(x), plain)
