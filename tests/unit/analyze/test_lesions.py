"""Lesions: the sets, predictions against plain passes and rebuilt networks, the summary."""

import copy
import math

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from components.analyze.blocks import find_blocks
from components.analyze.lesions import (
    Lesion,
    lesion_predictions,
    lesions_of,
    measurements,
    removable_places,
    sampled_sets,
)
from components.analyze.prefixes import SharedPasses, variant_logits, variant_table
from components.analyze.settings import BlockSettings, LesionSettings
from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.models.attention.lesions import without

FAMILIES = ["vit", "deit", "cait", "xcit", "swin", "beit", "resnet", "resnetv2", "users"]


def blocks_of(net):
    named = type(net).__name__ == "Users"
    return find_blocks(net, BlockSettings(names=("layers.*",)) if named else None)


def test_twelve_blocks_need_673_evaluations():
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 4, "num_heads": 1}
    blocks = find_blocks(VisionTransformer(**shape, depth=12, num_classes=2))
    lesions = lesions_of(blocks, LesionSettings(), seed=0)
    assert len(lesions) == len(set(lesions)) == 673
    singles = [lesion for lesion in lesions if len(lesion.places) == 1]
    assert len(singles) == 36
    several = [lesion for lesion in lesions if len(lesion.places) > 1]
    assert all(0 not in lesion.places for lesion in several)
    by_part = [[x.places for x in several if x.part == part] for part in ("block", "attn", "mlp")]
    assert by_part[0] == by_part[1] == by_part[2]  # parts share their sets


@pytest.mark.parametrize(("depth", "count"), [(12, 2), (12, 6), (12, 10), (12, 11), (24, 3)])
def test_sets_are_distinct_keep_the_first_block_and_depend_on_their_address(depth, count):
    sets = sampled_sets(depth, count, num_samples=25, seed=3)
    assert len(sets) == len(set(sets)) == min(25, math.comb(depth - 1, count))
    for one in sets:
        assert list(one) == sorted(set(one))
        assert len(one) == count
        assert 1 <= one[0] <= one[-1] < depth
    assert sampled_sets(depth, count, num_samples=25, seed=3) == sets
    if math.comb(depth - 1, count) > 25:
        assert sampled_sets(depth, count, num_samples=25, seed=4) != sets
        # a longer list begins with the shorter one
        assert sampled_sets(depth, count, num_samples=30, seed=3)[:25] == sets


def test_every_block_is_drawn_equally_often():
    counts = np.zeros(12)
    for seed in range(200):
        for one in sampled_sets(12, 5, num_samples=25, seed=seed):
            counts[list(one)] += 1
    expected = 200 * 25 * 5 / 11
    assert counts[0] == 0
    assert np.abs(counts[1:] - expected).max() < 5 * math.sqrt(expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_shared_passes_give_the_bits_of_plain_ones(new_net, x, name):
    if name.startswith("resnet"):
        x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    net = new_net(name)
    blocks = blocks_of(net)
    lesions = lesions_of(blocks, LesionSettings(num_samples=4), seed=0)
    variants = [lesion.variant(len(blocks.sites)) for lesion in lesions]
    shared = dict(variant_logits(net, blocks, x, variants))
    distinct = set()
    with torch.no_grad():
        for index, lesion in enumerate(lesions):
            plain = _plain(net, blocks, lesion, x)
            assert torch.equal(shared[index], plain), lesion.name
            distinct.add(plain.numpy().tobytes())
    assert len(distinct) > 0.8 * len(lesions)  # without both class blocks, CaiT sees nothing


def _plain(net, blocks, lesion, x):
    """A copy of the network with its parts removed by hand, without shared outputs."""
    twin = copy.deepcopy(net)
    sites = blocks_of(twin).sites
    stack = [without(sites[place], lesion.part) for place in lesion.places]
    for manager in stack:
        manager.__enter__()
    return twin(x)


@pytest.mark.parametrize("name", ["vit", "beit", "users"])
def test_removal_equals_a_network_built_without_the_blocks(new_net, x, name):
    net = new_net(name)
    blocks = blocks_of(net)
    children = "layers" if name == "users" else "blocks"
    for places in [(0,), (2,), (1, 2), (0, 1, 2)]:
        twin = copy.deepcopy(net)
        kept = [m for i, m in enumerate(getattr(twin, children)) if i not in places]
        new = nn.ModuleList(kept) if name in ("users", "beit") else nn.Sequential(*kept)
        setattr(twin, children, new)
        found = lesion_predictions(net, blocks, x, [Lesion("block", places)])
        index, logits = next(
            variant_logits(net, blocks, x, [Lesion("block", places).variant(len(blocks.sites))])
        )
        with torch.no_grad():
            expected = twin(x)
        assert index == 0
        assert torch.equal(logits, expected)
        assert found[0].tolist() == expected.argmax(dim=1).tolist()


def test_predictions_do_not_depend_on_the_other_lesions(new_net, x):
    net = new_net("vit")
    blocks = blocks_of(net)
    lesions = lesions_of(blocks, LesionSettings(num_samples=3), seed=1)
    whole = lesion_predictions(net, blocks, x, lesions)
    assert whole.shape == (len(lesions), len(x))
    order = list(reversed(range(len(lesions))))
    reordered = lesion_predictions(net, blocks, x, [lesions[place] for place in order])
    assert (reordered == whole[order]).all()
    for place in (0, 5, len(lesions) - 1):
        assert (lesion_predictions(net, blocks, x, [lesions[place]])[0] == whole[place]).all()


class Wave(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return (self.scale * x - 0.5).sin()


class TurnInPlace(nn.Module):
    def forward(self, x):
        return x.mul_(-0.7)


def test_networks_that_work_in_place_are_not_spoilt_by_kept_outputs(x):
    layers = [part for scale in (1.0, 1.3, 1.6) for part in (Wave(scale), TurnInPlace())]
    net = nn.Sequential(nn.Sequential(*layers), nn.Flatten()).eval()
    blocks = find_blocks(net, BlockSettings(names=("0.0", "0.2", "0.4")))
    removed_places = [(), (2,), (1,), (1, 2)]
    variants = [Lesion("block", places).variant(3) for places in removed_places]
    shared = dict(variant_logits(lambda images: net(images.clone()), blocks, x, variants))
    for index, places in enumerate(removed_places):
        value = x
        for place in range(3):
            value = -0.7 * (value if place in places else net[0][2 * place](value))
        assert torch.equal(shared[index], value.flatten(1)), places


def test_nothing_is_kept_of_a_pass_that_failed(new_net, x):
    net = new_net("vit")
    blocks = blocks_of(net)
    whole, lesioned = Lesion("block", ()).variant(4), Lesion("mlp", (1,)).variant(4)
    passes = SharedPasses(net, blocks, x)
    expected = passes.logits(whole)

    def interrupted(images):
        net(images)
        raise KeyboardInterrupt

    passes.logits_of = interrupted
    with pytest.raises(KeyboardInterrupt):
        passes.logits(lesioned)
    passes.logits_of = net
    assert torch.equal(passes.logits(whole), expected)
    assert not torch.equal(passes.logits(lesioned), expected)


def test_parts_of_two_part_networks(new_net):
    xcit = find_blocks(new_net("xcit"))
    assert removable_places(xcit, "block") == [0, 1, 2, 3, 4, 5]
    assert removable_places(xcit, "attn") == removable_places(xcit, "local") == [0, 1, 2, 3]
    assert {lesion.part for lesion in lesions_of(xcit, LesionSettings(), seed=0)} == {
        "block", "attn", "mlp", "local",
    }  # fmt: skip
    cait = find_blocks(new_net("cait"))
    assert removable_places(cait, "mlp") == [0, 1, 2, 3, 4, 5]
    with pytest.raises(CasemateError, match="local cannot be removed from VisionTransformer"):
        lesions_of(find_blocks(new_net("vit")), LesionSettings(parts=("local",)), seed=0)
    with pytest.raises(CasemateError, match=r"attn cannot be removed from ResNet; it has block"):
        lesions_of(find_blocks(new_net("resnet")), LesionSettings(parts=("attn",)), seed=0)
    with pytest.raises(CasemateError, match=r"counts: 4 is too many: 4 blocks have mlp"):
        lesions_of(xcit, LesionSettings(parts=("mlp",), counts=(4,)), seed=0)
    with pytest.raises(SettingError, match=r"counts: \(1,\) must be at least 2"):
        LesionSettings(counts=(1,))


def test_user_blocks_that_change_the_shape_are_refused(new_net, x):
    net = new_net("users")
    blocks = find_blocks(net, BlockSettings(names=("embed", "layers.0")))
    with pytest.raises(CasemateError, match="embed cannot be removed: its output does not"):
        lesion_predictions(net, blocks, x, [Lesion("block", (1,))])
    assert not any(part._forward_hooks for part in net.modules())


def test_the_summary_by_hand():
    lesions = [
        Lesion("block", ()), Lesion("mlp", (0,)),
        Lesion("mlp", (1, 2)), Lesion("mlp", (1, 3)), Lesion("mlp", (2, 3)),
        Lesion("mlp", (1, 2, 3)),
    ]  # fmt: skip
    labels = torch.tensor([0, 1, 2, 0])
    predictions = np.array([
        [0, 1, 2, 0], [0, 1, 0, 1],
        [0, 0, 0, 1], [0, 1, 1, 1], [0, 1, 2, 1],
        [-1, 0, 1, 0],
    ])  # fmt: skip
    table = variant_table(["a", "b", "c", "d"], labels, predictions)
    found = {(m.item, m.level, m.metric): m.value for m in measurements(table, lesions)}
    assert found["none", None, "accuracy"] == 1
    assert found["mlp", 0, "single_accuracy"] == 0.5
    assert found["mlp", 2, "mean_accuracy"] == pytest.approx((0.25 + 0.5 + 0.75) / 3)
    assert found["mlp", 2, "standard_error"] == pytest.approx(0.25 / math.sqrt(3))
    assert found["mlp", 2, "min_accuracy"] == 0.25
    assert found["mlp", 2, "max_accuracy"] == 0.75
    assert found["mlp", 3, "mean_accuracy"] == 0.25
    assert ("mlp", 3, "standard_error") not in found  # one set
    with pytest.raises(ValueError, match="6 predictions per item, 5 lesions"):
        measurements(table, lesions[:5])


def test_logits_that_are_not_finite_are_wrong(new_net, x):
    net = new_net("vit")
    with torch.no_grad():
        net.blocks[2].mlp.fc2.bias.fill_(torch.inf)
    found = lesion_predictions(net, find_blocks(net), x, [Lesion("block", ()), Lesion("mlp", (2,))])
    assert (found[0] == -1).all()
    assert (found[1] >= 0).all()
