"""Early stopping against every completion of the votes, and the published examples."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.certify.patch.early_stop import UNSEEN, certify_partial, voting_order
from components.certify.patch.rules import RULES, certify
from components.data.ablation import KINDS, Ablations


def completions(votes, num_classes):
    """Every array of full votes that agrees with the votes so far."""
    gaps = np.flatnonzero(votes == UNSEEN)
    for values in product(range(num_classes), repeat=len(gaps)):
        full = votes.copy()
        full[gaps] = values
        yield full


@st.composite
def partial_votes(draw):
    kind = draw(st.sampled_from(KINDS))
    # strides that do not divide the side: positions at the seam differ from the others
    side, stride = (
        draw(st.sampled_from([(7, 1), (9, 2)])) if kind in ("columns", "rows") else (4, 2)
    )
    ablations = Ablations(
        kind=kind, image_size=(side, side), band=draw(st.integers(1, 2)), stride=stride
    )
    num_classes = draw(st.integers(2, 3))
    common = draw(st.integers(0, num_classes - 1))
    vote = st.one_of(st.just(common), st.just(common), st.integers(0, num_classes - 1))
    size = len(ablations)
    votes = np.array(draw(st.lists(vote, min_size=size, max_size=size)), dtype=np.uint16)
    votes[voting_order(size)[size - draw(st.integers(0, 4)) :]] = UNSEEN
    return votes, ablations, num_classes


@settings(max_examples=120, deadline=None)
@given(partial_votes(), st.sampled_from(RULES))
def test_decided_means_decided_under_every_completion_and_open_means_open(drawn, rule):
    votes, ablations, num_classes = drawn
    asked = {"num_classes": num_classes, "patch_sizes": [1, 2], "rule": rule}
    found = certify_partial(votes[None], ablations, **asked)
    full = certify(np.array(list(completions(votes, num_classes))), ablations, **asked)
    assert found.certified[0].tolist() == full.certified.all(axis=0).tolist()
    some = full.certified.any(axis=0) & ~full.certified.all(axis=0)
    assert found.open[0].tolist() == some.tolist()
    assert found.prediction_open[0] == (len(set(full.prediction)) > 1)
    assert found.prediction_open[0] or found.prediction[0] == full.prediction[0]
    assert found.undecided[0] == (found.prediction_open[0] or some.any())
    assert found.margin_low[0] <= full.margin.min()
    assert found.margin_high[0] == full.margin.max()


@pytest.mark.parametrize("vote", [0, 3])
def test_a_class_behind_the_leader_may_be_the_only_one_that_can_be_certified(vote):
    # Class 1 leads, but at the seam a patch touches two of four bands: even [1, 1, 1, 1] becomes
    # a tie, which class 0 wins. Only all outstanding votes for class 0 are safe.
    ablations = Ablations(kind="columns", image_size=(7, 7), band=2, stride=2)
    votes = np.full(4, UNSEEN, dtype=np.uint16)
    votes[vote] = 1
    asked = {"num_classes": 2, "patch_sizes": [1], "rule": "loc"}
    found = certify_partial(votes[None], ablations, **asked)
    full = certify(np.array(list(completions(votes, 2))), ablations, **asked)
    assert full.prediction[full.certified[:, 0]].tolist() == [0]
    assert found.prediction[0] == 1
    assert found.open[0, 0]


@pytest.mark.parametrize(
    ("counts", "low", "high", "certified", "is_open"),
    [
        ((21, 1), 10, 30, True, False),
        ((20, 2), 8, 28, False, True),
        ((12, 11), -8, 10, False, True),
        ((12, 12), -8, 8, False, False),
    ],
)
def test_published_examples(counts, low, high, certified, is_open):
    votes = np.full((1, 32), UNSEEN, dtype=np.uint16)
    votes[0, : sum(counts)] = np.repeat([0, 1], counts)
    ablations = Ablations(kind="columns", image_size=(32, 32), band=4, stride=1)  # m = 2 touches 5
    found = certify_partial(votes, ablations, num_classes=10, patch_sizes=[2])
    assert (found.margin_low[0], found.margin_high[0]) == (low, high)
    assert (found.certified[0, 0], found.open[0, 0]) == (certified, is_open)


@pytest.mark.parametrize(
    ("patch_sizes", "label", "expected"),
    [((23,), 0, 153), ((32,), 0, 162), ((), 0, 112), ((), 1, 113)],
)
def test_unanimous_votes_stop_where_the_formula_says(patch_sizes, label, expected):
    # ceil((K + 2 Delta + [c > 0]) / 2) of K = 224 votes
    ablations = Ablations(kind="columns", image_size=(224, 224), band=19, stride=1)
    order, votes = voting_order(224), np.full((224, 224), UNSEEN, dtype=np.uint16)
    for asked in range(224):
        votes[asked, order[: asked + 1]] = label
    found = certify_partial(votes, ablations, num_classes=1000, patch_sizes=patch_sizes)
    assert int((~found.undecided).argmax()) + 1 == expected
    assert not found.undecided[expected:].any()


@given(st.integers(1, 300))
def test_the_order_names_every_ablation_once_and_spreads(num_ablations):
    order = voting_order(num_ablations)
    assert sorted(order) == list(range(num_ablations))
    if num_ablations > 1:  # the second vote starts the other half
        assert order[:2].tolist() == [0, 2 ** ((num_ablations - 1).bit_length() - 1)]
    assert voting_order(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


def test_votes_that_are_no_votes_are_refused():
    ablations = Ablations(kind="columns", image_size=(3, 3), band=1, stride=1)
    with pytest.raises(ValueError, match="classes"):
        certify(np.array([[0, 1, UNSEEN]]), ablations, num_classes=2, patch_sizes=[1])
    with pytest.raises(ValueError, match="classes"):
        certify_partial(np.array([[0, 1, 2**16]]), ablations, num_classes=2, patch_sizes=[1])
    with pytest.raises(ValueError, match="at most"):
        certify_partial(np.array([[0, 1, 1]]), ablations, num_classes=2**16, patch_sizes=[1])
