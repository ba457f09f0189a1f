"""The search for attention scales, against Algorithm 1 written down a second time."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.cait import Cait
from timm.models.levit import Levit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn

from components.attacks.gradient import in_fixed_batches
from components.attacks.interface import Items
from components.attacks.scales import (
    LOWEST,
    ScaleSearch,
    literal_distance,
    squared_distance,
    unit_distance,
)
from components.core.seeding import generator_for
from components.core.settings import SettingError
from components.models.attention.discover import attention_of
from components.models.attention.features import block_outputs
from components.models.attention.scaling import scaled_attention
from tests.unit.networks import scattered

TINY = 1e-30  # as zero, which settings refuse: lost in the sum with any factor
SHAPE = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
LEVIT = {"embed_dim": (16, 24), "key_dim": 8, "depth": (1, 1), "num_heads": (2, 3)}
NETS = {
    "vit": lambda: VisionTransformer(**SHAPE, num_classes=5),
    "xcit": lambda: Xcit(**{**SHAPE, "patch_size": 8}, num_classes=5),
    "cait": lambda: Cait(**SHAPE, init_values=1.0, num_classes=5),
    "swin": lambda: SwinTransformer(
        img_size=16, patch_size=2, embed_dim=8, depths=(2,), num_heads=(2,), window_size=4
    ),
    "levit": lambda: Levit(img_size=16, stem_type="s8", **LEVIT, num_classes=5),
    "levit_conv": lambda: Levit(img_size=16, stem_type="s8", use_conv=True, **LEVIT, num_classes=5),
}


def make_net(name: str = "vit") -> nn.Module:
    return scattered(NETS[name], by=0.2)


def make_items(num_items: int = 6, *, run_seed: int = 0) -> Items:
    x = torch.rand(num_items, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return Items(x, torch.arange(num_items) % 5, tuple(map(str, range(num_items))), run_seed)


features = st.integers(0, 2**31).map(
    lambda seed: torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed)).double()
)


@settings(max_examples=30, deadline=None)
@given(pair=features, c=st.floats(0.1, 10))
def test_distances_of_features(pair, c):
    a, b = pair
    whole = lambda z: z.flatten(1)[:, None]  # noqa: E731 - one token per image
    sizes = [z.flatten(1).norm(dim=1) for z in (a, b)]
    stretch = (sizes[0] - sizes[1]).square() / (sizes[0] * sizes[1])
    torch.testing.assert_close(squared_distance(a, b), unit_distance(whole(a), whole(b)) + stretch)
    cosine = F.cosine_similarity(a, b, dim=-1)
    torch.testing.assert_close(unit_distance(a, b), (2 - 2 * cosine).mean(dim=1))
    # only the printed form rewards features for shrinking
    torch.testing.assert_close(unit_distance(c * a, b), unit_distance(a, b))
    torch.testing.assert_close(squared_distance(c * a, c * b), squared_distance(a, b))
    torch.testing.assert_close(literal_distance(c * a, c * b), literal_distance(a, b) / c)
    assert all(
        (distance(a, a) == 0).all()
        for distance in (unit_distance, squared_distance, literal_distance)
    )


def answers(net: VisionTransformer, scales: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits and block outputs by timm's own scale and its own view of intermediate features."""
    twin = copy.deepcopy(net)
    for site, scale in zip(attention_of(net), scales.tolist(), strict=True):
        attn = twin.get_submodule(site.name)
        attn.fused_attn = False
        attn.scale *= scale
    final, parts = twin.forward_intermediates(x, output_fmt="NLC", return_prefix_tokens=True)
    return twin.forward_head(final), [torch.cat([prefix, rest], dim=1) for rest, prefix in parts]


def objective(kind: str, moved, fixed, y: Tensor, *, step: int, num_steps: int) -> float:
    (z, a_all), (z_fixed, b_all) = moved, fixed
    q, q_fixed = z.softmax(dim=1), z_fixed.softmax(dim=1)
    others = torch.ones_like(z).scatter(1, y[:, None], 0).bool()

    def lead(s: Tensor) -> Tensor:
        return s[others].view(len(y), -1).amax(dim=1) - s[~others]

    if kind == "ce":
        value = -q[~others].log()
    elif kind == "margin":
        value = lead(z)
    elif kind == "gama":
        weight = max(0.0, 50 - 50 * step / (num_steps / 4))
        value = lead(q) + weight * (q - q_fixed).square().sum(dim=1)
    else:
        value = torch.zeros(len(y), dtype=z.dtype)
        for a, b in zip(a_all, b_all, strict=True):
            norms = a.flatten(1).norm(dim=1) * b.flatten(1).norm(dim=1)
            difference = (a - b).flatten(1).norm(dim=1)
            if kind == "unit":
                value += (2 - 2 * F.cosine_similarity(a, b, dim=-1)).mean(dim=1)
            else:
                value += difference ** (2 if kind == "eq3_squared" else 1) / norms
    return value.mean().item()


def algorithm_1(net, items: Items, kind: str, *, num_steps: int, batch_size: int) -> Tensor:
    """Central differences instead of autograd; the noise is the search's own."""
    m = len(attention_of(net))
    scales = torch.ones(m, dtype=torch.float64)
    for first in range(0, len(items), batch_size):
        x, y = items.x[first : first + batch_size], items.y[first : first + batch_size]
        generator = generator_for(items.run_seed, "attention scales", 0, first)
        delta = torch.randn(m, generator=generator).double()
        fixed = answers(net, scales, x)
        moved = (scales + delta).clamp(1e-7, 1)
        for step in range(num_steps):
            slope = torch.zeros(m, dtype=torch.float64)
            for i in range(m):
                h = torch.zeros(m, dtype=torch.float64)
                h[i] = 1e-5
                up, down = (
                    objective(
                        kind,
                        answers(net, moved + sign * h, x),
                        fixed,
                        y,
                        step=step,
                        num_steps=num_steps,
                    )
                    for sign in (1, -1)
                )
                slope[i] = (up - down) / 2e-5
            delta = delta + slope
            moved = (scales + delta).clamp(1e-7, 1)
            delta = moved - scales
        scales = moved
    return scales


@pytest.mark.parametrize("kind", ["unit", "eq3_squared", "eq3_literal", "ce", "margin", "gama"])
def test_search_follows_algorithm_1_over_mini_batches(kind):
    net, items = make_net().double(), make_items(run_seed=5)
    items = Items(items.x.double(), items.y, items.item_ids, items.run_seed)
    choice = {"objective": kind} if kind in ("ce", "margin", "gama") else {"distance": kind}
    search = ScaleSearch(**choice, num_draws=1, num_steps=3, batch_size=4)
    with torch.no_grad():
        expected = algorithm_1(net, items, kind, num_steps=3, batch_size=4)
    (found,) = search(net, net, items)
    torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=0, atol=2e-5)
    noise_only = replace(search, step_size=TINY)
    moves = [abs(s - t) for s, t in zip(found, *noise_only(net, net, items), strict=True)]
    assert max(moves) > 5e-4  # far above the tolerance: the ascent was seen, not only the draw


@pytest.mark.parametrize("family", NETS)
def test_ascent_moves_features_further_than_the_draw_in_every_family(family):
    net, items = make_net(family).double(), make_items()  # float32 cosines end at 1e-7
    x = items.x.double()
    kept = copy.deepcopy(net.state_dict())
    search = ScaleSearch(num_draws=1, num_steps=5, noise=0.5)
    (drawn,) = replace(search, step_size=TINY)(lambda z: net(z.double()), net, items)
    (found,) = search(lambda z: net(z.double()), net, items)

    def features(scales: tuple[float, ...]) -> list[Tensor]:
        with scaled_attention(net, torch.tensor(scales)), block_outputs(net) as outputs:
            net(x)
        channel = 1 if family == "levit_conv" else -1
        return [output.movedim(channel, -1) for output in outputs.values()]

    def distance(scales: tuple[float, ...]) -> float:
        pairs = zip(features(scales), features((1.0,) * len(scales)), strict=True)
        return sum((1 - F.cosine_similarity(a, b, dim=-1)).mean().item() for a, b in pairs)

    assert len(found) == len(attention_of(net))
    assert distance(found) > distance(drawn) > 0
    assert all(torch.equal(value, kept[name]) for name, value in net.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_draws_are_addressed_by_seed_and_number():
    net = make_net()
    three = ScaleSearch(num_steps=2)(net, net, make_items())
    assert three == ScaleSearch(num_steps=2)(net, net, make_items())
    assert three[:2] == ScaleSearch(num_steps=2, num_draws=2)(net, net, make_items())
    assert len(set(three)) == 3
    assert three != ScaleSearch(num_steps=2)(net, net, make_items(run_seed=1))
    entries = [scale for scales in three for scale in scales]
    lowest = float(torch.tensor(LOWEST))  # as float32 holds it
    assert all(lowest <= scale <= 1 for scale in entries)


@pytest.mark.parametrize("distance", ["unit", "eq3_squared", "eq3_literal"])
def test_without_noise_a_distance_has_no_gradient_to_follow(distance):
    net = make_net()
    search = ScaleSearch(noise=TINY, distance=distance, num_draws=1, num_steps=3)
    (scales,) = search(net, net, make_items())
    assert scales == pytest.approx((1, 1), abs=1e-5)


def test_without_noise_a_loss_still_has_a_gradient():
    """Relabelled by the answers themselves, the loss rises when attention gets weaker."""
    net, items = make_net(), make_items()
    with torch.no_grad():
        items = replace(items, y=net(items.x).argmax(dim=1))
    for objective_name in ("ce", "margin"):
        search = ScaleSearch(noise=TINY, objective=objective_name, num_draws=1, step_size=5.0)
        assert min(search(net, net, items)[0]) < 0.999


def test_a_model_that_splits_its_input_is_refused():
    """Only the features of its last piece could be compared."""
    net = make_net()
    with pytest.raises(ValueError, match="splits or pads"):
        ScaleSearch()(in_fixed_batches(net, size=4), net, make_items())
    with pytest.raises(ValueError, match="eval mode"):
        ScaleSearch()(net, net.train(), make_items())


def test_unknown_choices_are_named():
    with pytest.raises(SettingError, match=r"objective: l2 is unknown; choose one of lpips, ce"):
        ScaleSearch(objective="l2")
    with pytest.raises(SettingError, match=r"distance: cosine is unknown; choose one of unit"):
        ScaleSearch(distance="cosine")
    with pytest.raises(SettingError, match=r"num_draws: 0"):
        ScaleSearch(num_draws=0)
