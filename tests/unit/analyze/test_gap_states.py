"""Gap histograms of a study: which modules, clean and attacked, before and after scaling."""

import pytest
import torch

from components.analyze.gaps import (
    GapState,
    attacked_images,
    densities,
    gap_states,
    measurements,
    module_names,
    searched_scales,
)
from components.analyze.settings import GapSettings
from components.analyze.states import merge_all, read_arrays, to_table
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.settings import ScaleAscentSettings
from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.models.attention.gaps import LIMITS, GapHistogram


def items_of(net, x):
    y = net(x).argmax(dim=1).detach()
    return Items(x, y, tuple(f"i{row}" for row in range(len(x))), run_seed=0)


def test_modules_are_the_first_middle_and_last(new_net):
    assert module_names(new_net("vit"), GapSettings()) == [
        f"blocks.{place}.attn" for place in (0, 1, 3)
    ]
    assert module_names(new_net("vit"), GapSettings(positions=(2, 0))) == [
        "blocks.0.attn", "blocks.2.attn",
    ]  # fmt: skip
    assert module_names(new_net("xcit"), GapSettings())[-1] == "cls_attn_blocks.1.attn"
    with pytest.raises(CasemateError, match="positions: 4 is not an attention module of Vision"):
        module_names(new_net("vit"), GapSettings(positions=(4,)))
    with pytest.raises(CasemateError, match="ResNet gives no access to blocks and attention"):
        module_names(new_net("resnet"), GapSettings())
    with pytest.raises(SettingError, match=r"search.num_draws: 3 candidates"):
        GapSettings(search=ScaleAscentSettings())


def gaps_by_hand(net, x, place):
    """Sorted gaps of one block of a ViT from its weights."""
    tokens = net._pos_embed(net.patch_embed(x))
    for block in net.blocks[:place]:
        tokens = block(tokens)
    block = net.blocks[place]
    q, k, _ = (
        part.unflatten(-1, (2, 8)).transpose(1, 2)
        for part in block.attn.qkv(block.norm1(tokens)).chunk(3, dim=-1)
    )
    top = (q @ k.mT / 8**0.5).sort(dim=-1, descending=True).values
    return (top[..., 0] - top[..., 1]).flatten()


def test_histograms_equal_gaps_by_hand(new_net, x):
    net, how = new_net("vit"), GapSettings(search=None)
    states = gap_states(net, net, {"clean": x, "attacked": 1 - x}, how, scales=None)
    assert len(states) == 2 * 3
    with torch.no_grad():
        for kind, images in (("clean", x), ("attacked", 1 - x)):
            for place in (0, 1, 3):
                expected = gaps_by_hand(net, images, place)
                found = states[f"{kind}/before/blocks.{place}.attn"].histogram
                assert found.num_gaps == expected.numel() == 6 * 2 * 17
                assert found.largest == pytest.approx(float(expected.max()), rel=1e-4)
                median = float(expected.double().median())
                assert found.quantile(0.5) == pytest.approx(median, rel=0.02)


def test_scaling_shrinks_the_gaps_of_the_scaled_network(new_net, x):
    net, how = new_net("vit"), GapSettings(positions=(0,))
    plain = net(x)
    states = gap_states(net, net, {"clean": x}, how, scales=(0.01, 1.0, 1.0, 1.0))
    before, after = (
        states[f"clean/{state}/blocks.0.attn"].histogram.largest for state in ("before", "after")
    )
    assert after == pytest.approx(0.01 * before, rel=1e-3)
    assert torch.equal(net(x), plain)


def test_a_whole_study_on_attacked_images(new_net, x):
    net, how = new_net("vit"), GapSettings(num_steps=3)
    items = items_of(net, x)
    with attack_mode(net):
        x_adv = attacked_images(net, items, how)
        scales = searched_scales(net, net, items, how)
        states = gap_states(net, net, {"clean": x, "attacked": x_adv}, how, scales=scales)
    assert float((x_adv - x).abs().max()) <= how.eps
    assert not torch.equal(x_adv, x)
    assert len(scales) == 4
    assert len(states) == 2 * 2 * 3
    found = {(m.item, m.metric): m.value for m in measurements(states)}
    assert found["attacked/after/blocks.3.attn", "underflowed"] == 0
    assert found["clean/before/blocks.0.attn", "q50"] > 0


def test_units_add_up_in_any_order(new_net, x):
    net, how = new_net("vit"), GapSettings(search=None)
    whole = gap_states(net, net, {"clean": x}, how, scales=None)
    parts = [gap_states(net, net, {"clean": part}, how, scales=None) for part in x.split(2)]
    for name, state in whole.items():
        read = [
            GapState.of_arrays(read_arrays(to_table(part))[name], how) for part in reversed(parts)
        ]
        merged = merge_all(read).histogram
        forwards = merge_all([part[name] for part in parts]).histogram
        assert torch.equal(merged.counts, forwards.counts)
        assert merged.largest == forwards.largest
        assert merged.num_gaps == state.histogram.num_gaps  # rounding may move one to another bin
        assert merged.quantile(0.5) == pytest.approx(state.histogram.quantile(0.5), rel=0.02)


def test_densities_are_shares_of_all_rows():
    histogram = GapHistogram(LIMITS[torch.float32])
    histogram.add(torch.tensor([0.0, 1e-5, 0.02, 0.5, 0.5, 2.0, 1e6, torch.inf]))
    edges, shares = densities(histogram, bins_per_decade=8)
    assert len(edges) == len(shares) + 1 == 65
    assert float(shares.sum()) == pytest.approx(4 / 8)
    place = int(shares.argmax())
    assert edges[place] <= 0.5 < edges[place + 1]
    assert float(shares[place]) == 2 / 8
    with pytest.raises(ValueError, match="must divide 128"):
        densities(histogram, bins_per_decade=7)
    rows = {m.metric: m for m in measurements({"s": GapState(histogram)})}
    assert rows["max"].value is None
    assert rows["max"].flags == ("null: a query has a single key",)
    assert rows["underflowed"].value == 2 / 8
