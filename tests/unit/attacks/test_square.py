"""Square Attack against its algorithm written out query by query, and its promises per item."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from components.attacks import square
from components.attacks.gradient import in_fixed_batches
from components.attacks.interface import Items
from components.attacks.square import Square, eta, square_share, square_side
from components.core.errors import CasemateError
from components.core.settings import SettingError
from tests.unit.host_syncs import DEVICE, HostSyncs

SHAPE = (2, 8, 8)
IDS = tuple(f"item-{i}" for i in range(6))
BUDGETS = [{"norm": "linf", "eps": 0.06}, {"norm": "l2", "eps": 0.4}]


def network(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Flatten(), nn.Linear(128, 16), nn.Tanh(), nn.Linear(16, 4)]
        model = nn.Sequential(*layers).eval().requires_grad_(False)
        model[1].weight *= 3
        return model


def problem(seed, *, low=0.0, high=1.0):
    """Six items, the first of them wrong from the beginning."""
    model, generator = network(seed), torch.Generator().manual_seed(seed)
    x = low + (high - low) * torch.rand(6, *SHAPE, generator=generator)
    y = model(x).argmax(dim=1)
    y[0] = (y[0] + 1) % 4
    return model, Items(x, y, IDS, run_seed=seed)


def watched(model):
    """The model, and the list of everything it was shown."""
    seen = []

    def logits_of(z):
        assert not torch.is_grad_enabled()
        seen.append(z.clone())
        return model(z)

    return logits_of, seen


def test_schedule_is_the_published_one():
    """p / p_init and the side on 32 x 32, at the first and the last query of each stage."""
    stages = [(0, 10), (11, 50), (51, 200), (201, 500), (501, 1000), (1001, 2000), (2001, 4000)]
    sides = [29, 20, 14, 10, 7, 5, 4]
    for number, (stage, side) in enumerate(zip(stages, sides, strict=True)):
        for query in stage:
            share = square_share(query, p_init=0.8)
            assert share == 0.8 / 2**number
            assert square_side(share, (3, 32, 32)) == side
    assert [square_share(query, p_init=1.0) for query in (6000, 8000, 8001)] == [
        2**-7, 2**-8, 2**-9,
    ]  # fmt: skip
    assert square_side(1e-9, (3, 32, 32)) == 1
    assert square_side(0.8, (3, 4, 64)) == 4  # never larger than the image


def literal_linf(model, items, *, eps, num_queries, p_init=0.8):
    """Algorithms 1 and 2 for one item, from the same numbers: (best point, evaluations)."""
    x, y, channels, size = items.x[0], int(items.y[0]), items.x.shape[1], items.x.shape[-1]
    sign = torch.where(items.uniform("square/start", (channels, 1, size))[0] < 0.5, -1.0, 1.0)
    best, best_loss, cost = None, math.inf, 1  # the clean pass
    for query in range(-1, num_queries):
        if query < 0:
            new = x + eps * sign
        else:
            block = items.uniform(f"square/queries/{query // 100}", (100, 2 + channels))[0]
            draws = block[query % 100].double()
            p = p_init / 2 ** sum(query > passed for passed in (10, 50, 200))
            side = max(round(math.sqrt(p * size * size)), 1)
            top, left = (int(draws[axis] * (size - side + 1)) for axis in (0, 1))
            signs = torch.where(draws[2:] < 0.5, -1.0, 1.0)[:, None, None]
            new = best.clone()
            new[:, top : top + side, left : left + side] += 2 * eps * signs
        new = torch.minimum(torch.maximum(new, x - eps), x + eps).clamp(0, 1)
        cost += 1
        logits = model(new[None])[0].tolist()
        own = logits.pop(y)
        if own - max(logits) < best_loss:
            best, best_loss = new, own - max(logits)
        if best_loss < 0:
            break
    return best, cost


def test_linf_is_the_published_algorithm_query_by_query():
    model, items = problem(3)
    result = Square(norm="linf", eps=0.03, num_queries=120)(model, items)
    costs = []
    for row in range(1, 6):
        one = items.take(torch.tensor([row]))
        best, cost = literal_linf(model, one, eps=0.03, num_queries=120)
        torch.testing.assert_close(result.x_adv[row], best, atol=1e-6, rtol=0)
        assert result.num_evaluations[row] == cost
        costs.append(cost)
    assert min(costs) < 60 < max(costs) == 122  # some break and stop paying, some do not


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("ahead", [2, 7, 32])
def test_queries_ahead_change_neither_points_nor_counts(budget, ahead, monkeypatch):
    """Rows of one pass are independent here, so the comparison is to the last bit."""
    model, items = problem(5)
    logits_of = in_fixed_batches(model, size=4)
    attack = Square(**budget, num_queries=230)
    monkeypatch.setattr(square, "MOST_AHEAD", 1)
    shown, seen = watched(logits_of)
    single = attack(shown, items)
    monkeypatch.setattr(square, "MOST_AHEAD", ahead)
    shown, ahead_seen = watched(logits_of)
    assert_same(attack(shown, items), single)
    broken = single.adversarial_prediction[1:] != items.y[1:]
    assert 0 < broken.sum() < 5
    assert single.num_evaluations.max() == 232
    assert len(ahead_seen) < len(seen) / min(ahead, 4) * 1.6


def assert_same(one, other):
    for name in ("x_adv", "adversarial_prediction", "num_evaluations", "margins"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_bigger_batches_are_made_of_queries_ahead_up_to_a_number_of_rows_and_pixels():
    model, items = problem(5, low=0.2, high=0.8)
    logits_of, seen = watched(model)
    Square(norm="linf", eps=1e-6, num_queries=50)(logits_of, items)
    assert len(seen[2]) == 5 * (184 // 5 if 184 // 5 < 32 else 32)
    wide = Items(torch.full((6, 1, 400, 400), 0.5), items.y, IDS, run_seed=0)
    logits_of, seen = watched(lambda z: torch.eye(4)[items.y].repeat(len(z) // 6, 1))
    Square(norm="linf", eps=1e-6, num_queries=2)(logits_of, wide)
    assert len(seen[2]) == 6


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_host_waits_only_where_it_looks_at_who_is_broken(budget):
    model, items = problem(5)
    attack = Square(**budget, num_queries=200)
    expected = attack(in_fixed_batches(model, size=4), items)
    with HostSyncs() as syncs:
        there = Items(items.x.to(DEVICE), items.y.to(DEVICE), IDS, run_seed=5)
        model = model.to(DEVICE)
        steps = []
        result = attack(lambda z: steps.append(syncs.count) or model(z), there)
        assert sum(a != b for a, b in pairwise(steps[2:])) <= len(steps) / 10 + 1
        found = result.adversarial_prediction.cpu(), result.num_evaluations.cpu()
    assert torch.equal(found[0], expected.adversarial_prediction)
    assert torch.equal(found[1], expected.num_evaluations)


def test_linf_starts_with_stripes_on_the_bounds():
    model, items = problem(4, low=0.2, high=0.8)
    logits_of, seen = watched(model)
    Square(norm="linf", eps=0.1, num_queries=1)(logits_of, items)
    delta = seen[1] - items.x[1:]
    torch.testing.assert_close(delta.abs(), torch.full_like(delta, 0.1))
    signs = delta.sign()
    assert torch.equal(signs, signs[:, :, :1].expand_as(signs))  # columns of one sign
    assert len({tuple(row.flatten().tolist()) for row in signs}) == 5  # of every item's own
    assert abs(signs.mean()) < 0.5


def test_squares_reach_every_corner_and_belong_to_their_item(monkeypatch):
    """One channel moves in one window at most, everything else stays as it was."""
    generator = torch.Generator().manual_seed(0)
    x = 0.3 + 0.4 * torch.rand(40, 1, 6, 6, generator=generator)
    items = Items(x, torch.zeros(40, dtype=torch.int64), tuple(map(str, range(40))), 0)
    seen = []

    def rising(z):  # every new point is better than all before it, none is misclassified
        seen.append(z.clone())
        return torch.tensor([[1 / len(seen), 0.0]]).expand(len(z), 2)

    monkeypatch.setattr(square, "MOST_AHEAD", 1)
    Square(norm="linf", eps=0.1, num_queries=60)(rising, items)
    touched = torch.zeros(6, 6, dtype=torch.bool)
    for before, after in pairwise(seen[12:]):  # sides 4 and 3, not 5
        changed = (before != after).any(dim=1)
        assert len({tuple(row.flatten().tolist()) for row in changed}) > 3
        touched |= changed.any(dim=0)
        for row in changed:
            rows, columns = row.any(dim=1).nonzero(), row.any(dim=0).nonzero()
            assert row.sum() == 0 or max(rows.max() - rows.min(), columns.max() - columns.min()) < 4
    assert touched.all()


def literal_eta(side):
    """The pattern as concentric rectangles, added one by one around each half's centre."""

    def half(height, width):
        bump = [[0.0] * width for _ in range(height)]
        for ring in range(max(height // 2, width // 2) + 1):
            for r in range(height):
                for c in range(width):
                    if abs(r - height // 2) <= ring and abs(c - width // 2) <= ring:
                        bump[r][c] += 1 / (ring + 1) ** 2
        return torch.tensor(bump, dtype=torch.float64).reshape(height, width)

    upper, lower = half(side // 2, side), half(side - side // 2, side)
    return torch.cat([upper / upper.norm() if side > 1 else upper, -lower / lower.norm()])


@pytest.mark.parametrize("side", [1, 2, 3, 5, 8, 13])
def test_eta_is_the_published_pattern(side):
    expected = literal_eta(side)
    torch.testing.assert_close(eta(side), expected / expected.norm())


def test_l2_moves_budget_between_windows_and_always_spends_all_of_it(monkeypatch):
    """Far from the range: full length at each query; changes stay inside two windows."""
    monkeypatch.setattr(square, "MOST_AHEAD", 1)
    _, items = problem(6, low=0.45, high=0.55)
    items = items.take(torch.arange(1, 6))
    seen = []

    def rising(z):
        seen.append(z.clone())
        logits = torch.zeros(len(z), 4)
        return logits.scatter(1, items.y[:, None], 1 / len(seen))

    Square(norm="l2", eps=0.3, num_queries=80)(rising, items)
    lengths = torch.stack([(z - items.x).flatten(1).norm(dim=1) for z in seen[1:]])
    torch.testing.assert_close(lengths, torch.full_like(lengths, 0.3), atol=1e-5, rtol=0)
    for before, after in pairwise(seen[52:]):  # windows of 5 x 5
        changed = ((before - after).abs() > 1e-6).any(dim=1)
        assert (changed.flatten(1).sum(dim=1) <= 2 * 25).all()
        assert changed.any(dim=(1, 2)).all()


@pytest.mark.parametrize("budget", BUDGETS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), eps=st.floats(0.001, 0.6))
def test_promises_hold_for_every_row(budget, seed, eps):
    model, items = problem(seed)
    kept = items.x.clone()
    attack = Square(norm=budget["norm"], eps=eps, num_queries=25)
    logits_of, seen = watched(model)
    result = attack(logits_of, items)
    assert torch.equal(items.x, kept)
    assert 0 <= result.x_adv.min() <= result.x_adv.max() <= 1
    for delta in (result.x_adv - items.x, result.x_adv.double() - items.x.double()):
        size = delta.flatten(1)
        length = size.abs().amax(dim=1) if attack.norm == "linf" else size.norm(dim=1)
        assert (length.double() <= eps).all()
    torch.testing.assert_close(model(result.x_adv).argmax(dim=1), result.adversarial_prediction)
    assert torch.equal(result.x_adv[0], items.x[0])
    assert result.num_evaluations[0] == 1
    assert result.num_evaluations.sum() <= sum(map(len, seen))  # some were made ahead in vain
    standing = (result.adversarial_prediction == items.y) & (torch.arange(6) > 0)
    assert (result.num_evaluations[standing] == 27).all()  # clean, start, 25 queries
    assert result.num_gradients.sum() == result.num_zero_gradients.sum() == 0


@pytest.mark.parametrize("budget", BUDGETS)
def test_results_depend_on_the_item_and_not_on_its_batch(budget):
    """110 queries: the second draw of numbers is made by those that are left."""
    model, items = problem(5)
    attack = Square(**budget, num_queries=110)
    logits_of = in_fixed_batches(model, size=4)
    whole = attack(logits_of, items)
    broken = whole.adversarial_prediction[1:] != items.y[1:]
    assert 0 < broken.sum() < 5
    for rows in torch.tensor([3, 0, 5, 1, 4, 2]).split(4):
        part = attack(logits_of, items.take(rows))
        for name in ("x_adv", "adversarial_prediction", "num_evaluations"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows])


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_zero_budget_is_an_exact_no_op(norm):
    model, items = problem(2)
    result = Square(norm=norm, eps=0.0)(model, items)
    assert torch.equal(result.x_adv, items.x)
    assert result.num_evaluations.tolist() == [1] * 6


def test_images_of_any_shape_can_be_attacked():
    for shape in ((1, 1, 1), (3, 2, 9), (1, 19, 7)):
        x = torch.rand(2, *shape)
        items = Items(x, torch.zeros(2, dtype=torch.int64), ("a", "b"), 0)
        for budget in BUDGETS:
            attack = Square(**budget, num_queries=15)
            result = attack(lambda z: torch.tensor([[1.0, 0.0]]).expand(len(z), 2), items)
            assert result.num_evaluations.tolist() == [17, 17]


def test_bad_input_is_named():
    model, items = problem(1)
    calls = []

    def breaks_later(z):
        calls.append(len(z))
        logits = model(z)
        return logits if len(calls) < 3 else torch.full_like(logits, math.nan)

    with pytest.raises(CasemateError, match="item-1"):
        Square(norm="linf", eps=1e-4)(breaks_later, items)
    with pytest.raises(SettingError, match=r"eps: 8.0"):
        Square(norm="linf", eps=8.0)
    with pytest.raises(SettingError, match=r"p_init: 80"):
        Square(norm="linf", eps=0.1, p_init=80)
