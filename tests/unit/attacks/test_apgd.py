"""APGD against its algorithm written out row by row, and its promises per item."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from components.attacks.apgd import Apgd, ApgdTargeted, review_windows
from components.attacks.gradient import in_fixed_batches
from components.attacks.gradients import attack_mode, l2_direction
from components.attacks.interface import Items
from components.attacks.losses import cross_entropy, dlr, margin
from components.attacks.projections import project_l2, project_linf
from components.core.errors import CasemateError
from components.core.settings import SettingError

SHAPE = (1, 4, 4)  # matrix products of odd width round by a row's place in the batch
ATTACKS = [
    Apgd(norm="linf", eps=0.1, num_steps=12, num_restarts=2),
    Apgd(norm="l2", eps=0.3, num_steps=12, num_restarts=2),
    Apgd(norm="linf", eps=0.1, kind="apgd-dlr", num_steps=12, eot_iter=2),
    Apgd(norm="l2", eps=0.3, kind="apgd-dlr", num_steps=12),
    ApgdTargeted(norm="linf", eps=0.1, num_steps=12, num_targets=2),
    ApgdTargeted(norm="l2", eps=0.3, num_steps=12, num_targets=9),
]


def curved_model(seed, *, num_classes=4):
    """A random network with one bend per unit: losses go up and down along a path."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, num_classes)]
        model = nn.Sequential(*layers).requires_grad_(False)
        model[1].weight *= 6
        return model.eval()


def problem(seed, *, num_items=8, num_classes=4):
    """A network and items that it gets right, but for the first."""
    model = curved_model(seed, num_classes=num_classes)
    x = torch.rand(num_items, *SHAPE, generator=torch.Generator().manual_seed(seed))
    y = model(x).argmax(dim=1)
    y[0] = (y[0] + 1) % num_classes
    return model, Items(x, y, tuple(f"item-{i}" for i in range(num_items)), run_seed=seed)


class Spy:
    """Remembers every batch that the model was given."""

    def __init__(self, model):
        self.model, self.seen = model, []

    def __call__(self, x):
        self.seen.append(x.detach().clone())
        return self.model(x)


def reach(delta, norm):
    size = delta.double().flatten(1)
    return size.abs().amax(dim=1) if norm == "linf" else size.norm(dim=1)


def same(one, other):
    names = ("x_adv", "adversarial_prediction", "num_evaluations", "num_gradients")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


# --- the schedule -------------------------------------------------------------------------------


def test_published_schedule():
    assert review_windows(100) == {22: 22, 41: 19, 57: 16, 70: 13, 80: 10, 87: 7, 93: 6, 99: 6}
    assert review_windows(1) == {}


@given(st.integers(1, 2000))
def test_reviews_end_the_windows_of_the_published_formula(num_steps):
    lengths = [max(int(0.22 * num_steps), 1)]
    while sum(lengths) < num_steps:
        lengths.append(max(lengths[-1] - max(int(0.03 * num_steps), 1), int(0.06 * num_steps), 1))
    ends = np.cumsum(lengths).tolist()
    expected = {end: n for end, n in zip(ends, lengths, strict=True) if end < num_steps}
    assert review_windows(num_steps) == expected


# --- Algorithm 1, written out for one row -------------------------------------------------------


def loss_and_gradient(model, x, y):
    x = x[None].clone().requires_grad_()
    loss = cross_entropy(model(x), torch.tensor([y])).sum()
    return loss.item(), torch.autograd.grad(loss, x)[0][0]


def walk_one_row(model, x, y, start, *, eps, norm, num_steps, rho):
    """All points, all step sizes and the reasons of the halvings; no early end, no batch."""

    def project(z):
        onto = {"linf": project_linf, "l2": project_l2}[norm]
        return onto(z[None], center=x[None], eps=eps)[0]

    def climbed():
        unit = gradient.sign() if norm == "linf" else l2_direction(gradient[None])[0]
        return project(point + eta * unit)

    end = length = round(0.22 * num_steps)
    eta, point, before, halved, best_at_review = 2 * eps, start, start, True, None
    loss, gradient = loss_and_gradient(model, start, y)
    points, losses, etas, reasons = [start], [loss], [], {}
    best = (loss, start, gradient)
    for k in range(1, num_steps + 1):
        share = 1.0 if k == 1 else 0.75
        etas.append(eta)
        moved = point + share * (climbed() - point) + (1 - share) * (point - before)
        before, point = point, project(moved)
        loss, gradient = loss_and_gradient(model, point, y)
        points.append(point)
        losses.append(loss)
        if loss > best[0]:
            best = (loss, point, gradient)
        if k == end:
            rises = sum(losses[i] > losses[i - 1] for i in range(k - length + 1, k + 1))
            few, stuck = rises <= rho * length, not halved and best[0] == best_at_review
            best_at_review, halved = best[0], few or stuck
            if halved:
                eta /= 2
                _, point, gradient = best
                equal = "just too " * (rises == rho * length)
                reasons[k] = f"{equal}few rises" if few else "stuck"
            length = max(length - round(0.03 * num_steps), round(0.06 * num_steps))
            end += length
    return points, etas, reasons


@pytest.mark.parametrize(
    ("norm", "eps", "rho", "reason"),
    [
        ("linf", 0.1, 0.5, "just too few rises"),
        ("linf", 0.1, 0.1, "stuck"),
        ("l2", 0.15, 0.75, "few rises"),
        ("l2", 0.15, 0.1, "stuck"),
    ],
)
def test_every_row_walks_as_the_algorithm_says_while_others_leave(norm, eps, rho, reason):
    """Bit by bit: one row at a time goes through the model, so both round alike.

    A small rho leaves the halving to the second condition; a half can be met exactly.
    """
    model, items = problem(7, num_items=6)  # all stand but the first, and the paths are lively
    exits = {2: 30, 4: 60}  # row: the step that breaks it
    spy = Spy(breaking(in_fixed_batches(model, size=1), items, exits))
    result = Apgd(norm=norm, eps=eps, rho=rho)(spy, items)
    walks, reasons = walks_by_item(spy, result), []
    for row in range(1, len(items)):
        ours = torch.stack(walks[row])
        assert len(ours) == 1 + exits.get(row, 100)
        expected, etas, why = walk_one_row(
            model, items.x[row], int(items.y[row]), ours[0],
            eps=eps, norm=norm, num_steps=100, rho=rho,
        )  # fmt: skip
        assert torch.equal(ours, torch.stack(expected[: len(ours)]))
        changes = [k for k in range(1, 100) if etas[k] != etas[k - 1]]
        assert all(etas[k] == etas[k - 1] / 2 for k in changes)
        assert set(changes) <= {22, 41, 57, 70, 80, 87, 93, 99}
        reasons += [why[k] for k in why if k < len(ours)]
    assert reasons.count(reason) >= 2


def breaking(logits_of, items, exits):
    """`logits_of` that gives a row up at the step of `exits`, counted after the clean pass."""
    calls = []

    def broken_at_last(x):
        logits = logits_of(x)
        for row, step in exits.items():
            if len(calls) == 1 + step:
                place = (x - items.x[row]).abs().flatten(1).amax(dim=1).argmin()
                logits = logits.index_put((place, (items.y[row] + 1) % 4), torch.tensor(1e3))
        calls.append(len(x))
        return logits

    return broken_at_last


def walks_by_item(spy, result):
    """The points of each row: it took part while its count of evaluations says so."""
    walks = [[] for _ in result.num_evaluations]
    for k, seen in enumerate(spy.seen[1:], start=1):
        rows = (result.num_evaluations > k).nonzero().squeeze(1).tolist()
        for row, point in zip(rows, seen, strict=True):
            walks[row].append(point)
    return walks


# --- promises -----------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_promises_hold_for_every_row(attack, seed):
    model, items = problem(seed)
    kept, spy = items.x.clone(), Spy(model)
    result = attack(spy, items)
    assert torch.equal(items.x, kept)
    for seen in [*spy.seen, result.x_adv]:
        assert 0 <= seen.min() <= seen.max() <= 1
    assert (reach(result.x_adv - items.x, attack.norm) <= attack.eps).all()
    assert (reach(result.x_adv.double() - items.x.double(), attack.norm) <= attack.eps).all()
    assert torch.equal(result.clean_prediction, model(items.x).argmax(dim=1))
    assert torch.equal(result.adversarial_prediction, model(result.x_adv).argmax(dim=1))
    # wrong from the beginning: untouched, one evaluation
    assert torch.equal(result.x_adv[0], items.x[0])
    assert result.num_evaluations[0] == 1
    assert result.num_gradients[0] == 0
    # the account is what the model saw, so no broken row was ever computed again; targets that
    # run together may be shown more
    assert attack.kind == "apgd-t" or sum(map(len, spy.seen)) == result.num_evaluations.sum()
    assert sum(map(len, spy.seen)) >= result.num_evaluations.sum()
    # without a success: the point of highest loss, or of highest margin over all targets
    standing = result.adversarial_prediction == items.y
    loss = {"apgd-ce": cross_entropy, "apgd-dlr": dlr, "apgd-t": margin}[attack.kind]
    start = spy.seen[1][standing[result.clean_prediction == items.y]]
    ours = loss(model(result.x_adv), items.y)[standing]
    assert (ours >= loss(model(items.x), items.y)[standing]).all()
    assert (ours >= loss(model(start), items.y[standing]) - 1e-6).all()


@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
def test_zero_budget_is_an_exact_no_op(attack):
    model, items = problem(1)
    result = type(attack)(norm=attack.norm, eps=0.0)(model, items)
    assert torch.equal(result.x_adv, items.x)
    assert result.num_evaluations.tolist() == [1] * len(items)


@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**31), order=st.permutations(range(8)), size=st.integers(1, 8))
def test_results_depend_on_the_item_and_not_on_its_batch(attack, seed, order, size):
    model, items = problem(seed)
    fixed = in_fixed_batches(model, size=3)
    whole = attack(fixed, items)
    assert same(whole, attack(fixed, items))
    for part in torch.tensor(order).split(size):
        alone = attack(fixed, items.take(part))
        for name in ("x_adv", "adversarial_prediction", "num_evaluations", "num_zero_gradients"):
            assert torch.equal(getattr(alone, name), getattr(whole, name)[part])


def test_weights_and_gradients_stay_as_they_were():
    model, items = problem(3)
    model.requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with attack_mode(model):
        Apgd(norm="linf", eps=0.1, num_steps=5)(model, items)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_more_restarts_keep_what_fewer_found_and_spend_on_robust_rows_only():
    broken_later = 0
    for seed in range(6):
        model, items = problem(seed, num_items=40)
        budget = {"norm": "linf", "eps": 0.06, "kind": "apgd-dlr", "num_steps": 10}
        one, four = (Apgd(**budget, num_restarts=n)(model, items) for n in (1, 4))
        broken = one.adversarial_prediction != items.y
        assert torch.equal(one.x_adv[broken], four.x_adv[broken])
        assert torch.equal(one.num_evaluations[broken], four.num_evaluations[broken])
        standing = four.adversarial_prediction == items.y
        assert (four.num_evaluations[standing] == 1 + 4 * 11).all()
        assert (four.num_gradients[standing] == 4 * 10).all()
        broken_later += int((~broken & ~standing).sum())
    assert broken_later > 0


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attack", "num_classes"),
    [
        (Apgd(norm="linf", eps=0.1, kind="apgd-dlr"), 2),
        (ApgdTargeted(norm="l2", eps=0.1), 2),
        (ApgdTargeted(norm="linf", eps=0.1), 3),
    ],
)
def test_too_few_classes_are_named_before_any_step(attack, num_classes):
    model, items = problem(0, num_classes=num_classes)
    spy = Spy(model)
    with pytest.raises(CasemateError, match=f"{num_classes} classes"):
        attack(spy, items)
    assert len(spy.seen) == 1


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Apgd(norm="linf", eps=8), "eps: 8.0 .*8/255"),
        (lambda: Apgd(norm="l1", eps=0.1), "norm: l1"),
        (lambda: Apgd(norm="linf", eps=0.1, kind="kl"), "kind: kl .*ce.*dlr"),
        (lambda: Apgd(norm="linf", eps=0.1, kind="apgd-dlr", num_steps=0), "num_steps: 0"),
        (lambda: Apgd(norm="linf", eps=0.1, num_restarts=0), "num_restarts: 0"),
        (lambda: Apgd(norm="linf", eps=0.1, eot_iter=0), "eot_iter: 0"),
        (lambda: Apgd(norm="linf", eps=0.1, rho=1.5), "rho: 1.5"),
        (lambda: ApgdTargeted(norm="linf", eps=float("nan")), "eps: nan"),
        (lambda: ApgdTargeted(norm="linf", eps=0.1, num_targets=0), "num_targets: 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, key):
    with pytest.raises(SettingError, match=key):
        make()


def test_logits_that_are_not_finite_name_the_item():
    model, items = problem(2)
    calls = []

    def breaks_later(x):
        calls.append(len(x))
        logits = model(x).clone()
        if len(calls) == 4:
            logits[1] = torch.nan
        return logits

    second_robust = "item-2"  # item-0 is wrong from the beginning
    with pytest.raises(CasemateError, match=second_robust):
        Apgd(norm="linf", eps=1e-4)(breaks_later, items)
