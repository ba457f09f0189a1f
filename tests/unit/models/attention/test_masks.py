"""Attention masks: equal to a softmax over the allowed keys, whichever path computes it."""

import pytest
import torch

from components.core.errors import CasemateError
from components.models.attention.discover import attention_of
from components.models.attention.features import block_outputs
from components.models.attention.masks import masked_keys, masked_pairs
from components.models.attention.scaling import scaled_attention
from components.models.tokens import forward_kept

MASKABLE = ["vit", "vit_qk_norm", "vit_parallel", "deit_distilled", "cait", "beit", "beit_shared"]
MASKABLE += ["eva", "eva_split", "eva_rope"]


def num_tokens(net, x):
    with block_outputs(net) as outputs:
        net(x)
    return outputs["blocks.0"].shape[1]


def random_pairs(*shape):
    pairs = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5
    return pairs | torch.eye(shape[-1], dtype=torch.bool)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_vit_masks_equal_explicit_computation(new_net, on_path, x, fused, batched):
    net = on_path(new_net("vit"), fused)
    allowed = random_pairs(3, 17, 17) if batched else random_pairs(17, 17)
    with masked_pairs(net, allowed):
        masked = net(x)
    tokens = net._pos_embed(net.patch_embed(x))
    for block in net.blocks:  # the same network written out
        q, k, v = (
            block.attn.qkv(block.norm1(tokens)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        )
        weights = ((q @ k.mT) / 4).exp() * (allowed[:, None] if batched else allowed)
        mixed = (weights / weights.sum(-1, keepdim=True)) @ v
        tokens = tokens + block.attn.proj(mixed.transpose(1, 2).flatten(2))
        tokens = tokens + block.mlp(block.norm2(tokens))
    expected = net.forward_head(net.norm(tokens))
    assert torch.allclose(masked, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(masked, net(x), atol=1e-2)


@pytest.mark.parametrize("name", MASKABLE)
def test_both_paths_agree_and_nothing_stays(new_net, on_path, x, name):
    net = new_net(name)
    outputs = []
    for fused in (True, False):
        on_path(net, fused)
        plain = net(x)
        with masked_pairs(net, random_pairs(3, *[num_tokens(net, x)] * 2)):
            outputs.append(net(x))
        assert torch.equal(net(x), plain)
        assert not torch.allclose(outputs[-1], plain, atol=1e-2)
    assert torch.allclose(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MASKABLE)
@pytest.mark.parametrize("fused", [True, False])
def test_hidden_keys_have_no_influence(new_net, on_path, x, name, fused):
    """What a hidden patch shows must not reach any other token: not even through mixed heads."""
    net = on_path(new_net(name), fused)
    num = num_tokens(net, x)
    allowed = torch.ones(3, num, dtype=torch.bool)
    allowed[0, -1] = allowed[1, -1] = False  # the last patch, of two samples
    changed = x.clone()
    changed[..., 24:, 24:] += 1.0
    with masked_keys(net, allowed), block_outputs(net) as outputs:
        net(x)
        before = [outputs[name].clone() for name in ("blocks.0", "blocks.1")]
        class_before = list(outputs.values())[-1][:, :1].clone()
        net(changed)
        after = [outputs[name] for name in ("blocks.0", "blocks.1")]
        class_after = list(outputs.values())[-1][:, :1]
    for old, new in zip(before, after, strict=True):
        assert torch.allclose(old[:2, :-1], new[:2, :-1], atol=1e-5)
        assert not torch.allclose(old[2, :-1], new[2, :-1], atol=1e-3)
    assert torch.allclose(class_before[:2], class_after[:2], atol=1e-5)
    assert not torch.allclose(class_before[2], class_after[2], atol=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_class_attention_without_a_patch_equals_a_shorter_sequence(new_net, on_path, x, fused):
    net = on_path(new_net("xcit"), fused)
    site = attention_of(net)[-1]
    tokens = torch.randn(3, 17, 32, generator=torch.Generator().manual_seed(5))
    allowed = torch.ones(3, 16, dtype=torch.bool)
    allowed[:, [2, 9]] = False
    kept = [0] + [1 + i for i in range(16) if i not in (2, 9)]
    with masked_keys(net, allowed, names=[site.name]):
        masked = site.module(tokens)
    assert torch.allclose(masked, site.module(tokens[:, kept]), atol=1e-6)


@pytest.mark.parametrize("name", MASKABLE)
def test_a_mask_that_allows_all_changes_nothing(new_net, x, name):
    net = new_net(name)
    num = num_tokens(net, x)
    with masked_pairs(net, torch.ones(num, num, dtype=torch.bool)):
        masked = net(x)
    assert torch.allclose(masked, net(x), rtol=1e-4, atol=1e-5)


def test_patches_that_see_only_themselves_stay_apart(new_net, x):
    """CaiT has no prefix in its trunk: with the identity as mask, patches never meet."""
    net = new_net("cait")
    changed = x.clone()
    changed[..., :8, :8] += 1.0
    with masked_pairs(net, torch.eye(16, dtype=torch.bool)), block_outputs(net) as outputs:
        net(x)
        before = outputs["blocks.1"].clone()
        net(changed)
    assert torch.allclose(before[:, 1:], outputs["blocks.1"][:, 1:], atol=1e-6)
    assert not torch.allclose(before[:, 0], outputs["blocks.1"][:, 0], atol=1e-2)


@pytest.mark.parametrize("name", ["vit", "deit_distilled"])
@pytest.mark.parametrize("fused", [True, False])
def test_hidden_keys_equal_dropped_tokens(new_net, on_path, x, name, fused):
    """Salman et al. 2022: a token that nobody attends to may as well be absent."""
    net = on_path(new_net(name), fused)
    kept = torch.tensor([[0, 3, 5, 15], [1, 2, 3, 4], [4, 9, 10, 11]])
    prefix = net.num_prefix_tokens
    allowed = torch.zeros(3, prefix + 16, dtype=torch.bool).scatter_(1, kept + prefix, True)
    allowed[:, :prefix] = True
    with masked_keys(net, allowed):
        masked = net(x)
    assert torch.allclose(masked, forward_kept(net, x, kept), rtol=1e-4, atol=1e-5)


def test_only_chosen_modules_are_masked(new_net, x):
    net = new_net("vit")
    with block_outputs(net) as plain:
        net(x)
    chosen = masked_pairs(net, random_pairs(17, 17), names=["blocks.1.attn"])
    with chosen, block_outputs(net) as outputs:
        net(x)
    assert torch.equal(outputs["blocks.0"], plain["blocks.0"])
    assert not torch.allclose(outputs["blocks.1"], plain["blocks.1"], atol=1e-2)


def test_masks_scales_and_gradients_work_together(new_net, x):
    net = new_net("vit").double()
    scales = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)

    def loss(values):
        with scaled_attention(net, values), masked_pairs(net, random_pairs(17, 17)):
            return net(x.double()).sum()

    assert torch.autograd.gradcheck(loss, scales, atol=1e-4)


def test_nothing_is_left_after_an_exception(new_net, x):
    net = new_net("cait")
    plain = net(x)
    with (
        pytest.raises(ValueError, match="the mask is for"),
        masked_keys(net, ~torch.zeros(3, 9).bool()),
    ):
        net(x)
    assert torch.equal(net(x), plain)
    assert not any("forward" in vars(m) or m._forward_hooks for m in net.modules())


@pytest.mark.parametrize(
    ("name", "reason"),
    [("xcit", "over channels"), ("swin", "windows"), ("levit", "shrinks")],
)
def test_networks_without_token_masks_are_refused(new_net, name, reason):
    mask = masked_pairs(new_net(name), torch.ones(16, 16, dtype=torch.bool))
    with pytest.raises(CasemateError, match=rf"takes no token mask: .*{reason}"), mask:
        pass


@pytest.mark.parametrize(
    ("mask", "allowed", "message"),
    [
        (masked_pairs, torch.zeros(17, 17, dtype=torch.bool), "at least one key"),
        (masked_keys, torch.zeros(3, 17, dtype=torch.bool), "at least one key"),
        (masked_pairs, torch.ones(17, 16, dtype=torch.bool), "square"),
        (masked_pairs, torch.ones(17, 17), "bool"),
        (masked_keys, torch.ones(17, dtype=torch.bool), r"\(B, N\)"),
    ],
)
def test_impossible_masks_are_refused(new_net, mask, allowed, message):
    with pytest.raises(ValueError, match=message), mask(new_net("vit"), allowed):
        pass


@pytest.mark.parametrize("shape", [(2, 17), (3, 16)])
def test_masks_for_other_inputs_are_refused(new_net, x, shape):
    net = new_net("vit")
    message = r"blocks\.0\.attn has \(samples, queries, keys\) \(3, 17, 17\)"
    mask = masked_keys(net, torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=message), mask:
        net(x)
