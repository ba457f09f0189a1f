"""FAB against exact projections and exact distances, and its promises per item."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import nn

from components.attacks.fab import Fab, FabTargeted, box_steps
from components.attacks.gradient import in_fixed_batches
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.core.errors import CasemateError
from components.core.settings import SettingError

SHAPE = (1, 4, 4)  # 16 pixels: products of odd widths round by position in the batch
IDS = tuple(f"item-{i}" for i in range(6))
NORMS = ["linf", "l2"]
ATTACKS = [
    kind(norm=norm, eps=eps, num_steps=4, num_restarts=2)
    for kind in (Fab, FabTargeted)
    for norm, eps in (("linf", 0.08), ("l2", 0.2))
]


def network(seed, *, num_classes=4):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, num_classes)]
        model = nn.Sequential(*layers).eval().requires_grad_(False)
        model[1].weight *= 4
        return model


def problem(seed, *, run_seed=0):
    """Six items, the first of them wrong from the beginning."""
    model = network(seed)
    x = torch.rand(6, *SHAPE, generator=torch.Generator().manual_seed(seed))
    y = model(x).argmax(dim=1)
    y[0] = (y[0] + 1) % 4
    return model, Items(x, y, IDS, run_seed)


# ---- the projection -----------------------------------------------------------------------------


@st.composite
def planes(draw, *, size):
    unit = st.floats(0, 1, width=32)
    x = draw(st.lists(st.one_of(unit, st.sampled_from([0.0, 1.0])), min_size=size, max_size=size))
    weight = st.one_of(st.floats(-3, 3, width=32), st.just(0.0))
    w = draw(st.lists(weight, min_size=size, max_size=size))
    return np.array(x), np.array(w), draw(st.floats(-4, 4))


def reach(x, w, gap):
    """The largest share of `gap` that the range allows."""
    room = np.where(w * np.sign(gap) > 0, 1 - x, x)
    return float(np.sum(np.abs(w) * room))


def step(x, w, gap, norm):
    image, normal = (torch.tensor(v, dtype=torch.float64)[None, None, None] for v in (x, w))
    gaps = torch.tensor([gap], dtype=torch.float64)
    return box_steps(image, normal=normal, gap=gaps, norm=norm).flatten().numpy()


@settings(max_examples=60, deadline=None)
@given(planes(size=6))
def test_linf_projection_is_the_linear_programme_s(case):
    x, w, gap = case
    delta = step(x, w, gap, "linf")
    assert (x + delta >= -1e-12).all()
    assert (x + delta <= 1 + 1e-12).all()
    if abs(gap) > reach(x, w, gap) - 1e-6:
        assert abs(w @ delta) == pytest.approx(reach(x, w, gap), abs=1e-6)
        return
    assert w @ delta == pytest.approx(gap, abs=1e-9)
    # minimise t over (delta, t) with -t <= delta_i <= t
    size = len(x)
    rows = np.block([[np.eye(size), -np.ones((size, 1))], [-np.eye(size), -np.ones((size, 1))]])
    bounds = [(-value, 1 - value) for value in x] + [(0, None)]
    cost, equal = np.r_[np.zeros(size), 1], np.r_[w, 0][None]
    best = linprog(cost, A_ub=rows, b_ub=np.zeros(2 * size), A_eq=equal, b_eq=gap, bounds=bounds)
    assert np.abs(delta).max() == pytest.approx(best.fun, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(planes(size=4))
def test_l2_projection_is_the_shortest_over_all_active_sets(case):
    x, w, gap = case
    delta = step(x, w, gap, "l2")
    if abs(gap) > reach(x, w, gap) - 1e-6:
        assert abs(w @ delta) == pytest.approx(reach(x, w, gap), abs=1e-6)
        return
    assert w @ delta == pytest.approx(gap, abs=1e-9)
    assert (x + delta >= -1e-12).all()
    assert (x + delta <= 1 + 1e-12).all()
    shortest = np.inf
    for ends in product([0.0, 1.0, None], repeat=len(x)):  # every pixel: at an end, or free
        free = np.array([end is None for end in ends])
        fixed = np.array(
            [0.0 if end is None else end - value for end, value in zip(ends, x, strict=True)]
        )
        rest, power = gap - w @ fixed, float((w[free] ** 2).sum())
        if power < 1e-12 and abs(rest) > 1e-9:
            continue
        candidate = fixed + np.where(free, w * (rest / power if power >= 1e-12 else 0.0), 0.0)
        if (x + candidate >= -1e-9).all() and (x + candidate <= 1 + 1e-9).all():
            shortest = min(shortest, float(np.linalg.norm(candidate)))
    assert np.linalg.norm(delta) == pytest.approx(shortest, abs=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_tiny_gradients_still_give_the_exact_step(norm):
    """Squares of 1e-30 vanish in float32; the projection may not depend on the logits' scale."""
    x, w = np.full(4, 0.5), np.array([1.0, -2.0, 0.5, 0.0])
    np.testing.assert_allclose(
        step(x, 1e-30 * w, 1e-30 * 0.4, norm), step(x, w, 0.4, norm), rtol=1e-9
    )
    assert (step(x, 0 * w, 0.4, norm) == 0).all()


# ---- the attack ---------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", [Fab, FabTargeted])
def test_a_linear_boundary_is_found_at_its_exact_distance(kind, norm):
    """|d| / ||w||_1 in l-inf, |d| / ||w||_2 in l2, while no pixel meets the range; within 2 %."""
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(16, generator=generator)
    x = 0.4 + 0.2 * torch.rand(6, *SHAPE, generator=generator)
    d = (x.flatten(1) - 0.5) @ w

    def logits_of(z):
        lead = (z.flatten(1) - 0.5) @ w
        return torch.stack([lead, -lead], dim=1)

    y = (d < 0).long()
    exact = d.abs() / (w.abs().sum() if norm == "linf" else w.norm())
    for row in range(6):
        items = Items(x[row : row + 1], y[row : row + 1], IDS[row : row + 1], 0)
        for factor, stands in ((0.999, True), (1.02, False)):
            attack = kind(norm=norm, eps=factor * float(exact[row]), num_steps=30)
            result = attack(logits_of, items)
            assert bool(result.adversarial_prediction == items.y) is stands


@pytest.mark.parametrize("attack", ATTACKS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_promises_hold_for_every_row(attack, seed):
    model, items = problem(seed)
    kept = items.x.clone()
    with attack_mode(model):
        result = attack(model, items)
    assert torch.equal(items.x, kept)
    assert result.x_adv.dtype == torch.float32
    assert 0 <= result.x_adv.min() <= result.x_adv.max() <= 1
    for delta in (result.x_adv - items.x, result.x_adv.double() - items.x.double()):
        size = delta.flatten(1)
        length = size.abs().amax(dim=1) if attack.norm == "linf" else size.norm(dim=1)
        assert (length.double() <= attack.eps).all()
    torch.testing.assert_close(model(result.x_adv).argmax(dim=1), result.adversarial_prediction)
    assert torch.equal(result.clean_prediction, model(items.x).argmax(dim=1))
    assert torch.equal(result.x_adv[0], items.x[0])
    assert result.num_evaluations[0] == 1
    assert result.num_gradients[0] == 0
    runs = attack.num_restarts * (3 if isinstance(attack, FabTargeted) else 1)
    per_step = 1 if isinstance(attack, FabTargeted) else 3
    standing = (result.adversarial_prediction == items.y) & (torch.arange(6) > 0)
    assert (result.num_gradients[standing] == runs * attack.num_steps * per_step).all()
    assert (result.num_evaluations <= 1 + runs * (2 * attack.num_steps + 1)).all()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("attack", ATTACKS)
def test_results_depend_on_the_item_and_not_on_its_batch(attack):
    model, items = problem(5)
    logits_of = in_fixed_batches(model, size=4)
    whole = attack(logits_of, items)
    for rows in torch.tensor([3, 0, 5, 1, 4, 2]).split(4):
        part = attack(logits_of, items.take(rows))
        for name in ("x_adv", "adversarial_prediction", "num_evaluations", "num_gradients"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows])


@pytest.mark.parametrize("kind", [Fab, FabTargeted])
def test_broken_rows_leave_and_rows_that_start_wrong_are_never_shown(kind):
    model, items = problem(8)
    seen = torch.zeros(6, dtype=torch.int64)

    def spy(z):
        nearest = (z.detach()[:, None] - items.x[None]).abs().amax(dim=(2, 3, 4)).argmin(dim=1)
        seen.scatter_add_(0, nearest, torch.ones_like(nearest))
        return model(z)

    result = kind(norm="linf", eps=0.05, num_steps=20)(spy, items)
    assert torch.equal(seen, result.num_evaluations)
    broken = result.adversarial_prediction != items.y
    assert broken[1:].any()
    assert not broken[1:].all()
    assert result.num_evaluations[1:][broken[1:]].max() < result.num_evaluations[~broken].min()


def test_untargeted_steps_go_to_the_nearest_boundary_and_targeted_ones_in_order_of_rank():
    """Class 1 is the likelier rival, class 2 the nearer one: its lead grows four times as fast."""
    weight = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 4.0]])
    bias = torch.tensor([0.0, -0.9, -2.6])

    def logits_of(z):
        return z.flatten(1) @ weight.T + bias

    # at x: class 1 has d = -0.4 at distance 0.4, class 2 has d = -0.6 at distance 0.15
    x, y = torch.full((1, 1, 1, 2), 0.5), torch.tensor([0])
    items = Items(x, y, ("only",), 0)
    untargeted = Fab(norm="linf", eps=0.16, num_steps=5)(logits_of, items)
    assert untargeted.adversarial_prediction.tolist() == [2]
    first = FabTargeted(norm="linf", eps=0.16, num_steps=5, num_targets=1)(logits_of, items)
    assert first.adversarial_prediction.tolist() == [0]
    second = FabTargeted(norm="linf", eps=0.16, num_steps=5, num_targets=2)(logits_of, items)
    assert second.adversarial_prediction.tolist() == [2]
    assert second.num_gradients > first.num_gradients


def test_blind_steps_are_counted_and_restarts_do_not_repeat_the_first_run():
    flat = FabTargeted(norm="l2", eps=0.3, num_steps=3, num_restarts=2)
    x = torch.full((1, *SHAPE), 0.5)
    starts = []

    def logits_of(z):
        starts.append(z.detach().clone())
        level = z.flatten(1).sum(dim=1, keepdim=True)
        return torch.cat([1 + 0 * level, 0 * level], dim=1)

    result = flat(logits_of, Items(x, torch.tensor([0]), ("a",), 0))
    assert result.num_gradients.tolist() == [6]
    assert result.num_zero_gradients.tolist() == [6]
    reach = [(start - x).norm().item() for start in starts]
    assert reach[1] == 0  # the first run starts at the image
    assert max(reach) == pytest.approx(0.15, rel=1e-5)  # the second half a budget away


@pytest.mark.parametrize("attack", ATTACKS)
def test_zero_budget_is_an_exact_no_op(attack):
    model, items = problem(2)
    result = type(attack)(norm=attack.norm, eps=0.0)(model, items)
    assert torch.equal(result.x_adv, items.x)
    assert result.num_evaluations.tolist() == [1] * 6


def test_bad_input_is_named():
    model, items = problem(1)

    def broken(z):
        return torch.where(z[:, :1, 0, 0] == items.x[4, 0, 0, 0], float("nan"), model(z))

    with pytest.raises(CasemateError, match="item-4"):
        Fab(norm="linf", eps=0.1)(broken, items)
    with pytest.raises(SettingError, match=r"eps: 8.0"):
        FabTargeted(norm="linf", eps=8.0)
    with pytest.raises(SettingError, match=r"num_targets: 0"):
        FabTargeted(norm="linf", eps=0.1, num_targets=0)
