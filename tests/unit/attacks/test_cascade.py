"""The union of a list of attacks, against brute force over made-up attacks that break by rule."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.attacks.cascade import (
    UNBROKEN,
    Outcome,
    after_attack,
    before_attacks,
    run_cascade,
)
from components.attacks.interface import AttackResult, Items
from components.core.errors import CasemateError

NUM_CLASSES = 3
# Margins of points that break nothing, by the length of the attack's name; that of images is -1:
# the first attack finds nothing better, the second the best, the fourth only as good.
MARGINS = {1: -2.0, 2: -0.5, 3: -0.7, 4: -0.5}


def items_of(labels):
    """Row i is a 1 x 1 image of brightness i / 100, so that a model can know it."""
    x = torch.arange(len(labels)).view(-1, 1, 1, 1) / 100
    ids = tuple(f"item-{i}" for i in range(len(labels)))
    return Items(x, torch.tensor(labels), ids, run_seed=0)


def model_of(clean):
    """Predicts `clean[i]` at row i's image; attacked images, above 0.5, get the next class."""

    def logits_of(x):
        rows = (x.flatten() * 100).round().long() % 50
        prediction = torch.tensor(clean)[rows] + (x.flatten() > 0.499)
        return torch.nn.functional.one_hot(prediction % NUM_CLASSES, NUM_CLASSES).float()

    return logits_of


@dataclass
class Scripted:
    """Breaks the items of `breaks` by brightening them by 0.5, and remembers whom it was given."""

    name: str
    breaks: set[str]
    norm: str = "linf"
    eps: float = 0.5
    seen: list[str] = field(default_factory=list)

    def __call__(self, logits_of, items):
        self.seen += items.item_ids
        clean = logits_of(items.x).argmax(dim=1)
        known = torch.tensor([i in self.breaks for i in items.item_ids], dtype=torch.bool)
        hit = known & (clean == items.y)
        x_adv = items.x + torch.where(hit, 0.5, 0.001 * len(self.name)).view(-1, 1, 1, 1)
        steps = torch.full_like(items.y, len(self.name))
        prediction = logits_of(x_adv).argmax(dim=1)
        margins = torch.where(hit, 1.0, MARGINS.get(len(self.name), -2.0))
        return AttackResult(x_adv, clean, prediction, steps, steps + 1, hit.long(), margins)


@st.composite
def lists(draw):
    count = draw(st.integers(1, 12))
    rows = st.lists(st.integers(0, NUM_CLASSES - 1), min_size=count, max_size=count)
    labels, clean = draw(rows), draw(rows)
    ids = [f"item-{i}" for i in range(count)]
    breaks = draw(st.lists(st.sets(st.sampled_from(ids)), max_size=4))
    return labels, clean, breaks


def attacks_of(breaks):
    return [Scripted("a" * (k + 1), set(hit)) for k, hit in enumerate(breaks)]


def same(one, other):
    assert torch.equal(one.x_adv, other.x_adv)
    assert torch.equal(one.margins, other.margins)
    for name in ("adversarial_prediction", "broken_by", "num_evaluations", "num_gradients"):
        assert torch.equal(getattr(one.state, name), getattr(other.state, name))
    assert torch.equal(one.state.num_zero_gradients, other.state.num_zero_gradients)
    assert one.state.tallies == other.state.tallies


@settings(max_examples=60, deadline=None)
@given(case=lists())
def test_union_is_exact_monotone_and_spares_broken_rows(case):
    labels, clean, breaks = case
    items, attacks = items_of(labels), attacks_of(breaks)
    result = run_cascade(attacks, model_of(clean), items)
    state = result.state
    for row, (label, guess) in enumerate(zip(labels, clean, strict=True)):
        item = f"item-{row}"
        hits = [k for k, hit in enumerate(breaks) if item in hit]
        first = hits[0] if hits and guess == label else UNBROKEN
        assert state.broken_by[row] == first
        assert bool(state.robust[row]) == (guess == label and not hits)
        assert state.breaker_names()[row] == (None if first < 0 else "a" * (first + 1))
        moved = first != UNBROKEN
        by_best = 0.002 if guess == label and len(breaks) >= 2 else 0
        assert torch.equal(result.x_adv[row], items.x[row] + (0.5 if moved else by_best))
        # seen by every attack until one broke it, and by none after; wrong rows by none at all
        last = -1 if guess != label else first if moved else len(breaks) - 1
        assert [k for k, a in enumerate(attacks) if item in a.seen] == list(range(last + 1))
        assert state.num_evaluations[row] == 1 + sum(range(1, last + 2))
        assert state.num_gradients[row] == sum(range(2, last + 3))
        assert state.num_zero_gradients[row] == moved
    left = sum(guess == label for label, guess in zip(labels, clean, strict=True))
    for tally, attack in zip(state.tallies, attacks, strict=True):
        assert (tally.name, tally.num_rows) == (attack.name, len(attack.seen))
        assert tally.num_rows == left
        left -= tally.num_broken
    assert left == int(state.robust.sum())


@settings(max_examples=40, deadline=None)
@given(case=lists(), cut=st.integers(0, 4), order=st.randoms(use_true_random=False))
def test_a_cut_list_and_another_order_of_rows_change_nothing(case, cut, order):
    labels, clean, breaks = case
    items, logits_of = items_of(labels), model_of(clean)
    whole = run_cascade(attacks_of(breaks), logits_of, items)
    half = run_cascade(attacks_of(breaks)[:cut], logits_of, items)
    again = attacks_of(breaks)
    same(run_cascade(again, logits_of, items, done=half), whole)
    assert not any(attack.seen for attack in again[:cut])
    rows = list(range(len(labels)))
    order.shuffle(rows)
    shuffled = run_cascade(attacks_of(breaks), logits_of, items.take(torch.tensor(rows)))
    assert torch.equal(shuffled.state.broken_by, whole.state.broken_by[rows])
    assert torch.equal(shuffled.x_adv, whole.x_adv[rows])


@settings(max_examples=40, deadline=None)
@given(case=lists(), size=st.integers(1, 5))
def test_attack_by_attack_over_chunks_of_robust_rows_is_the_same_union(case, size):
    """As a sharded stage works: robust rows are re-packed into chunks before every attack."""
    labels, clean, breaks = case
    items, logits_of = items_of(labels), model_of(clean)
    state = before_attacks(items.y, logits_of(items.x).argmax(dim=1))
    for attack in attacks_of(breaks):
        chunks = [attack(logits_of, items.take(c)) for c in state.robust_rows.split(size)]
        columns = zip(*[columns_of(Outcome.of(chunk)) for chunk in chunks], strict=True)
        state = after_attack(state, attack.name, Outcome(*map(torch.cat, columns)))
    whole = run_cascade(attacks_of(breaks), logits_of, items).state
    assert torch.equal(state.broken_by, whole.broken_by)
    assert torch.equal(state.num_evaluations, whole.num_evaluations)
    assert state.tallies == whole.tallies


def columns_of(outcome):
    return [getattr(outcome, name) for name in Outcome.__dataclass_fields__]


def test_nobody_left_means_no_call():
    items = items_of([0, 1])
    second = Scripted("second", {"item-0"})
    attacks = [Scripted("first", {"item-0", "item-1"}), second]
    result = run_cascade(attacks, model_of([0, 1]), items)
    assert second.seen == []
    assert [t.num_rows for t in result.state.tallies] == [2, 0]


def test_wrong_calls_are_refused():
    items, logits_of = items_of([0, 1]), model_of([0, 1])
    done = run_cascade([Scripted("a", set())], logits_of, items)
    with pytest.raises(ValueError, match="not the first attacks"):
        run_cascade([Scripted("b", set())], logits_of, items, done=done)
    with pytest.raises(ValueError, match="the labels differ"):
        run_cascade([Scripted("a", set())], logits_of, items_of([1, 1]), done=done)
    with pytest.raises(ValueError, match="a reports 1 rows, but 2 were robust"):
        after_attack(done.state, "a", Outcome(*[torch.zeros(1, dtype=torch.int64)] * 5))
    with pytest.raises(CasemateError, match=r"l2 0.5, linf 0.5 are different threats"):
        run_cascade([Scripted("a", set()), Scripted("b", set(), norm="l2")], logits_of, items)
    with pytest.raises(CasemateError, match="item-1"):
        run_cascade([], lambda x: logits_of(x) / (x.flatten()[:, None] < 0.005), items)
