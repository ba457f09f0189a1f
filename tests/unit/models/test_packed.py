"""Blocks with packed weights: timm's own block is the truth."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from components.models.packed import can_pack, pack, packed_blocks

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}


def new_net(**options) -> VisionTransformer:
    torch.manual_seed(0)
    net = VisionTransformer(num_classes=5, **SMALL, **options).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return net


@pytest.mark.parametrize(
    "options",
    [
        *[{}, {"qkv_bias": False}, {"proj_bias": False}, {"init_values": 0.1}],
        {"qk_norm": True, "scale_attn_norm": True},
    ],
)
@pytest.mark.parametrize("shape", [(1, 1), (3, 9), (2, 70)])
@torch.inference_mode()
def test_tokens_are_those_of_the_plain_blocks(options, shape):
    net, tokens = new_net(**options), torch.randn(*shape, 16)
    expected = net.blocks(tokens)
    with packed_blocks(net):
        assert ["forward" in vars(block) for block in net.blocks] == [True, True, False]
        found = net.blocks(tokens)
        assert torch.equal(net.blocks(tokens.mT.contiguous().mT), found)  # another memory layout
    assert not any("forward" in vars(block) for block in net.blocks)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "pre_norm": True}])
@torch.inference_mode()
def test_groups_of_several_lengths_share_products(options):
    net, groups = new_net(**options), [torch.randn(3, 9, 16), torch.randn(1, 17, 16)]
    expected = [net.forward_head(net.norm(net.blocks(net.norm_pre(g)))) for g in groups]
    packed = pack(net)
    assert packed is not None
    found = packed(groups)
    for logits, truth in zip(found, expected, strict=True):
        assert (logits - truth).abs().max() < 1e-5 * truth.abs().max()


@torch.inference_mode()
def test_rows_do_not_see_each_other():
    net, tokens = new_net(), torch.randn(6, 9, 16)
    with packed_blocks(net):
        found = net.blocks(tokens)
        tokens[1:] = torch.nan
        assert torch.equal(net.blocks(tokens)[0], found[0])


@pytest.mark.parametrize("part", ["attn.qkv.weight", "mlp.fc2.bias", "ls1.gamma", "norm1.weight"])
def test_changed_weights_are_read(part):
    net, tokens = new_net(init_values=0.5), torch.randn(2, 9, 16)
    with torch.no_grad():
        with packed_blocks(net):
            before = net.blocks(tokens)
        net.blocks[0].get_parameter(part).mul_(-2)
        expected = net.blocks(tokens)
        with packed_blocks(net):
            after = net.blocks(tokens)
        assert (after - expected).abs().max() < 1e-5 * expected.abs().max()
        assert not torch.allclose(before, after)
        net.load_state_dict(new_net(init_values=0.5).state_dict())
        with packed_blocks(net):
            assert torch.equal(net.blocks(tokens), before)


@torch.no_grad()
def test_only_plain_blocks_are_packed():
    block = new_net().blocks[0]
    assert can_pack(block)
    with torch.enable_grad():
        assert not can_pack(block)
    handle = block.attn.register_forward_hook(lambda *_: None)
    assert not can_pack(block)
    handle.remove()
    assert not can_pack(new_net().train().blocks[0])
    assert not can_pack(new_net().double().blocks[0])
    assert not can_pack(new_net(act_layer=nn.ReLU).blocks[0])
    assert not can_pack(nn.Identity())
    block.attn.fused_attn = False
    assert not can_pack(block)
