"""The stream after every block, and networks with parts taken out."""

import copy
from itertools import product

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from components.core.errors import CasemateError
from components.models.attention.discover import blocks_of
from components.models.attention.features import block_outputs
from components.models.attention.lesions import removable_parts, removed


class Zero(nn.Module):
    def __init__(self, like):
        super().__init__()
        self.like = like

    def forward(self, *args, **kwargs):
        return self.like(*args, **kwargs) * 0


def test_outputs_are_the_residual_stream(new_net, x):
    net = new_net("vit")
    with block_outputs(net) as outputs:
        net(x)
    _, expected = net.forward_intermediates(x, output_fmt="NLC", return_prefix_tokens=True)
    for index, (patches, prefix) in enumerate(expected):
        stream = torch.cat([prefix, patches], dim=1)
        assert torch.equal(outputs[f"blocks.{index}"], stream)


def test_outputs_leave_the_network_as_it_was(net, x):
    plain = net(x)
    with block_outputs(net) as outputs:
        assert torch.equal(net(x), plain)
    assert list(outputs) == [site.name for site in blocks_of(net)]
    kept = {name: value.clone() for name, value in outputs.items()}
    net(x + 1)
    assert all(torch.equal(outputs[name], kept[name]) for name in kept)  # nobody listens any more
    assert not any(module._forward_hooks for module in net.modules())


def test_outputs_are_differentiable(net, x):
    x = x.requires_grad_()
    with block_outputs(net) as outputs:
        logits = net(x)
    for value in outputs.values():
        (grad,) = torch.autograd.grad(value.square().sum(), x, retain_graph=True)
        assert grad.abs().max() > 0
    last = list(outputs.values())[-1]
    (grad,) = torch.autograd.grad(logits.sum(), last)  # and the logits depend on them
    assert grad.abs().max() > 0


def test_a_removed_block_passes_its_input_on(net, x):
    """Oracle: the same network with the block replaced by a module that returns its stream."""
    sites = blocks_of(net)
    for index, site in enumerate(sites):
        if "block" not in removable_parts(site):
            continue

        class Through(nn.Module):
            def forward(self, *args, **kwargs):
                return args[0] if len(args) == 1 or args[1].__class__ is int else args[1]

        parent, _, child = site.name.rpartition(".")
        container = net.get_submodule(parent)
        with removed(net, [(index, "block")]):
            lesioned = net(x)
        setattr(container, child, Through())
        assert torch.equal(net(x), lesioned)
        setattr(container, child, site.module)
        assert not torch.allclose(net(x), lesioned, atol=1e-3)


def test_all_blocks_removed_leave_embedding_and_head(new_net, x):
    net = new_net("vit")
    with removed(net, [(0, "block"), (1, "block")]):
        bare = net(x)
    assert torch.equal(bare, net.forward_head(net.norm(net._pos_embed(net.patch_embed(x)))))


def test_a_block_is_the_sum_of_its_branches(net, x):
    for index, site in enumerate(blocks_of(net)):
        parts = removable_parts(site)
        if len(parts) < 3:  # class blocks of XCiT and shrinking blocks of LeViT are no such sum
            continue
        with removed(net, [(index, part) for part in parts if part != "block"]):
            branches = net(x)
        with removed(net, [(index, "block")]):
            assert torch.allclose(net(x), branches, atol=1e-6)


@pytest.mark.parametrize("name", ["vit", "vit_layerscale", "cait", "xcit", "swin", "beit", "levit"])
def test_a_removed_branch_equals_a_network_built_without_it(new_net, x, name):
    net = new_net(name)
    children = {"attn": "attn", "mlp": "mlp", "local": "local_mp"}
    for index, site in enumerate(blocks_of(net)):
        for part in site.layout.branches:
            twin = copy.deepcopy(new_net(name))
            block = twin.get_submodule(site.name)
            setattr(block, children[part], Zero(getattr(block, children[part])))
            with removed(net, [(index, part)]):
                lesioned = net(x)
            assert torch.equal(lesioned, twin(x))
            assert not torch.allclose(lesioned, net(x), atol=1e-3)


@pytest.mark.parametrize("name", ["vit_post_norm", "eva_split"])
@pytest.mark.parametrize("part", ["attn", "mlp"])
def test_a_norm_after_the_branch_is_removed_with_it(new_net, x, name, part):
    net = new_net(name)
    block = net.blocks[0]
    seen = {}
    block.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    with removed(net, [(0, part)]), block_outputs(net) as outputs:
        net(x)
    stream = seen["x"]
    if part == "attn":
        expected = stream + block.norm2(block.mlp(stream))
    else:
        expected = stream + block.norm1(block.attn(stream))
    assert torch.allclose(outputs["blocks.0"], expected, atol=1e-6)


def test_stochastic_depth_does_not_bring_a_branch_back(x):
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    net = VisionTransformer(**shape, drop_path_rate=0.5).train()
    with removed(net, product([0, 1], ["attn", "mlp"])):
        assert torch.equal(net(x), net(x))


def test_infinities_of_a_removed_branch_stay_out(new_net, x):
    net = new_net("vit")
    with torch.no_grad():
        net.blocks[0].mlp.fc2.bias.fill_(torch.inf)
    with removed(net, [(0, "mlp")]):
        assert net(x).isfinite().all()


def test_everything_is_back_after_an_exception(net, x):
    plain = net(x)
    parts = [(index, part) for index, s in enumerate(blocks_of(net)) for part in removable_parts(s)]
    with removed(net, parts):
        assert not torch.equal(net(x), plain)
    assert torch.equal(net(x), plain)
    with pytest.raises(ZeroDivisionError), removed(net, parts):
        raise ZeroDivisionError
    assert torch.equal(net(x), plain)
    assert not any("forward" in vars(m) or m._forward_hooks for m in net.modules())


def test_what_cannot_be_removed_is_refused_by_name(new_net):
    with (
        pytest.raises(
            CasemateError,
            match=r"cls_attn_blocks\.0: attn cannot be removed from a ClassAttention",
        ),
        removed(new_net("xcit"), [(2, "attn")]),
    ):
        pass
    with (
        pytest.raises(CasemateError, match=r"stages\.1\.downsample: block cannot be removed"),
        removed(new_net("levit"), [(1, "block")]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="there is no block 2"),
        removed(new_net("vit"), [(2, "mlp")]),
    ):
        pass
