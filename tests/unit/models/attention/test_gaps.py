"""Pre-softmax gaps against logits worked out by hand, and the limits of number formats."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize

from components.models.attention.discover import attention_of
from components.models.attention.gaps import (
    LIMITS,
    WIDE_EDGES,
    GapHistogram,
    attention_gaps,
    top_gaps,
)
from components.models.attention.masks import masked_pairs
from components.models.attention.scaling import scaled_attention


def inputs_of(module, net, x):
    seen = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    net(x)
    handle.remove()
    return seen[0]


def heads(tensor, num_heads):
    return tensor.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # (B, H, N, d)


def hand_computed(net, site, x):
    """Logits of one module from its weights, written without looking at timm's forward."""
    attn, tokens = site.module, inputs_of(site.module, net, x)
    if site.kind == "class":
        q = heads(attn.q(tokens[:, :1]), site.num_heads)
        k = heads(attn.k(tokens), site.num_heads)
        return torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    q, k, _ = (heads(part, site.num_heads) for part in attn.qkv(tokens).chunk(3, dim=-1))
    if site.kind == "channels":
        q, k = normalize(q, dim=2), normalize(k, dim=2)  # over tokens
        return torch.einsum("bhnc,bhnd->bhcd", q, k) * attn.temperature
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    if site.kind == "talking_heads":
        mixed = torch.einsum("gh,bhqk->bgqk", attn.proj_l.weight, logits)
        return mixed + attn.proj_l.bias[:, None, None]
    return logits


def sorted_gaps(logits):
    ordered = logits.sort(dim=-1, descending=True).values
    return (ordered[..., 0] - ordered[..., 1]).flatten().double()


@pytest.mark.parametrize("name", ["vit", "cait", "xcit"])
@pytest.mark.parametrize("fused", [True, False])
def test_gaps_equal_hand_computed_logits(new_net, on_path, x, name, fused):
    net = on_path(new_net(name), fused)
    plain = net(x)
    with attention_gaps(net) as histograms:
        assert torch.equal(net(x), plain)
    assert torch.equal(net(x), plain)
    for site in attention_of(net):
        expected = sorted_gaps(hand_computed(net, site, x))
        histogram = histograms[site.name]
        assert histogram.num_gaps == expected.numel()  # one per sample, head and query
        assert histogram.largest == pytest.approx(expected.max().item(), rel=1e-4)
        middle = expected.sort().values[(len(expected) + 1) // 2 - 1]
        assert histogram.quantile(0.5) == pytest.approx(middle.item(), rel=0.01)


def test_gaps_are_those_of_the_softmax_that_runs(net_either_path, x):
    """Biases, rotations and window masks included: every path of every family gives equal gaps."""
    net = net_either_path
    explicit = copy.deepcopy(net)
    for module in explicit.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    with attention_gaps(net) as ours, attention_gaps(explicit) as theirs:
        assert torch.allclose(net(x), explicit(x), atol=1e-4)
    for name, histogram in ours.items():
        assert histogram.largest == pytest.approx(theirs[name].largest, rel=1e-4)
        assert histogram.num_gaps == theirs[name].num_gaps > 0


def test_window_masks_are_part_of_the_logits(new_net, x):
    """In Swin's second block some windows hold a token alone with its kind: -100 hides the rest."""
    net = new_net("swin")
    shifted = net.layers[0].blocks[1]
    assert any(shifted.shift_size)
    with attention_gaps(net) as histograms:
        net(x)
    shifted.attn_mask.zero_()
    with attention_gaps(net) as unmasked:
        net(x)
    name = "layers.0.blocks.1.attn"
    assert not torch.equal(histograms[name].counts, unmasked[name].counts)


def test_gaps_follow_scales_and_masks(new_net, x):
    net = new_net("vit")
    name = "blocks.0.attn"
    with attention_gaps(net) as plain:
        net(x)
    scales = torch.full((2,), 4.0)
    with attention_gaps(net) as outer, scaled_attention(net, scales), attention_gaps(net) as inner:
        net(x)
    for scaled in (outer, inner):
        assert scaled[name].largest == pytest.approx(4 * plain[name].largest, rel=1e-4)
    with masked_pairs(net, torch.eye(17, dtype=torch.bool)), attention_gaps(net) as alone:
        net(x)
    assert alone[name].summary()["underflowed"] == 1  # a single key has no rival


def test_counts_add_up_over_batches(new_net, x):
    net = new_net("xcit")
    with attention_gaps(net) as whole:
        net(x)
    with attention_gaps(net) as parts:
        for row in x:
            net(row[None])
    for name, histogram in whole.items():
        assert (histogram.counts - parts[name].counts).abs().sum() <= 2  # rounding at an edge


def test_only_chosen_modules_are_measured(new_net, x):
    net = new_net("vit")
    with attention_gaps(net, names=["blocks.1.attn"]) as histograms:
        net(x)
    assert list(histograms) == ["blocks.1.attn"]
    with pytest.raises(ValueError, match="run the network inside"), attention_gaps(net) as empty:
        empty["blocks.0.attn"].summary()


@given(
    st.lists(st.floats(1e-4, 9e3), min_size=1, max_size=60),
    st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]),
)
def test_quantiles_are_right_to_a_bin(values, prob):
    """Oracle: the smallest value that a share `prob` of the sorted list does not exceed."""
    histogram = GapHistogram(LIMITS[torch.float32])
    for value in values:
        histogram.add(torch.tensor([value], dtype=torch.float64))
    expected = next(v for i, v in enumerate(sorted(values), start=1) if i >= prob * len(values))
    assert histogram.quantile(prob) == pytest.approx(expected, rel=0.0095)
    summary = histogram.summary()
    assert summary["max"] == max(values)
    assert summary["cancelled"] == sum(v > 16.65 for v in values) / len(values)
    assert summary["underflowed"] == sum(v > 104 for v in values) / len(values)


def test_gaps_outside_the_bins_are_kept():
    histogram = GapHistogram(LIMITS[torch.float32])
    histogram.add(torch.tensor([0.0, 0.0, 1e6]))
    assert histogram.quantile(0.5) == 0
    assert histogram.quantile(1.0) == 1e6
    assert histogram.num_gaps == 3


def test_tiny_gaps_have_quantiles_on_wide_bins():
    histogram = GapHistogram.empty(LIMITS[torch.float32], WIDE_EDGES)
    histogram.add(torch.tensor([1e-7, 1.1e-7, 2e-7], dtype=torch.float64))
    assert histogram.quantile(0.5) == pytest.approx(1.1e-7, rel=0.01)
    with pytest.raises(ValueError, match="ranges cannot be merged"):
        histogram.merged(GapHistogram(LIMITS[torch.float32]))


def test_a_single_key_has_an_infinite_gap():
    assert top_gaps(torch.zeros(2, 3, 1)).tolist() == [[torch.inf] * 3] * 2


def test_top_gaps():
    logits = torch.tensor([[1.0, 4.0, 2.5], [7.0, 7.0, -torch.inf], [0.0, -torch.inf, -torch.inf]])
    assert top_gaps(logits).tolist() == [1.5, 0, torch.inf]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_limits_are_where_softmax_loses_information(dtype):
    gaps = torch.arange(0.05, 800, 0.05, dtype=torch.float64)
    weights = torch.stack([torch.zeros_like(gaps), -gaps], dim=-1).to(dtype).softmax(dim=-1)
    first_one = gaps[(weights[:, 0] == 1).nonzero()[0, 0]]
    first_zero = gaps[(weights[:, 1] == 0).nonzero()[0, 0]]
    limits = LIMITS[dtype]
    rounding = float(torch.finfo(dtype).eps) * first_zero  # the gap itself has to be representable
    assert abs(first_one - limits.cancels) <= 0.1 + rounding
    assert abs(first_zero - limits.underflows) <= 0.1 + rounding
