"""APGD where the right answer is known: linear models, ranked targets, random and flat models."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.attacks.apgd import Apgd, ApgdTargeted, rank_rivals
from components.attacks.interface import Items

SHAPE = (1, 4, 4)


def linear_problem(*, num_classes, margin_of_box, num_items=100):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(num_classes, 16, generator=generator)
    weight -= weight.mean(dim=1, keepdim=True)
    room = 1 - 2 * margin_of_box
    x = margin_of_box + room * torch.rand(num_items, *SHAPE, generator=generator)
    y = (x.flatten(1) @ weight.T).argmax(dim=1)
    ids = tuple(map(str, range(num_items)))
    return weight, Items(x, y, ids, run_seed=0)


@pytest.mark.parametrize(("norm", "eps", "dual"), [("linf", 0.05, 1), ("l2", 0.15, 2)])
@pytest.mark.parametrize("num_classes", [2, 6])
def test_linear_models_are_broken_exactly_where_they_can_be(norm, eps, dual, num_classes):
    """A linear model stands if z_y - z_j > eps * |w_y - w_j|_dual for each j, away from the box."""
    weight, items = linear_problem(num_classes=num_classes, margin_of_box=eps)
    logits = items.x.flatten(1) @ weight.T
    gaps = logits.gather(1, items.y[:, None]) - logits
    limits = eps * (weight[items.y][:, None] - weight[None]).norm(p=dual, dim=2)
    slack = (gaps - limits).scatter(1, items.y[:, None], torch.inf).amin(dim=1)
    decided = slack.abs() > 1e-4 * limits.amax()
    assert 15 < (slack > 0).sum() < 85
    budget = {"norm": norm, "eps": eps}
    attack = (Apgd if num_classes == 2 else ApgdTargeted)(**budget, num_steps=30)
    result = attack(lambda x: x.flatten(1) @ weight.T, items)
    standing = result.adversarial_prediction == items.y
    assert torch.equal(standing[decided], (slack > 0)[decided])


@given(st.integers(0, 2**31), st.integers(2, 6))
def test_rivals_are_all_other_classes_by_falling_logit(seed, num_classes):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 2, (5, num_classes), generator=generator).float()  # many ties
    y = torch.randint(0, num_classes, (5,), generator=generator)
    for row, own, ranked in zip(logits.tolist(), y.tolist(), rank_rivals(logits, y), strict=True):
        others = [k for k in range(num_classes) if k != own]
        assert ranked.tolist() == sorted(others, key=lambda k: (-row[k], k))


def test_each_target_sees_the_rows_that_stand_and_aims_at_its_class():
    """Logits follow one pixel each: the point that breaks a row shows which class was the aim."""

    def logits_of(x):
        return 4 * x.flatten(1)[:, :6] + torch.tensor([1.0, 0, 0, 0, 0, 0])

    x = torch.full((1, *SHAPE), 0.5)
    x.view(-1)[:6] = torch.tensor([0.6, 0.55, 0.5, 0.45, 0.4, 0.35])
    items = Items(x, torch.tensor([0]), ("a",), run_seed=0)
    full = {"norm": "linf", "eps": 0.05, "num_steps": 10}
    for num_targets, runs in [(1, 1), (3, 3), (9, 5)]:
        result = ApgdTargeted(**full, num_targets=num_targets)(logits_of, items)
        assert result.num_gradients.tolist() == [10 * runs]
    broken = ApgdTargeted(norm="linf", eps=0.2, num_targets=9)(logits_of, items)
    assert broken.adversarial_prediction.tolist() == [1]
    assert broken.num_gradients < 100


def test_expectation_sums_what_one_gradient_cannot_see():
    """Each pass adds a large random slope, of value zero; the next pass takes it away again."""

    def random_model():
        calls = []

        def logits_of(x):
            pair, second = divmod(len(calls) - 1, 2)  # the first call is the clean pass
            slope = torch.randn(16, generator=torch.Generator().manual_seed(pair + 1))
            noise = (1 - 2 * second) * 100 * (x.flatten(1) @ slope)
            calls.append(len(x))
            lead = x.flatten(1).sum(dim=1) - 7 + noise - noise.detach()
            return torch.stack([lead, torch.zeros_like(lead)], dim=1)

        return logits_of

    items = Items(torch.full((1, *SHAPE), 0.5), torch.tensor([0]), ("a",), run_seed=0)
    blind, seeing = (
        Apgd(norm="linf", eps=0.1, num_steps=30, eot_iter=n)(random_model(), items) for n in (1, 2)
    )
    assert blind.adversarial_prediction.tolist() == [0]
    assert seeing.adversarial_prediction.tolist() == [1]
    assert seeing.num_evaluations.tolist() == [1 + 2 * 2]  # clean, start, one step
    assert seeing.num_gradients.tolist() == [2 * 2]


def test_a_flat_model_is_reported_as_flat():
    items = Items(torch.rand(3, *SHAPE), torch.tensor([0, 0, 1]), ("a", "b", "c"), run_seed=0)
    flat = torch.tensor([3.0, 2, 1, 0])
    result = Apgd(norm="linf", eps=0.1)(lambda x: flat + 0 * x.flatten(1)[:, :4], items)
    assert result.num_gradients.tolist() == [100, 100, 0]
    assert torch.equal(result.num_zero_gradients, result.num_gradients)
    assert (result.num_zero_gradients > 0).tolist() == [True, True, False]
