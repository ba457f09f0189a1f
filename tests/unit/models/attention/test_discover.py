"""Blocks and attention modules: all of them, in the order in which they run, or a refusal."""

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

from components.core.errors import CasemateError
from components.models.attention.discover import (
    attention_of,
    blocks_of,
    check_patchable,
    check_uncompiled,
)
from components.models.attention.features import block_outputs
from components.models.attention.scaling import scaled_attention

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize("find", [blocks_of, attention_of])
def test_sites_are_in_execution_order(net, x, find):
    sites = find(net)
    ran = []
    for site in sites:
        assert net.get_submodule(site.name) is site.module
        site.module.register_forward_hook(lambda *_, name=site.name: ran.append(name))
    net(x)
    assert ran == [site.name for site in sites]


def test_every_softmax_of_a_network_is_found(net, x, monkeypatch):
    """Counted by spies on torch itself: no attention stays unseen."""
    calls = []
    softmax, fused = torch.Tensor.softmax, torch.nn.functional.scaled_dot_product_attention
    functional = torch.nn.functional.softmax

    def spy(function):
        return lambda *args, **kwargs: (calls.append(1), function(*args, **kwargs))[1]

    monkeypatch.setattr(torch.Tensor, "softmax", spy(softmax))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy(fused))
    if any(site.kind == "windows" for site in attention_of(net)):  # goes through nn.Softmax
        monkeypatch.setattr(torch.Tensor, "softmax", softmax)
        monkeypatch.setattr(torch.nn.functional, "softmax", spy(functional))
    net(x)
    assert len(calls) == len(attention_of(net))


def test_kinds_and_heads(new_net):
    kinds = {
        name: [(site.kind, site.num_heads) for site in attention_of(new_net(name))]
        for name in ("deit_distilled", "cait", "xcit", "swin", "levit")
    }
    assert kinds == {
        "deit_distilled": [("tokens", 2)] * 2,
        "cait": [("talking_heads", 2)] * 2 + [("class", 2)] * 2,
        "xcit": [("channels", 2)] * 2 + [("class", 2)] * 2,
        "swin": [("windows", 2)] * 3,
        "levit": [("grid", 2), ("grid", 2), ("grid", 3)],  # the middle one shrinks the grid
    }


@pytest.mark.parametrize(
    ("name", "num_blocks", "num_attention"),
    [
        ("deit_tiny_distilled_patch16_224", 12, 12),
        ("xcit_nano_12_p16_224", 14, 14),
        ("swin_tiny_patch4_window7_224", 12, 12),
        ("levit_128s", 9 + 2, 9 + 2),
    ],
)
def test_published_architectures(name, num_blocks, num_attention):
    with torch.device("meta"):
        net = timm.create_model(name)
    assert len(blocks_of(net)) == num_blocks
    assert len(attention_of(net)) == num_attention


@pytest.mark.parametrize("name", ["resnet18", "swinv2_cr_tiny_224"])
def test_other_networks_are_refused_by_name(name):
    with torch.device("meta"):
        net = timm.create_model(name)
    with pytest.raises(CasemateError, match=rf"{type(net).__name__} gives no access.*ViT, DeiT"):
        attention_of(net)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_fn": ParallelScalingBlock}, r"ParallelScalingBlock at blocks\.0 is a layer"),
        ({"attn_layer": "diff"}, r"DiffAttention at blocks\.0\.attn is a layer"),
        (
            {"global_pool": "map", "class_token": False},
            "AttentionPoolLatent at attn_pool is a layer",
        ),
    ],
)
def test_unknown_layers_of_known_networks_are_refused_by_name(options, message):
    with pytest.raises(CasemateError, match=message):
        attention_of(VisionTransformer(**SHAPE, **options))


@pytest.mark.parametrize("name", ["vit", "cait", "beit", "eva_split"])
def test_a_changed_scale_is_refused_where_fused_attention_ignores_it(new_net, on_path, x, name):
    net = on_path(new_net(name), True)
    site = [site for site in attention_of(net) if site.kind != "talking_heads"][-1]
    before = net(x)
    site.module.scale *= 0.5
    assert torch.equal(net(x), before)  # the reason for the refusal
    with pytest.raises(CasemateError, match=rf"{site.name}\.scale: .* has no effect"):
        attention_of(net)
    attention_of(on_path(net, False))


def test_recomputed_networks_are_refused(new_net):
    net = new_net("swin")
    net.set_grad_checkpointing(True)
    with pytest.raises(CasemateError, match="gradient checkpointing"):
        check_patchable(net)
    with (
        pytest.raises(CasemateError, match="gradient checkpointing"),
        scaled_attention(net, torch.ones(3)),
    ):
        pass


def test_compiled_networks_are_refused(new_net):
    net = new_net("vit")
    wrapped = torch.compile(net, backend="eager")
    with pytest.raises(CasemateError, match="compiled"):
        check_uncompiled(wrapped)
    net.blocks[1].compile(backend="eager")
    with pytest.raises(CasemateError, match=r"compiled at blocks\.1"), block_outputs(net):
        pass


def test_unknown_names_are_refused(new_net):
    with pytest.raises(ValueError, match=r"blocks\.7\.attn is not an attention module; there are"):
        attention_of(new_net("vit"), ["blocks.7.attn"])
