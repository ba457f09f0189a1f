"""The checks one by one: each is fine at its limit, fails just beyond it, and says why."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from components.attacks.cascade import Outcome, after_attack, before_attacks
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.sanity.audit import broken_by_noise, grey_accuracy, growing_budgets
from components.attacks.sanity.findings import finding, verdict
from components.attacks.sanity.model import (
    attention_alive,
    batch_invariant,
    deterministic,
    eval_mode,
    gap_histograms,
    images_in_range,
    refuse_probabilities,
    returns_logits,
)
from components.attacks.sanity.outcomes import (
    adds_nothing,
    cascade_findings,
    gradients_alive,
    list_is_strong,
    never_rises,
    reaches_floor,
    slack,
)
from components.core.errors import CasemateError

X = torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def linear(num_classes=4):
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))


def test_verdict_lists_every_failed_check_and_only_those():
    good = finding("a", value=1.0, limit=1.0, text="fine")
    bad = finding("b", value=1.1, limit=1.0, text="too much")
    lost = finding("c", value=math.nan, limit=1.0, text="not a number")
    assert verdict([good]) == ("reliable", ())
    none = ("no item is classified correctly, so none was attacked",)
    assert verdict([good], any_attacked=False) == ("unchecked", none)
    assert verdict([good, bad], any_attacked=False).label == "suspect"
    assert verdict([good, bad, lost]) == ("suspect", ("b: too much", "c: not a number"))


class StaysInTraining(nn.Dropout):
    """A layer that refuses eval mode."""

    def train(self, mode=True):
        return super().train(True)


def test_modules_that_stay_in_training_mode_are_named():
    model = nn.Sequential(linear(), StaysInTraining(0.3))
    with attack_mode(model):
        assert not eval_mode(model).ok
        assert "1 is in training mode" in eval_mode(model).text
        assert not deterministic(model, X).ok
    with attack_mode(linear()) as plain:
        assert eval_mode(plain).ok
        assert deterministic(plain, X).value == 0


def test_probabilities_are_told_from_logits_even_small_or_non_negative_ones():
    logits = linear()(X)
    assert not returns_logits(logits.softmax(dim=1)).ok
    summing_to_one = 9 * (logits - logits.mean(dim=1, keepdim=True)) + 1 / 4
    for real in (logits, logits.relu(), logits / 1e4, summing_to_one):
        assert returns_logits(real).ok
        refuse_probabilities(real, model="real")
    assert returns_logits(logits.log_softmax(dim=1)).ok  # cross-entropy does not notice these
    with pytest.raises(CasemateError, match="model: soft returns probabilities, attacks need log"):
        refuse_probabilities(logits.softmax(dim=1), model="soft")
    refuse_probabilities(torch.cat([logits[:1], logits[1:].softmax(dim=1)]), model="mixed")


def test_pixels_out_of_range_are_found_on_either_side():
    assert images_in_range(torch.tensor([0.0, 1.0])).ok
    for wrong in ([0.0, 1.001], [-0.001, 1.0], [0.5, math.nan], [0.0, 255.0]):
        assert not images_in_range(torch.tensor(wrong)).ok


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rows_that_depend_on_their_batch_are_found_at_any_scale(scale):
    model = linear()
    assert batch_invariant(lambda x: scale * model(x), X).ok
    centred = batch_invariant(lambda x: scale * (model(x) - model(x).mean(dim=0)), X)
    assert not centred.ok
    noise = deterministic(lambda x: scale * (model(x) + 1e-2 * torch.randn(len(x), 4)), X)
    assert not noise.ok
    tiny = deterministic(lambda x: scale * (model(x) + 1e-7 * torch.randn(len(x), 4)), X)
    assert tiny.ok


def test_a_network_without_attention_says_that_it_was_not_looked_into():
    model = linear()
    histograms, refusal = gap_histograms(model, model, X)
    assert histograms == {}
    for found in attention_alive(histograms, why_none=refusal):
        assert found.ok
        assert "not checked: model.architecture: Sequential" in found.text


def test_zero_gradients_count_along_the_path_of_all_rows():
    count = torch.tensor
    assert gradients_alive(count([100, 100]), count([0, 2])).ok  # 1 %, the limit
    late = gradients_alive(count([100, 100]), count([0, 3]))
    assert not late.ok
    assert late.value == pytest.approx(0.015)
    assert gradients_alive(count([0, 0]), count([0, 0])).ok  # a black box takes none


@settings(max_examples=50, deadline=None)
@given(num_items=st.integers(1, 20_000))
def test_slack_is_one_item_or_a_fifth_of_a_point(num_items):
    """Counted in whole items, of 500 up to 999 still one, of 1000 two."""
    assert math.floor(slack(num_items) * num_items) == max(1, num_items // 500)


def test_a_weaker_attack_may_add_one_item_only():
    robust = torch.tensor([True] * 6 + [False] * 4)
    one, two = torch.zeros(10, dtype=torch.bool), torch.zeros(10, dtype=torch.bool)
    one[[5, 6, 7]] = True  # 6 and 7 were broken before: nothing new
    two[[4, 5]] = True
    assert adds_nothing("transfer", broken=one, robust=robust).value == 0.1
    assert adds_nothing("transfer", broken=one, robust=robust).ok
    doubt = adds_nothing("transfer", broken=two, robust=robust)
    assert not doubt.ok
    assert doubt.text == "transfer broke 2 of 10 items that white-box attacks did not break"


def test_accuracy_may_not_rise_above_its_lowest_value_so_far():
    assert never_rises("more steps", [0.9, 0.5, 0.5, 0.0], num_items=100).ok
    assert never_rises("more steps", [0.9, 0.50, 0.51], num_items=100).ok  # one item
    creeping = never_rises("larger eps", [0.9, 0.50, 0.51, 0.52], num_items=100)
    assert not creeping.ok
    assert creeping.value == pytest.approx(0.02)


def test_what_is_left_above_the_constant_image_was_missed():
    assert reaches_floor(0.0, floor=0.1, num_items=100).ok
    assert reaches_floor(0.11, floor=0.1, num_items=100).ok
    assert not reaches_floor(0.13, floor=0.1, num_items=100).ok


def outcome_of(predictions, *, zero=0):
    prediction = torch.tensor(predictions)
    count = torch.full_like(prediction, 10)
    return Outcome(torch.zeros_like(prediction), prediction, count, count, 0 * count + zero)


@pytest.mark.parametrize("order", [("apgd-ce", "square"), ("square", "apgd-ce")])
def test_a_finished_list_is_judged_by_its_own_black_box(order):
    """Two items for the second attack are a contradiction if that one is the black box."""
    state = before_attacks(torch.zeros(20, dtype=torch.int64), torch.zeros(20).long())
    state = after_attack(state, order[0], outcome_of([1] * 5 + [0] * 15))
    state = after_attack(state, order[1], outcome_of([1] * 2 + [0] * 13))
    reasons = verdict(cascade_findings(state)).reasons
    black_box_second = order[1] == "square"
    assert len(reasons) == black_box_second
    if black_box_second:
        assert "square broke 2 of 20 items" in reasons[0]


def test_a_blind_list_is_judged_by_its_gradients():
    state = before_attacks(torch.zeros(20, dtype=torch.int64), torch.zeros(20).long())
    blind = after_attack(state, "pgd-10-ce", outcome_of([0] * 20, zero=10))
    assert "200 of 200 gradients" in verdict(cascade_findings(blind)).reasons[0]


@pytest.mark.parametrize("norm", ["linf", "l2"])
@settings(max_examples=15, deadline=None)
@given(eps=st.floats(0.01, 0.4), row=st.integers(0, 11))
def test_noise_stays_in_the_ball_and_belongs_to_its_row(norm, eps, row):
    model, seen = linear(), []

    def spy(x):
        seen.append(x)
        return model(x)

    items = Items(X, model(X).argmax(dim=1), tuple(map(str, range(12))), run_seed=5)
    broken = broken_by_noise(spy, items, norm=norm, eps=eps, num_draws=3)
    assert len(seen) == 3
    for noisy in seen:
        delta = (noisy - X).double().flatten(1)
        reach = delta.abs().amax(dim=1) if norm == "linf" else delta.norm(dim=1)
        assert (reach <= eps).all()
        assert noisy.min() >= 0
        assert noisy.max() <= 1
    misses = torch.stack([model(noisy).argmax(dim=1) != items.y for noisy in seen])
    assert torch.equal(broken, misses.any(dim=0))
    alone = broken_by_noise(spy, items.take(torch.tensor([row])), norm=norm, eps=eps, num_draws=3)
    assert torch.equal(torch.cat(seen[3:]), torch.stack([noisy[row] for noisy in seen[:3]]))
    assert len(alone) == 1


@pytest.mark.parametrize(("norm", "reach"), [("linf", 0.5), ("l2", 2.0)])
def test_the_last_budget_reaches_grey_from_every_image(norm, reach):
    """0.5 in every one of 16 pixels is 2.0 in l2."""
    assert growing_budgets(X, norm=norm, eps=0.1) == (0.05, 0.1, 0.2, reach)
    assert growing_budgets(X, norm=norm, eps=0.3 * reach)[-2:] == (0.6 * reach, reach)
    assert growing_budgets(X, norm=norm, eps=0.6 * reach) == (0.3 * reach, 0.6 * reach, reach)
    assert growing_budgets(X, norm=norm, eps=reach) == (reach / 2, reach)


def test_grey_accuracy_is_the_share_of_the_class_that_grey_gets():
    model = linear()
    grey = int(model(torch.full((1, 1, 4, 4), 0.5)).argmax())
    y = torch.full((12,), (grey + 1) % 4)
    y[:3] = grey
    assert grey_accuracy(model, Items(X, y, tuple(map(str, range(12))), run_seed=0)) == 0.25


def test_a_list_that_the_suite_beats_is_weak():
    suite = torch.zeros(100, dtype=torch.bool)
    for missed, ok in ((0, True), (2, True), (3, False)):
        listed = torch.arange(100) < missed
        found = list_is_strong(listed, suite)
        assert (found.ok, found.value) == (ok, missed / 100)
    assert list_is_strong(suite, ~suite).ok  # a list that breaks more is no contradiction


@pytest.mark.parametrize("name", ["square", "square-2"])
def test_every_square_of_a_list_is_a_black_box(name):
    y = torch.zeros(10, dtype=torch.int64)
    state = before_attacks(y, y)
    wrong = torch.ones(10, dtype=torch.int64)
    none, all_ = Outcome(y, y, y, y, y), Outcome(y, wrong, y, y, y)
    state = after_attack(after_attack(state, "pgd-20-ce", none), name, all_)
    assert not all(found.ok for found in cascade_findings(state))
