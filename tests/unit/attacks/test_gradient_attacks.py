"""What FGSM, PGD, momentum and GAMA promise for every row, on models small enough to know."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from components.attacks.gradient import (
    START_OFFSET,
    Fgsm,
    GamaPgd,
    Mim,
    Pgd,
    guidance,
    in_fixed_batches,
    sign_ascent,
)
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.losses import cross_entropy, kl_divergence, margin
from components.attacks.starts import random_starts
from components.core.errors import CasemateError
from components.core.settings import SettingError
from tests.unit.attacks.problems import random_problem

SHAPE = (1, 3, 3)
FAMILY = [
    lambda **budget: Fgsm(**budget, num_steps=2),
    lambda **budget: Fgsm(**budget, random_start=False),
    lambda **budget: Pgd(**budget, num_steps=4, num_restarts=2),
    lambda **budget: Pgd(**budget, num_steps=3, loss="margin", kappa=1.0),
    lambda **budget: Pgd(**budget, num_steps=3, loss="dlr", random_start=False),
    lambda **budget: Pgd(**budget, num_steps=3, loss="kl"),
    lambda **budget: Mim(**budget, num_steps=4, random_start=True),
    lambda **budget: GamaPgd(**budget, num_steps=8, num_restarts=2),
    lambda **budget: GamaPgd(**budget, num_steps=5, reference="clean"),
]
attacks = pytest.mark.parametrize("make", FAMILY, ids=lambda make: make(norm="linf", eps=0.1).name)
norms = pytest.mark.parametrize("norm", ["linf", "l2"])


def row_wise(weight):
    """A network whose rows are summed one by one: bit-equal whatever shares the batch."""

    def logits_of(x):
        rows = [(row[None] * weight).flatten(1).sum(1) for row in x]
        return torch.stack(rows).tanh() * 3 if rows else x.new_zeros(0, len(weight))

    return logits_of


def problem(seed, *, num_items=6, num_classes=4, **options):
    logits_of, x, y = random_problem(
        seed, row_wise, shape=SHAPE, num_items=num_items, num_classes=num_classes, **options
    )
    ids = tuple(f"item-{i}" for i in range(num_items))
    return logits_of, Items(x, y, ids, run_seed=seed % 7)


def assert_same(part, whole):
    for field in ("x_adv", "adversarial_prediction", "num_evaluations", "num_gradients"):
        assert torch.equal(getattr(part, field), whole[field])


def fields_of(result, rows=slice(None)):
    names = ("x_adv", "adversarial_prediction", "num_evaluations", "num_gradients")
    return {name: getattr(result, name)[rows] for name in names}


@norms
@attacks
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), eps=st.floats(0.001, 0.6))
def test_promises_hold_for_every_row(make, norm, seed, eps):
    logits_of, items = problem(seed)
    kept, attack = items.x.clone(), make(norm=norm, eps=eps)
    result = attack(logits_of, items)
    assert torch.equal(items.x, kept)
    assert result.x_adv.dtype == torch.float32
    assert 0 <= result.x_adv.min() <= result.x_adv.max() <= 1
    for delta in (result.x_adv - kept, result.x_adv.double() - kept.double()):
        size = delta.flatten(1)
        reach = size.abs().amax(dim=1) if norm == "linf" else size.norm(dim=1)
        assert (reach.double() <= eps).all()
    assert torch.equal(result.clean_prediction, logits_of(kept).argmax(dim=1))
    assert torch.equal(result.adversarial_prediction, logits_of(result.x_adv).argmax(dim=1))
    # wrong from the beginning: untouched, one evaluation, no gradient
    assert torch.equal(result.x_adv[0], kept[0])
    assert (result.num_evaluations[0], result.num_gradients[0]) == (1, 0)
    # who stands paid for every step of every restart: each has one forward pass more than gradients
    stands = result.adversarial_prediction == items.y
    restarts = getattr(attack, "num_restarts", 1)
    assert (result.num_gradients[stands] == restarts * attack.num_steps).all()
    assert (result.num_evaluations[stands] == 1 + restarts * (attack.num_steps + 1)).all()
    assert_same(attack(logits_of, items), fields_of(result))


@norms
@attacks
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**31), order=st.permutations(range(6)), size=st.integers(1, 5))
def test_a_row_does_not_notice_its_batch(make, norm, seed, order, size):
    logits_of, items = problem(seed)
    attack = make(norm=norm, eps=0.15)
    whole = attack(logits_of, items)
    for rows in torch.tensor(order).split(size):
        assert_same(attack(logits_of, items.take(rows)), fields_of(whole, rows))


@norms
@attacks
def test_zero_budget_returns_x_and_asks_once(make, norm):
    logits_of, items = problem(1)
    result = make(norm=norm, eps=0.0)(logits_of, items)
    assert torch.equal(result.x_adv, items.x)
    assert torch.equal(result.adversarial_prediction, result.clean_prediction)
    assert result.num_evaluations.tolist() == [1] * 6
    assert result.num_gradients.tolist() == [0] * 6


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 4)
    )


@attacks
def test_the_model_comes_back_as_it_went_in(make):
    model = network().train()
    model[0].bias.requires_grad_(False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.rand(5, *SHAPE)
    with attack_mode(model):
        items = Items(x, model(x).argmax(dim=1), tuple("abcde"), 0)
        make(norm="linf", eps=0.2)(model, items)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    flags = [parameter.requires_grad for parameter in model.parameters()]
    assert flags == [True, False, True, True, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())


@attacks
def test_matrix_products_give_the_same_bits_behind_fixed_batches(make):
    model = network().eval()
    x = torch.rand(17, *SHAPE)
    items = Items(x, model(x).argmax(dim=1), tuple(map(str, range(17))), 0)
    shapes = []

    def spy(z):
        shapes.append(len(z))
        return model(z)

    logits_of, attack = in_fixed_batches(spy, size=4), make(norm="linf", eps=0.1)
    whole = attack(logits_of, items)
    for rows in torch.randperm(17, generator=torch.Generator().manual_seed(1)).split(5):
        assert_same(attack(logits_of, items.take(rows)), fields_of(whole, rows))
    assert set(shapes) == {4}


@attacks
def test_only_standing_rows_are_computed(make):
    """Forward passes seen by the model are those that the result admits, row by row."""
    logits_of, items = problem(5, num_items=30)
    seen = []

    def spy(z):
        seen.append(len(z))
        return logits_of(z)

    attack = make(norm="linf", eps=0.2)
    result = attack(spy, items)
    assert sum(seen) == int(result.num_evaluations.sum())
    broken = (result.adversarial_prediction != items.y) & (result.clean_prediction == items.y)
    assert (result.num_gradients[broken] <= attack.num_steps).any()
    if attack.num_steps > 1:
        assert (result.num_gradients[broken] < attack.num_steps).any()


@attacks
def test_soft_targets_are_attacked_as_their_largest_share(make):
    logits_of, items = problem(2)
    soft = 0.7 * nn.functional.one_hot(items.y, 4) + 0.3 * nn.functional.one_hot(
        (items.y + 1) % 4, 4
    )
    mixed = Items(items.x, soft, items.item_ids, items.run_seed)
    attack = make(norm="linf", eps=0.1)
    assert_same(attack(logits_of, mixed), fields_of(attack(logits_of, items)))


@attacks
def test_a_point_without_finite_logits_is_named(make):
    _, items = problem(3)

    def poisoned(x):
        logits = row_wise(torch.eye(9).view(9, *SHAPE)[:4])(x)
        moved = (x[:, None] - items.x[None]).abs().flatten(2).amax(dim=2).amin(dim=1) > 0
        return logits + torch.where(moved, math.nan, 0.0)[:, None]

    y = poisoned(items.x).argmax(dim=1)
    right = Items(items.x[2:], y[2:], items.item_ids[2:], 0)
    with pytest.raises(CasemateError, match="model: item 'item-2' gets logits"):
        make(norm="linf", eps=0.1)(poisoned, right)


@pytest.mark.parametrize(
    "make",
    [
        lambda **b: Fgsm(**b, step_size=2 * b["eps"]),
        lambda **b: Fgsm(**b, random_start=False),
        lambda **b: Pgd(**b, num_steps=9),
        lambda **b: Pgd(**b, num_steps=9, loss="margin"),
        lambda **b: Mim(**b),
        lambda **b: GamaPgd(**b, num_steps=20),
    ],
    ids=["fgsm", "fgsm-fixed", "ce", "margin", "mim", "gama"],
)  # not KL: from some starts it rises by moving deeper into the own class
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), eps=st.floats(0.01, 0.24))
def test_linf_attacks_reach_the_exact_worst_case_of_a_linear_model(make, seed, eps):
    """Two classes, pixels away from the edges: breakable iff z_y - z_j < eps * |w_y - w_j|_1."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(2, *SHAPE, generator=generator)
    weight -= weight.mean(dim=(1, 2, 3), keepdim=True)
    x = 0.25 + 0.5 * torch.rand(12, *SHAPE, generator=generator)

    def linear(z):
        return z.flatten(1) @ weight.flatten(1).T

    items = Items(x, linear(x).argmax(dim=1), tuple(map(str, range(12))), 0)
    result = make(norm="linf", eps=eps)(linear, items)
    slack = margin(linear(x), items.y) + eps * (weight[0] - weight[1]).abs().sum()
    clear = slack.abs() > 1e-5  # float32 rounding of sums of 9 products
    broken = result.adversarial_prediction != items.y
    assert torch.equal(broken[clear], (slack > 0)[clear])


def test_momentum_follows_its_recursion():
    """Against the update written out, on a smooth network that no point of the path breaks."""
    model = network().eval().double()
    x = (0.3 + 0.4 * torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(2))).double()
    y = model(x).argmax(dim=1)
    attack = Mim(norm="linf", eps=1e-3, num_steps=5, step_size=2.5e-4, decay=0.5)
    result = attack(model, Items(x, y, ("a", "b", "c"), 0))
    z, m, visited = x.clone(), torch.zeros_like(x), []
    for _ in range(5):
        leaf = z.clone().requires_grad_()
        (g,) = torch.autograd.grad(cross_entropy(model(leaf), y).sum(), leaf)
        m = 0.5 * m + g / g.abs().mean(dim=(1, 2, 3), keepdim=True)
        z = torch.clamp(z + 2.5e-4 * m.sign(), min=x - 1e-3, max=x + 1e-3)
        visited.append(z)
    losses = torch.stack([cross_entropy(model(point), y) for point in visited])
    best = torch.stack(visited)[losses.argmax(dim=0), torch.arange(3)]
    torch.testing.assert_close(result.x_adv, best, rtol=0, atol=1e-9)


def test_guidance_falls_to_zero_in_a_quarter_of_the_steps():
    values = [guidance(step, num_steps=100) for step in (0, 5, 24, 25, 99)]
    assert values == pytest.approx([50, 40, 2, 0, 0])


def watched(logits_of, points):
    """`logits_of` that keeps every point it was asked about."""

    def watching(z):
        points.append(z.detach().clone())
        return logits_of(z)

    return watching


def test_gama_divides_its_steps_by_ten_after_60_and_85_percent():
    """A loss that peaks at the image makes every step turn round, so its length can be seen."""

    def peak(z):
        height = -100 * (z.flatten(1).mean(dim=1) - 0.5).square()
        return torch.stack([3 + 0 * height, height, 0 * height, 0 * height], dim=1)

    points = []
    items = Items(torch.full((1, *SHAPE), 0.5), torch.tensor([0]), ("a",), 0)
    GamaPgd(norm="linf", eps=0.2, num_steps=20)(watched(peak, points), items)
    clean, start, *iterates = points
    torch.testing.assert_close((start - clean).abs(), torch.full_like(clean, 0.2))
    path = [start, *iterates]
    lengths = [(path[t + 1] - path[t]).abs().max().item() for t in range(20)]
    assert lengths[6:12] == pytest.approx([0.4] * 6, rel=1e-4)
    assert lengths[12:17] == pytest.approx([0.04] * 5, rel=1e-4)
    assert lengths[17:] == pytest.approx([0.004] * 3, rel=1e-3)


@pytest.mark.parametrize("reference", ["start", "clean"])
def test_the_first_gama_step_is_guided_from_its_reference(reference):
    """A step of 2 eps ends in the corner that the gradient of the written-out loss points to."""
    model, points = network().eval(), []
    x = 0.3 + 0.4 * torch.rand(8, *SHAPE, generator=torch.Generator().manual_seed(5))
    y = model(x).argmax(dim=1)
    items = Items(x, y, tuple("abcdefgh"), 0)
    GamaPgd(norm="linf", eps=0.01, num_steps=4, reference=reference)(watched(model, points), items)
    assert len(points[2]) == 8  # nothing broke at the start
    leaf = points[1].clone().requires_grad_()
    q = model(leaf).softmax(dim=1)
    q_ref = (q if reference == "start" else model(x).softmax(dim=1)).detach()
    loss = margin(q, y) + 50 * (q - q_ref).square().sum(dim=1)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(points[2], x + 0.01 * gradient.sign(), rtol=0, atol=1e-6)


def test_restarts_only_add():
    """The first start is the same with and without restarts, so no broken row comes back."""
    logits_of, items = problem(11, num_items=60)
    budget = {"norm": "linf", "eps": 0.06, "num_steps": 2}
    once = Pgd(**budget)(logits_of, items)
    often = Pgd(**budget, num_restarts=5)(logits_of, items)
    fell_at_once = once.adversarial_prediction != items.y
    assert torch.equal(often.x_adv[fell_at_once], once.x_adv[fell_at_once])
    assert (often.adversarial_prediction != items.y)[fell_at_once].all()


def test_fgsm_evaluates_the_point_that_training_uses():
    logits_of, items = problem(4, num_items=20)
    starts = random_starts(items.item_ids, SHAPE, run_seed=items.run_seed, stream="fgsm")
    budget = {"eps": 0.01, "num_steps": 2, "step_size": 0.0075}
    start = items.x + 0.01 * starts + START_OFFSET
    trained_on = sign_ascent(logits_of, items.x, items.y, start=start, **budget)
    result = Fgsm(norm="linf", eps=0.01, num_steps=2)(logits_of, items)
    stands = result.adversarial_prediction == items.y
    higher = cross_entropy(logits_of(result.x_adv), items.y)
    assert (higher >= cross_entropy(logits_of(trained_on), items.y))[stands].all()
    same = (result.x_adv == trained_on).flatten(1).all(dim=1)
    assert same[stands].float().mean() > 0.8  # elsewhere the start or first step was higher


def test_the_divergence_attack_leaves_the_clean_probabilities():
    logits_of, items = problem(8, num_items=20)
    result = Pgd(norm="linf", eps=0.1, loss="kl", num_steps=6)(logits_of, items)
    reference = logits_of(items.x).softmax(dim=1)
    right = result.clean_prediction == items.y
    assert (kl_divergence(logits_of(result.x_adv), reference)[right] > 1e-4).all()


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Pgd(norm="linf", eps=8), "eps: 8.0 is above 1"),
        (lambda: Pgd(norm="linf", eps=0.1, loss="cw"), r"loss: cw is unknown; .*margin"),
        (lambda: Pgd(norm="linf", eps=0.1, kappa=1.0), "kappa: 1.0 would be ignored"),
        (lambda: Pgd(norm="l2", eps=0.1, loss="kl", random_start=False), "random_start"),
        (lambda: Pgd(norm="l2", eps=1, num_restarts=2, random_start=False), "num_restarts: 2"),
        (lambda: Fgsm(norm="linf", eps=0.1, num_steps=0), "num_steps: 0"),
        (lambda: Mim(norm="linf", eps=0.1, decay=-1.0), "decay: -1.0"),
        (lambda: GamaPgd(norm="linf", eps=0.1, reference="end"), "reference: end is unknown"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(make, line):
    with pytest.raises(SettingError, match=line):
        make()


def test_too_few_classes_for_dlr_name_the_number():
    items = Items(torch.rand(2, *SHAPE), torch.tensor([0, 0]), ("a", "b"), 0)
    two = row_wise(torch.zeros(2, *SHAPE))
    with pytest.raises(CasemateError, match="dlr: 2 classes are too few"):
        Pgd(norm="linf", eps=0.1, loss="dlr")(two, items)


def test_blind_steps_are_counted():
    """Behind a dead unit the gradient vanishes; survival there proves nothing, the count tells."""

    def half_dead(z):
        total = z.flatten(1).sum(dim=1)
        return torch.stack([5 - torch.relu(total - 7), torch.zeros_like(total)], dim=1)

    x = torch.stack([torch.full(SHAPE, 0.5), torch.full(SHAPE, 1.0)])
    items = Items(x, torch.zeros(2, dtype=torch.int64), ("dead", "alive"), 0)
    result = Pgd(norm="linf", eps=0.01, num_steps=3)(half_dead, items)
    assert result.num_zero_gradients.tolist() == [3, 0]
    assert result.num_gradients.tolist() == [3, 3]
    assert (result.num_zero_gradients > 0).tolist() == [True, False]
