"""Attention so sharp that gradients vanish: which attack is blind, and what scaling gives back."""

import pytest
import torch

from components.attacks.aas import ScaledAttack
from components.attacks.gradient import Pgd
from components.attacks.gradients import attack_mode, input_gradient, is_zero
from components.attacks.interface import Items
from components.attacks.scales import ScaleSearch
from components.models.attention.gaps import attention_gaps
from tests.unit.attacks.saturated import saturated_attention, saturated_images

EPS = 8 / 255
PGD = Pgd(norm="linf", eps=EPS, num_steps=40, step_size=2 / 255)
SCALES = ((0.1,), (0.01,), (0.001,))
F32, F64 = torch.float32, torch.float64


def items_in(dtype: torch.dtype, num_items: int = 2) -> Items:
    """All of class 0. In float64 pixels are, too: a float32 pixel would round 1e-53 to 0 again."""
    ids = tuple(f"item-{i}" for i in range(num_items))
    return Items(saturated_images(num_items).to(dtype), torch.zeros(num_items).long(), ids, 0)


# case, D, number format: robust accuracy of the original network, crafted at s = 1, .1, .01, .001
TABLE = [
    ("A", 10, F32, (0, 0, 0, 0)),  # fine
    ("A", 20, F32, (1, 0, 0, 0)),  # cancellation: 1 - p is lost beyond a gap of 16.65
    ("A", 20, F64, (0, 0, 0, 0)),
    ("A", 50, F32, (1, 0, 0, 0)),
    ("A", 50, F64, (1, 0, 0, 0)),  # float64 cancels beyond 36.75
    ("A", 200, F32, (1, 1, 0, 0)),  # s * D is still beyond 16.65 at .1
    ("B", 90, F32, (0, 0, 0, 0)),  # tiny gradients still have a sign
    ("B", 120, F32, (1, 0, 0, 0)),  # underflow beyond 104
    ("B", 120, F64, (0, 0, 0, 0)),
    ("B", 200, F32, (1, 0, 0, 0)),
    ("B", 200, F64, (0, 0, 0, 0)),
    ("B", 800, F32, (1, 0, 0, 0)),
    ("B", 800, F64, (1, 0, 0, 0)),  # float64 underflows beyond 745
    ("C", 10, F32, (1, 0, 0, 1)),  # saturation: too large a factor fails, too small a one as well
    ("C", 10, F64, (1, 0, 0, 1)),
    ("C", 20, F32, (1, 0, 0, 1)),
    ("C", 20, F64, (1, 0, 0, 1)),
    ("C", 50, F32, (1, 0, 0, 0)),
    ("C", 50, F64, (1, 0, 0, 0)),
    ("C", 90, F32, (1, 1, 0, 0)),
    ("C", 90, F64, (1, 1, 0, 0)),
    ("C", 200, F32, (1, 1, 0, 0)),
    ("C", 200, F64, (1, 1, 0, 0)),
    ("C", 800, F32, (1, 1, 1, 0)),
    ("C", 800, F64, (1, 1, 1, 0)),
]


@pytest.mark.parametrize(("case", "gap", "dtype", "expected"), TABLE)
def test_which_scale_repairs_which_blindness(case, gap, dtype, expected):
    net, items = saturated_attention(case, gap).to(dtype), items_in(dtype)
    with attack_mode(net):
        report = ScaledAttack(net=net, inner=PGD, scales=SCALES, surrogate="network").examine(
            net, items
        )
        gradient = input_gradient(net, items.x, items.y).gradient
    accuracy = [network.original_correct.double().mean() for network in report.paper_protocol]
    assert tuple(accuracy) == expected
    assert (report.result.adversarial_prediction == 1).all()  # some candidate breaks every row
    # the direct path of C always has a gradient, a misleading one
    blind = case != "C" and expected[0] == 1
    assert is_zero(gradient).tolist() == [blind] * len(items)


@pytest.mark.parametrize(("case", "gap", "expected"), [row[:2] + row[3:] for row in TABLE[3:12:4]])
def test_a_lent_gradient_sees_what_the_scaled_network_sees(case, gap, expected):
    net, items = saturated_attention(case, gap, fused=True), items_in(F32)
    attack = ScaledAttack(net=net, inner=PGD, scales=SCALES, surrogate="gradient")
    with attack_mode(net):
        report = attack.examine(net, items)
    accuracy = [network.original_correct.double().mean() for network in report.paper_protocol]
    assert tuple(accuracy) == expected


def test_plain_pgd_is_blind_and_says_so_where_found_scales_break_every_item():
    net, items = saturated_attention("A", 50, fused=True), items_in(F32, 6)
    with attention_gaps(net) as gaps, torch.no_grad():
        assert (net(items.x).argmax(dim=1) == 0).all()
    assert gaps["blocks.0.attn"].largest == pytest.approx(50, rel=1e-3)
    with attack_mode(net):
        plain = PGD(net, items)
        found = ScaleSearch(num_draws=6)(net, net, items)
        result = ScaledAttack(net=net, inner=PGD, scales=found, surrogate="network")(net, items)
    assert (plain.adversarial_prediction == 0).all()
    assert (plain.num_gradients == 40).all()
    assert torch.equal(plain.num_zero_gradients, plain.num_gradients)
    with torch.no_grad():
        assert (net(result.x_adv).argmax(dim=1) == 1).all()  # the original, nothing attached
    assert (result.x_adv - items.x).abs().max() <= EPS
    assert (result.num_zero_gradients >= 40).all()  # the alarm of the first candidate is kept
