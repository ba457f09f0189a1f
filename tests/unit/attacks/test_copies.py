"""Runs that share a batch: points and counts of runs one after the other, to the last bit."""

import pytest
import torch
from torch import nn

from components.attacks import apgd, copies, fab
from components.attacks.apgd import ApgdTargeted, rank_rivals
from components.attacks.copies import copied, copies_at_once, join
from components.attacks.fab import FabTargeted
from components.attacks.gradient import in_fixed_batches
from components.attacks.interface import Items, Search

NUM_CLASSES = 6


def problem(seed, *, num_items=24):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES)]
        model = nn.Sequential(*layers).requires_grad_(False).eval()
        model[1].weight *= 6
    x = torch.rand(num_items, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    y = model(x).argmax(dim=1)
    y[0] = (y[0] + 1) % NUM_CLASSES
    ids = tuple(f"item-{i}" for i in range(num_items))
    return in_fixed_batches(model, size=8), Items(x, y, ids, run_seed=seed)


class Counted:
    def __init__(self, logits_of):
        self.logits_of, self.num_passes = logits_of, 0

    def __call__(self, x):
        self.num_passes += 1
        return self.logits_of(x)


ATTACKS = [  # the first run of each takes 13 passes after the clean one
    ApgdTargeted(norm="linf", eps=0.05, num_steps=12),
    ApgdTargeted(norm="l2", eps=0.15, num_steps=12),
    FabTargeted(norm="linf", eps=0.05, num_steps=6, num_restarts=2),
    FabTargeted(norm="l2", eps=0.15, num_steps=6),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
def test_runs_together_have_the_results_of_runs_one_by_one(attack, monkeypatch):
    """The likeliest rival comes last here, so that more than the first run breaks rows."""
    for module in (apgd, fab):
        monkeypatch.setattr(module, "rank_rivals", lambda *args: rank_rivals(*args).flip(1))
    later = 0
    for seed in range(4):
        logits_of, items = problem(seed)
        results, passes = [], []
        for most in (1, 3, 8):
            monkeypatch.setattr(apgd, "copies_at_once", lambda *_, most, at=most: min(at, most))
            monkeypatch.setattr(fab, "_starts_at_once", lambda rows, items, at=most: at)
            counted = Counted(logits_of)
            results.append(attack(counted, items))
            passes.append(counted.num_passes)
        for result in results[1:]:
            for name in ("x_adv", "adversarial_prediction", "margins", "num_evaluations",
                         "num_gradients", "num_zero_gradients"):  # fmt: skip
                assert torch.equal(getattr(result, name), getattr(results[0], name)), name
        assert passes[2] < passes[1] < passes[0]
        broken = results[0].adversarial_prediction != items.y
        later += int((broken & (results[0].num_evaluations > 1 + 12 + 1)).sum())
        assert (~broken).any()
    assert later > 0  # some break in a run that is not the first


def test_the_first_run_that_breaks_a_row_counts_and_later_ones_are_not_paid_for():
    items = Items(torch.zeros(3, 1, 1, 1), torch.zeros(3, dtype=torch.int64), tuple("abc"), 0)
    right, wrong = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    search = Search(lambda x: right.expand(len(x), 2), items)
    rows = torch.tensor([0, 1, 2])
    both = copied(search, rows, 2)
    assert both.items.item_ids == tuple("abcabc")
    active = both.active()
    points = torch.arange(6.0).view(6, 1, 1, 1) / 10
    # a: broken by the second run; b: by both; c: by none, the first is the best of two equal ones
    logits = torch.stack([right, wrong, right, wrong, wrong, right])
    active.count_gradients(torch.ones(6, 1, 1, 1))
    active.visit(points, logits, torch.tensor([-1.0, 1.0, -0.5, 1.0, 1.0, -0.5]))
    active.finish()
    join(search, rows, both)
    result = search.result()
    assert result.x_adv.flatten().tolist() == pytest.approx([0.3, 0.1, 0.2])
    assert result.adversarial_prediction.tolist() == [1, 1, 0]
    assert result.num_evaluations.tolist() == [3, 2, 3]
    assert result.num_gradients.tolist() == [2, 1, 2]


def test_copies_fit_in_memory(monkeypatch):
    monkeypatch.setattr(copies, "PIXELS", 1000)
    assert copies_at_once(10, torch.Size((1, 4, 4)), most=9) == 6
    assert copies_at_once(10, torch.Size((1, 4, 4)), most=2) == 2
    assert copies_at_once(10, torch.Size((3, 40, 40)), most=9) == 1
