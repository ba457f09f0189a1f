"""Rows with randomness of their own, books that add up, and mistakes named in one line."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.attacks.interface import Items, Search, hard_labels
from components.attacks.starts import random_corner, random_point, random_starts, restart_stream
from components.core.errors import CasemateError

SHAPE = (1, 2, 3)


def some_items(num_items=5, *, run_seed=0):
    x = torch.rand(num_items, *SHAPE, generator=torch.Generator().manual_seed(3))
    ids = tuple(f"item-{i}" for i in range(num_items))
    return Items(x, torch.arange(num_items) % 3, ids, run_seed)


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.integers(0, 4), max_size=7), stream=st.sampled_from(["a", "b"]))
def test_a_row_draws_the_same_numbers_in_any_company(rows, stream):
    items, index = some_items(), torch.tensor(rows, dtype=torch.int64)
    part = items.take(index)
    assert part.item_ids == items.ids(index) == tuple(f"item-{i}" for i in rows)
    assert torch.equal(part.x, items.x[index])
    assert torch.equal(part.y, items.y[index])
    for draw in (Items.uniform, Items.normal):
        assert torch.equal(draw(part, stream), draw(items, stream)[index])
        assert torch.equal(draw(part, stream, (2,)), draw(items, stream, (2,))[index])


def test_draws_are_addressed_by_seed_stream_and_item_and_have_their_distribution():
    items = some_items()
    first = items.uniform("a")
    assert torch.equal(first, items.uniform("a"))
    assert not torch.equal(first, items.uniform("b"))
    assert not torch.equal(first, some_items(run_seed=1).uniform("a"))
    assert len({tuple(row.flatten().tolist()) for row in first}) == 5
    uniform, normal = items.uniform("a", (50, 50)), items.normal("a", (50, 50))
    assert 0 <= uniform.min() < 0.001
    assert 0.999 < uniform.max() < 1
    assert uniform.mean() == pytest.approx(0.5, abs=0.013)  # five standard errors of 12,500 draws
    assert normal.mean() == pytest.approx(0, abs=0.045)
    assert normal.std() == pytest.approx(1, abs=0.03)


def test_starts_keep_the_numbers_that_training_and_earlier_results_used():
    items = some_items()
    starts = random_starts(items.item_ids, SHAPE, run_seed=0, stream="pgd")
    stream = restart_stream("pgd", 0)
    point = random_point(items, norm="linf", eps=0.1, stream=stream)
    assert torch.equal(point, items.x + 0.1 * starts)
    assert restart_stream("pgd", 1) not in ("pgd", restart_stream("pgd", 2))


def test_corners_use_the_whole_budget_and_l2_starts_reach_the_sphere():
    items = some_items()
    corner = (random_corner(items, eps=0.25, stream="gama") - items.x).flatten(1)
    torch.testing.assert_close(corner.abs(), torch.full_like(corner, 0.25))
    assert {0.25, -0.25} == {round(v, 3) for v in corner.flatten().tolist()}
    beyond = random_point(
        Items(torch.zeros(200, 1, 8, 8), torch.zeros(200).long(), tuple("x" * 200), 0),
        norm="l2",
        eps=0.5,
        stream="s",
    )
    assert (beyond.flatten(1).norm(dim=1) > 0.5).all()


def test_soft_targets_become_the_largest_share_and_ties_the_lowest_class():
    soft = torch.tensor([[0.2, 0.8, 0.0], [0.5, 0.0, 0.5], [0.1, 0.1, 0.8]])
    assert hard_labels(soft).tolist() == [1, 0, 2]
    items = Items(torch.rand(3, *SHAPE), soft, ("a", "b", "c"), 0)
    assert items.y.tolist() == [1, 0, 2]
    assert items.take(torch.tensor([2])).y.tolist() == [2]


def test_rows_must_match():
    with pytest.raises(ValueError, match="differ in number"):
        Items(torch.rand(3, *SHAPE), torch.zeros(3).long(), ("a", "b"), 0)


def test_search_keeps_the_first_mistake_and_until_then_the_highest_score():
    items = Items(torch.zeros(3, 1, 1, 1), torch.tensor([0, 0, 1]), ("a", "b", "c"), 0)
    right, wrong = [1.0, 0.0], [0.0, 1.0]
    search = Search(lambda x: torch.tensor([right, right, right]), items)
    assert search.robust_rows.tolist() == [0, 1]  # the third is wrong from the beginning

    def see(rows, value, logits, scores):
        points = torch.full((len(rows), 1, 1, 1), value)
        seen = (torch.tensor(rows), points, torch.tensor(logits), torch.tensor(scores))
        return search.visit(*seen).tolist()

    assert see([0, 1], 0.1, [right, right], [5.0, 1.0]) == [True, True]
    assert see([0, 1], 0.2, [right, wrong], [4.0, 0.5]) == [True, False]
    search.count_gradients(torch.tensor([0, 1]), torch.tensor([True, False]))
    assert search.robust_rows.tolist() == [0]
    result = search.result()
    assert result.x_adv.flatten().tolist() == pytest.approx([0.1, 0.2, 0.0])
    assert result.clean_prediction.tolist() == [0, 0, 0]
    assert result.adversarial_prediction.tolist() == [0, 1, 0]
    assert result.num_evaluations.tolist() == [3, 3, 1]
    assert result.num_gradients.tolist() == [1, 1, 0]
    assert (result.num_zero_gradients > 0).tolist() == [True, False, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_name_their_item(bad):
    def logits_of(x):
        logits = torch.zeros(len(x), 3)
        logits[3, 1] = bad
        return logits

    with pytest.raises(CasemateError, match=r"model: item 'item-3' gets logits .* not finite"):
        Search(logits_of, some_items())
