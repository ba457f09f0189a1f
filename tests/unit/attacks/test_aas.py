"""Attacks through a scaled network: judged by the original one, and never weaker than without."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from timm.models.cait import Cait
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn

from components.attacks.aas import ScaledAttack, candidate_seed, scaled_logits
from components.attacks.bpda import with_gradient_of
from components.attacks.gradient import Fgsm, GamaPgd, Mim, Pgd, in_fixed_batches
from components.attacks.gradients import attack_mode, input_gradient
from components.attacks.interface import Attack, AttackResult, Items
from components.attacks.losses import cross_entropy
from components.attacks.scales import global_scales
from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.models.attention.discover import attention_of
from components.models.pixels import PixelModel
from tests.unit.networks import SMALL_SPEC, scattered

SHAPE = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
NETS = {
    "vit": lambda: VisionTransformer(**SHAPE, num_classes=5),
    "xcit": lambda: Xcit(**{**SHAPE, "patch_size": 8}, num_classes=5),
    "cait": lambda: Cait(**SHAPE, init_values=1.0, num_classes=5),
    "swin": lambda: SwinTransformer(
        img_size=16,
        patch_size=2,
        embed_dim=8,
        depths=(2,),
        num_heads=(2,),
        window_size=4,
        num_classes=5,
    ),
}
EPS = 0.02
PGD = Pgd(norm="linf", eps=EPS, num_steps=3)
SURROGATES = ("network", "gradient")


def make_net(name: str = "vit") -> nn.Module:
    """An untrained network with weights so large that scales matter, and classes that compete."""
    net = scattered(NETS[name], by=0.8)
    with torch.no_grad():
        net.get_classifier().bias -= net(make_images(100)).mean(dim=0)
    return net


def make_images(num_items: int) -> Tensor:
    return torch.rand(num_items, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def make_items(net: nn.Module, num_items: int = 12) -> Items:
    """Labels are the network's own answers, but for the first row: wrong from the start."""
    x = make_images(num_items)
    with torch.no_grad():
        y = net(x).argmax(dim=1)
    y[0] = (y[0] + 1) % 5
    return Items(x, y, tuple(f"item-{i}" for i in range(num_items)), run_seed=3)


def candidates(net: nn.Module) -> tuple[tuple[float, ...], ...]:
    uneven = torch.linspace(0.3, 0.9, len(attention_of(net))).tolist()
    return global_scales(net, 0.5), tuple(uneven)


def stands(result: AttackResult, items: Items) -> Tensor:
    return result.adversarial_prediction == items.y


def assert_equal(one: AttackResult, other: AttackResult) -> None:
    for field in AttackResult.__dataclass_fields__:
        assert torch.equal(getattr(one, field), getattr(other, field)), field


class Counting:
    """A model that counts the rows it has seen."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.num_rows = net, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.num_rows += len(x)
        return self.net(x)


@dataclass(frozen=True)
class Spy:
    """Passes calls on to another attack and remembers who was attacked."""

    attack: Attack
    seen: list[tuple[str, ...]]
    name, norm, eps = "spy", "linf", EPS

    def __call__(self, logits_of, items):
        self.seen.append(items.item_ids)
        return self.attack(logits_of, items)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("family", NETS)
def test_every_family_is_judged_by_the_original_network(family, surrogate):
    net = make_net(family)
    items, kept = make_items(net, 8), copy.deepcopy(net)
    attack = ScaledAttack(net=net, inner=PGD, scales=candidates(net), surrogate=surrogate)
    logits_of = in_fixed_batches(net, size=8)  # bit-equal points need bit-equal logits
    with attack_mode(net):
        base = PGD(logits_of, items)
        result = attack(logits_of, items)
        report = attack.examine(logits_of, items)
    with torch.no_grad():
        assert torch.equal(result.adversarial_prediction, kept(result.x_adv).argmax(dim=1))
    assert not (stands(result, items) & ~stands(base, items)).any()
    assert (result.x_adv - items.x).abs().max() <= EPS
    assert torch.equal(result.x_adv[0], items.x[0])  # wrong from the start
    assert result.num_evaluations[0] == 1
    # all candidates on all rows come to the same headline, by the same points
    assert torch.equal(report.result.x_adv, result.x_adv)
    assert torch.equal(report.result.adversarial_prediction, result.adversarial_prediction)
    every = torch.stack([network.original_correct for network in report.paper_protocol])
    assert torch.equal(every.all(dim=0), stands(result, items))
    # the network is as it was
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), kept.parameters(), strict=True))
    for module in net.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    with torch.no_grad():
        assert torch.equal(net(items.x), kept(items.x))


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_scaling_helps_where_the_inner_attack_alone_fails(surrogate):
    """Some row falls to a candidate only: the worst case is more than its first member."""
    net = make_net("xcit")
    items = make_items(net, 60)
    with attack_mode(net):
        attack = ScaledAttack(net=net, inner=PGD, scales=candidates(net), surrogate=surrogate)
        base, result = PGD(net, items), attack(net, items)
    assert stands(result, items).sum() < stands(base, items).sum()
    assert stands(result, items).any()


def test_paper_protocol_is_what_the_scaled_networks_answer():
    """Oracle: the same factors folded into timm's own `scale` on the explicit path."""
    net = make_net()
    items, scales = make_items(net), candidates(net)[1]
    with attack_mode(net):
        report = ScaledAttack(net=net, inner=PGD, scales=(scales,), surrogate="network").examine(
            net, items
        )
    twin = copy.deepcopy(net)
    for site, scale in zip(attention_of(twin), scales, strict=True):
        site.module.scale *= scale
        site.module.fused_attn = False
    with attack_mode(twin):
        own = PGD(twin, replace(items, run_seed=candidate_seed(items.run_seed, 1)))
    plain, scaled = report.paper_protocol
    assert plain.scales == (1.0, 1.0)
    assert torch.equal(plain.scaled_correct, plain.original_correct)
    assert torch.equal(scaled.scaled_clean_correct, own.clean_prediction == items.y)
    assert torch.equal(scaled.scaled_correct, own.adversarial_prediction == items.y)
    with torch.no_grad():
        clean, replayed = (net(x).argmax(dim=1) == items.y for x in (items.x, own.x_adv))
    assert torch.equal(scaled.original_correct, clean & replayed)
    assert not torch.equal(scaled.scaled_correct, scaled.original_correct)


@pytest.mark.parametrize("inner", [PGD, Fgsm(norm="l2", eps=0.5), Mim(norm="linf", eps=EPS)])
def test_without_scales_it_is_the_inner_attack_bit_for_bit(inner):
    net = make_net()
    items = make_items(net)
    with attack_mode(net):
        expected = inner(net, items)
        assert_equal(
            ScaledAttack(net=net, inner=inner, scales=(), surrogate="network")(net, items), expected
        )
        ones = scaled_logits(net, net, global_scales(net, 1.0))
        assert_equal(inner(ones, items), expected)
        assert_equal(inner(with_gradient_of(ones, forward=net), items), expected)


def test_any_gradient_attack_can_be_inside():
    net = make_net()
    items = make_items(net, 4)
    inners = [Mim(norm="linf", eps=EPS), GamaPgd(norm="linf", eps=EPS, num_steps=4)]
    with attack_mode(net):
        for inner in inners:
            attack = ScaledAttack(net=net, inner=inner, scales=candidates(net), surrogate="network")
            assert not (stands(attack(net, items), items) & ~stands(inner(net, items), items)).any()
            assert attack.name == f"aas-{inner.name}"
            assert (attack.norm, attack.eps) == ("linf", EPS)


def test_the_control_is_as_many_runs_of_the_inner_attack_from_the_same_starts():
    net = make_net()
    items = make_items(net)
    attack = ScaledAttack(net=net, inner=PGD, scales=candidates(net), surrogate="network")
    with attack_mode(net):
        control = attack.restarts()(net, items)
        runs = [
            PGD(net, replace(items, run_seed=candidate_seed(items.run_seed, index)))
            for index in range(3)
        ]
    union = torch.stack([stands(run, items) for run in runs]).all(dim=0)
    assert torch.equal(stands(control, items), union)
    assert attack.restarts().name == "restarts-pgd-3-ce"
    starts = [run.x_adv for run in runs]
    assert not torch.equal(starts[0], starts[1])


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_broken_rows_cost_nothing_more_and_every_pass_is_counted(surrogate):
    net = make_net()
    items, spy = make_items(net), Spy(PGD, [])
    attack = ScaledAttack(net=net, inner=spy, scales=candidates(net), surrogate=surrogate)
    counting = Counting(net)
    with attack_mode(net):
        base = PGD(net, items)
        result = attack(counting, items)
    standing = tuple(items.item_ids[row] for row in stands(base, items).nonzero().squeeze(1))
    assert spy.seen[0] == items.item_ids
    assert spy.seen[1] == standing
    assert set(spy.seen[2]) <= set(standing)
    assert int(result.num_evaluations.sum()) == counting.num_rows
    assert (result.num_gradients >= base.num_gradients).all()


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_results_depend_on_the_item_and_not_on_its_batch(surrogate):
    net = make_net()
    items = make_items(net)
    attack = ScaledAttack(net=net, inner=PGD, scales=candidates(net), surrogate=surrogate)
    logits_of = in_fixed_batches(net, size=4)
    with attack_mode(net):
        whole = attack(logits_of, items)
        for rows in torch.tensor([7, 3, 0, 11, 5, 1, 2, 10, 4, 8, 6, 9]).split(5):
            part = attack(logits_of, items.take(rows))
            expected = [getattr(whole, name)[rows] for name in AttackResult.__dataclass_fields__]
            assert_equal(part, AttackResult(*expected))


def test_a_lent_gradient_is_the_stand_ins_jacobian_at_the_judges_loss():
    net = make_net()
    items = make_items(net)
    scaled = scaled_logits(net, net, candidates(net)[1])
    with attack_mode(net):
        lent = input_gradient(with_gradient_of(scaled, forward=net), items.x, items.y)
        logits = net(items.x).requires_grad_()
        (slope,) = torch.autograd.grad(cross_entropy(logits, items.y).sum(), logits)
        leaf = items.x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(scaled(leaf), leaf, grad_outputs=slope)
    assert torch.equal(lent.logits, logits)
    torch.testing.assert_close(lent.gradient, expected)
    own = input_gradient(net, items.x, items.y).gradient
    assert not torch.allclose(lent.gradient, own, rtol=0.01)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_failing_attack_leaves_no_hook(surrogate):
    net = make_net()
    items = make_items(net)

    @dataclass(frozen=True)
    class Failing:
        name, norm, eps = "failing", "linf", EPS

        def __call__(self, logits_of, items):
            result = PGD(logits_of, items)
            if items.run_seed != 3:  # every candidate but the first
                raise RuntimeError("stop")
            return result

    attack = ScaledAttack(net=net, inner=Failing(), scales=candidates(net), surrogate=surrogate)
    with attack_mode(net), pytest.raises(RuntimeError, match="stop"):
        attack(net, items)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_pixel_model_is_attacked_through_its_network():
    torch.manual_seed(0)
    model = PixelModel(SMALL_SPEC).eval()
    items = make_items(model)
    attack = ScaledAttack(
        net=model.net, inner=PGD, scales=(global_scales(model.net, 0.1),), surrogate="network"
    )
    with attack_mode(model):
        scaled = scaled_logits(model, model.net, attack.scales[0])(items.x)
        assert not torch.allclose(scaled, model(items.x), atol=1e-6)
        result = attack(model, items)
        assert torch.equal(result.adversarial_prediction, model(result.x_adv).argmax(dim=1))


def test_mistakes_are_named():
    net = make_net()
    with pytest.raises(SettingError, match=r"scales: .* must be 2 factors"):
        ScaledAttack(net=net, inner=PGD, scales=((0.1,),), surrogate="network")
    with pytest.raises(SettingError, match=r"scales: .* must be above 0"):
        ScaledAttack(net=net, inner=PGD, scales=((0.1, 0.0),), surrogate="network")
    with pytest.raises(SettingError, match=r"surrogate: weights is unknown; .* network"):
        ScaledAttack(net=net, inner=PGD, scales=(), surrogate="weights")
    with pytest.raises(CasemateError, match=r"aas\.scale: -1"):
        global_scales(net, -1)
    with pytest.raises(CasemateError, match="gives no access"):
        global_scales(nn.Linear(2, 2), 0.1)
