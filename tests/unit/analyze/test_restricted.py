"""Restricted attention: masks against slow loops, dropped keys, published shares, refusals."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from components.analyze.blocks import find_blocks
from components.analyze.prefixes import variant_logits, variant_table
from components.analyze.restricted import (
    cls_only_mask,
    distance_mask,
    measurements,
    random_mask,
    restricted_predictions,
    restrictions_of,
)
from components.analyze.settings import RestrictedAttentionSettings
from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.models.attention.features import block_outputs

PUBLISHED = [
    (14, 0, 0.0051), (14, 1, 0.0416), (14, 2, 0.1066), (14, 4, 0.2925), (14, 8, 0.7173),
    (24, 1, 0.0148), (24, 4, 0.1158), (24, 8, 0.3403),
]  # fmt: skip


@pytest.mark.parametrize(("side", "distance", "share"), PUBLISHED)
def test_the_kept_share(side, distance, share):
    mask = distance_mask((side, side), distance, num_prefix=1)
    formula = ((side * (2 * distance + 1) - distance * (distance + 1)) / side**2) ** 2
    kept = float(mask[1:, 1:].double().mean())  # of pairs of patches
    assert kept == pytest.approx(formula, abs=1e-12)
    assert kept == pytest.approx(share, abs=5e-5)


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_distance_masks_against_a_loop(prefix):
    rows, columns = grid = (3, 4)
    for distance in range(4):
        mask = distance_mask(grid, distance, num_prefix=prefix)
        for i in range(prefix + 12):
            for j in range(prefix + 12):
                near = True
                if i >= prefix and j >= prefix:
                    (a, b), (c, d) = divmod(i - prefix, columns), divmod(j - prefix, columns)
                    near = abs(a - c) <= distance and abs(b - d) <= distance
                assert bool(mask[i, j]) == near
    assert distance_mask(grid, max(rows, columns) - 1, num_prefix=prefix).all()


@pytest.mark.parametrize("prefix", [0, 1])
def test_random_masks_are_equally_dense_nested_and_fixed(prefix):
    grid, before = (6, 6), None
    for distance in range(6):
        mask = distance_mask(grid, distance, num_prefix=prefix)
        control = random_mask(mask, num_prefix=prefix, seed=7)
        assert control.sum() == mask.sum()
        assert control[:prefix].all()
        assert control[:, :prefix].all()
        assert control.any(dim=1).all()
        if before is not None:
            assert (control | ~before).all()  # contains the mask of the smaller distance
        before = control
        assert torch.equal(random_mask(mask, num_prefix=prefix, seed=7), control)
        if 0 < distance < 5:
            assert not torch.equal(random_mask(mask, num_prefix=prefix, seed=8), control)
            assert not torch.equal(control, mask)
    if not prefix:
        alone = random_mask(distance_mask(grid, 0, num_prefix=0), num_prefix=0, seed=7)
        assert torch.equal(alone, torch.eye(36, dtype=torch.bool))


def test_cls_only_masks():
    mask = cls_only_mask((2, 2), num_prefix=2, keep_self=True)
    assert mask[:2].all()
    assert mask[:, :2].all()
    assert torch.equal(mask[2:, 2:], torch.eye(4, dtype=torch.bool))
    assert not cls_only_mask((2, 2), num_prefix=2, keep_self=False)[2:, 2:].any()


def by_hand(net, x, masks):
    """A ViT in which every query sees the keys of its row only, the others taken out one by one."""
    tokens = net._pos_embed(net.patch_embed(x))
    for block, mask in zip(net.blocks, masks, strict=True):
        attn, normed = block.attn, block.norm1(tokens)
        q, k, v = (
            attn.qkv(normed)
            .reshape(*normed.shape[:2], 3, attn.num_heads, attn.head_dim)
            .permute(2, 0, 3, 1, 4)
        )
        rows = []
        for i in range(tokens.shape[1]):
            keys = torch.arange(tokens.shape[1]) if mask is None else mask[i].nonzero()[:, 0]
            weights = F.softmax(q[:, :, i : i + 1] @ k[:, :, keys].mT * attn.scale, dim=-1)
            rows.append(weights @ v[:, :, keys])
        mixed = torch.cat(rows, dim=2).transpose(1, 2).flatten(2)
        tokens = tokens + attn.proj(mixed)
        tokens = tokens + block.mlp(block.norm2(tokens))
    return net.forward_head(net.norm(tokens))


@pytest.mark.parametrize("name", ["vit", "gap", "registers"])
def test_masked_attention_equals_dropping_those_keys(new_net, x, name):
    net = new_net(name)
    blocks = find_blocks(net)
    how = RestrictedAttentionSettings(distances=(0, 1, 2), depths=(0, 1, 3, 4))
    restrictions = restrictions_of(blocks, how, seed=5)
    found = dict(variant_logits(net, blocks, x, [one.variant for one in restrictions]))
    with torch.no_grad():
        for index, one in enumerate(restrictions):
            masks = [None if change is None else change.allowed for change in one.variant]
            expected = by_hand(net, x, masks)
            torch.testing.assert_close(found[index], expected, atol=2e-5, rtol=1e-4)
        whole = net(x)
    logits = {(one.item, one.level): found[i] for i, one in enumerate(restrictions)}
    assert not torch.allclose(logits["spatial", 0], whole, atol=1e-3)
    assert not torch.allclose(logits["spatial", 1], logits["random", 1], atol=1e-3)
    if name == "vit":
        assert torch.equal(logits["cls_first", 0], whole)
        assert torch.equal(logits["cls_last", 0], whole)
        assert torch.equal(logits["cls_first", 4], logits["cls_last", 4])
        assert not torch.allclose(logits["cls_first", 1], logits["cls_last", 1], atol=1e-3)


def test_masks_of_beit_equal_dropped_keys(new_net, x):
    """Its attention takes no mask: the softmax is masked, after the bias of relative positions."""
    net = new_net("beit")
    blocks = find_blocks(net)
    restrictions = restrictions_of(blocks, RestrictedAttentionSettings(distances=(1,)), seed=5)
    found = dict(variant_logits(net, blocks, x, [one.variant for one in restrictions]))
    for index, one in enumerate(restrictions):
        tokens = torch.cat([net.cls_token.expand(len(x), -1, -1), net.patch_embed(x)], dim=1)
        if net.pos_embed is not None:
            tokens = tokens + net.pos_embed
        for block, change in zip(net.blocks, one.variant, strict=True):
            attn, bias = block.attn, block.attn._get_rel_pos_bias()
            q, k, v = (
                block.norm1(tokens) @ part.mT + (0 if shift is None else shift)
                for part, shift in zip(
                    attn.qkv.weight.chunk(3), (attn.q_bias, attn.k_bias, attn.v_bias), strict=True
                )
            )
            q, k, v = (
                part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for part in (q, k, v)
            )
            rows = []
            for i in range(tokens.shape[1]):
                allowed = torch.ones(tokens.shape[1]) if change is None else change.allowed[i]
                keys = allowed.nonzero()[:, 0]
                logits = q[:, :, i : i + 1] @ k[:, :, keys].mT * attn.scale
                weights = F.softmax(logits + bias[:, :, i : i + 1, keys], dim=-1)
                rows.append(weights @ v[:, :, keys])
            mixed = torch.cat(rows, dim=2).transpose(1, 2).flatten(2)
            tokens = tokens + block.gamma_1 * attn.proj(mixed)
            tokens = tokens + block.gamma_2 * block.mlp(block.norm2(tokens))
        expected = net.forward_head(net.norm(tokens))
        torch.testing.assert_close(found[index], expected, atol=2e-5, rtol=1e-4)
    assert {one.item for one in restrictions} == {"spatial", "random", "cls_first", "cls_last"}


@pytest.mark.parametrize("name", ["vit", "deit", "beit", "cait"])
def test_the_largest_distance_equals_no_mask(new_net, x, name):
    net = new_net(name)
    blocks = find_blocks(net)
    restrictions = restrictions_of(blocks, RestrictedAttentionSettings(what=("distance",)), seed=0)
    assert [(one.item, one.level) for one in restrictions] == [
        (item, level) for level in range(4) for item in ("spatial", "random")
    ]
    found = dict(variant_logits(net, blocks, x, [one.variant for one in restrictions]))
    with torch.no_grad():
        plain = net(x)
    for last in (6, 7):
        torch.testing.assert_close(found[last], plain, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found[0], plain, atol=1e-3)
    assert all(one.variant[4:] == (None, None) for one in restrictions if name == "cait")
    flags = {flag for one in restrictions for flag in one.flags}
    assert flags == ({"no_prefix_token"} if name == "cait" else set())


def test_at_distance_zero_a_patch_of_cait_reaches_no_other_patch(new_net, x):
    net = new_net("cait")
    blocks = find_blocks(net)
    how = RestrictedAttentionSettings(distances=(0,), control=False)
    (one,) = restrictions_of(blocks, how, seed=0)
    changed = x.clone()
    changed[:, :, :4, :4] = 1 - changed[:, :, :4, :4]
    outputs = []
    for images in (x, changed):
        with block_outputs(net) as kept:
            next(variant_logits(net, blocks, images, [one.variant]))
            outputs.append(kept["blocks.3"].clone())
    assert torch.equal(outputs[0][:, 1:], outputs[1][:, 1:])
    assert not torch.equal(outputs[0][:, 0], outputs[1][:, 0])


def test_xcit_without_its_patch_interaction(new_net, x):
    net = new_net("xcit")
    blocks = find_blocks(net)
    how = RestrictedAttentionSettings(what=("local",), depths=(0, 2))
    restrictions = restrictions_of(blocks, how, seed=0)
    assert [(one.item, one.level) for one in restrictions] == [
        ("local_first", 0), ("local_last", 0), ("local_first", 2), ("local_last", 2),
    ]  # fmt: skip
    found = dict(variant_logits(net, blocks, x, [one.variant for one in restrictions]))
    with torch.no_grad():
        for places, index in (((0, 1), 2), ((2, 3), 3)):
            twin = new_net("xcit")
            for place in places:
                twin.blocks[place].gamma3.zero_()  # scales the patch interaction
            torch.testing.assert_close(found[index], twin(x), atol=1e-6, rtol=1e-5)


def test_accuracy_by_restriction(new_net, x):
    net = new_net("vit")
    blocks = find_blocks(net)
    restrictions = restrictions_of(blocks, RestrictedAttentionSettings(), seed=0)
    assert len(restrictions) == 2 * 4 + 2 * 5
    predictions = restricted_predictions(net, blocks, x, restrictions)
    y = net(x).argmax(dim=1)
    table = variant_table([f"i{row}" for row in range(len(x))], y, predictions)
    found = {(m.item, m.level): m for m in measurements(table, restrictions)}
    assert found["spatial", 3].value == found["cls_last", 0].value == 1
    expected = np.mean(predictions[0] == y.numpy())
    assert found["spatial", 0].value == expected
    assert found["spatial", 0].n == len(x)


@pytest.mark.parametrize(
    ("name", "what", "message"),
    [
        ("xcit", None, r"Xcit has attention over channels, not tokens; write what: \[local\]"),
        ("swin", None, "SwinTransformer takes no mask: its tokens move between windows"),
        ("levit", None, "Levit takes no mask: its grid of tokens shrinks"),
        ("resnet", None, "ResNet has no attention that can be restricted; networks that do: ViT"),
        ("cait", ("cls_only",), "cls_only needs a class token beside the patches, which Cait"),
        ("registers", ("cls_only",), "cls_only needs a class token beside the patches"),
        ("gap", ("cls_only",), "cls_only needs a class token beside the patches"),
        ("vit", ("local",), "local cannot be removed from VisionTransformer"),
    ],
)
def test_refusals_name_the_network(new_net, name, what, message):
    with pytest.raises(CasemateError, match=message) as refusal:
        restrictions_of(find_blocks(new_net(name)), RestrictedAttentionSettings(what=what), seed=0)
    assert "\n" not in str(refusal.value)


def test_settings_out_of_range(new_net):
    how = RestrictedAttentionSettings(depths=(5,))
    with pytest.raises(CasemateError, match="depths: 5 is more than the 4 blocks"):
        restrictions_of(find_blocks(new_net("vit")), how, seed=0)
    with pytest.raises(SettingError, match=r"distances: .* would be ignored"):
        RestrictedAttentionSettings(what=("cls_only",), distances=(1,))
    with pytest.raises(SettingError, match=r"distances: .* must be at least 0"):
        RestrictedAttentionSettings(distances=(-1,))
