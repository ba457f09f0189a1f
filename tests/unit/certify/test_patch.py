"""Patch rules against every attack there is, on cases small enough to try them all."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.certify.patch.rules import RULES, certify
from components.core.errors import CasemateError
from components.data.ablation import KINDS, Ablations


def winner(votes):
    counts = Counter(votes)
    return min(counts, key=lambda c: (-counts[c], c))


def truly_robust(votes, ablations, patch, *, num_classes):
    """Try every position and every reassignment of the ablations whose masks show it."""
    masks, before = ablations.masks().numpy(), winner(votes)
    (height, width), (tall, wide) = ablations.image_size, patch
    for top, left in product(range(height - tall + 1), range(width - wide + 1)):
        shown = masks[:, top : top + tall, left : left + wide].any(axis=(1, 2))
        touched = np.flatnonzero(shown)
        for values in product(range(num_classes), repeat=len(touched)):
            attacked = list(votes)
            for k, value in zip(touched, values, strict=True):
                attacked[k] = value
            if winner(attacked) != before:
                return False
    return True


def columns(width, band, stride):
    return Ablations(kind="columns", image_size=(width, width), band=band, stride=stride)


def verdicts(votes, ablations, patch, *, num_classes):
    return {
        rule: certify(
            np.asarray(votes), ablations, num_classes=num_classes, patch_sizes=[patch], rule=rule
        ).certified[:, 0]
        for rule in RULES
    }


@pytest.mark.parametrize(
    ("width", "band", "stride", "patch", "num_classes", "loc", "count", "strict", "reference"),
    [
        (6, 2, 1, 1, 3, 21, 21, 3, 3),
        (8, 2, 1, 1, 2, 46, 46, 18, 18),
        (9, 1, 1, 1, 3, 6285, 6285, 4773, 4773),
        (12, 1, 1, 1, 2, 2380, 2380, 1588, 1588),
        (7, 2, 2, 1, 3, 5, 1, 0, 3),
        (9, 2, 2, 1, 3, 17, 3, 3, 33),
        (16, 2, 3, 2, 3, 84, 21, 3, 129),
    ],
)
def test_exhaustive_vote_tables(
    width, band, stride, patch, num_classes, loc, count, strict, reference
):
    ablations = columns(width, band, stride)
    votes = np.array(list(product(range(num_classes), repeat=len(ablations))))
    found = verdicts(votes, ablations, patch, num_classes=num_classes)
    assert {rule: int(v.sum()) for rule, v in found.items()} == {
        "loc": loc,
        "count": count,
        "strict": strict,
    }
    published = certify(
        votes,
        ablations,
        num_classes=num_classes,
        patch_sizes=[patch],
        rule="strict",
        delta_rule="paper_reference",
    )
    assert published.certified.sum() == reference  # above `loc`: it certifies what can be broken


@st.composite
def small_votes(draw):
    kind = draw(st.sampled_from(KINDS))
    limit = {"columns": 7, "rows": 7, "blocks": 4, "both": 4}[kind]
    image_size = draw(st.integers(2, limit)), draw(st.integers(2, limit))
    side = st.integers(1, min(2, *image_size))
    stride = draw(st.integers(1 if kind in ("columns", "rows") else 2, min(3, *image_size)))
    ablations = Ablations(kind=kind, image_size=image_size, band=draw(side), stride=stride)
    num_classes = draw(st.integers(2, 3))
    # Mostly one class: uniform votes are hardly ever certified.
    common = draw(st.integers(0, num_classes - 1))
    vote = st.one_of(st.just(common), st.just(common), st.integers(0, num_classes - 1))
    votes = draw(st.lists(vote, min_size=len(ablations), max_size=len(ablations)))
    return votes, ablations, (draw(side), draw(side)), num_classes


@settings(max_examples=150, deadline=None)
@given(small_votes())
def test_no_attack_changes_a_certified_prediction_and_loc_is_exact(drawn):
    votes, ablations, patch, num_classes = drawn
    found = {
        rule: bool(v[0])
        for rule, v in verdicts([votes], ablations, patch, num_classes=num_classes).items()
    }
    robust = truly_robust(votes, ablations, patch, num_classes=num_classes)
    assert found["loc"] == robust
    assert not found["count"] or robust
    assert not found["strict"] or found["count"]


@pytest.mark.parametrize(
    ("shape", "patch", "votes"),
    [
        ((7, 2, 2), 1, [1, 1, 1, 1]),
        ((9, 2, 2), 1, [0, 0, 0, 1, 0]),  # a gap of 3 beats 2 * 1, yet column 0 flips two bands
        ((16, 2, 3), 2, [0, 0, 0, 1, 2, 0]),
    ],
)
def test_the_rule_without_the_seam_would_be_wrong_here(shape, patch, votes):
    ablations = columns(*shape)
    published = certify(
        np.array([votes]), ablations, num_classes=3, patch_sizes=[patch], rule="strict",
        delta_rule="paper_reference",
    )  # fmt: skip
    assert published.certified[0, 0]
    assert not truly_robust(votes, ablations, (patch, patch), num_classes=3)
    assert not any(v[0] for v in verdicts([votes], ablations, patch, num_classes=3).values())


def test_a_class_without_votes_can_still_win():
    # All bands say 1. One patch flips 2 of 4 votes to class 0, which wins the tie by its index.
    ablations = columns(4, 2, 1)
    assert not verdicts([[1, 1, 1, 1]], ablations, 1, num_classes=2)["loc"][0]
    assert verdicts([[0, 0, 0, 0]], ablations, 1, num_classes=2)["loc"][0]  # here the tie is ours
    assert not verdicts([[2, 2, 2, 2]], ablations, 1, num_classes=1000)["loc"][0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 5).flatmap(
        lambda c: st.tuples(st.just(c), st.lists(st.integers(0, c - 1), min_size=8, max_size=8))
    )
)
def test_counts_and_margin_by_hand(drawn):
    num_classes, votes = drawn
    claims = certify(
        np.array([votes], dtype=np.uint16),
        columns(8, 1, 1),
        num_classes=num_classes,
        patch_sizes=[1, 2],
    )
    counts = Counter(votes)
    best = winner(votes)
    rivals = [c for c in range(num_classes) if c != best]
    second = min(rivals, key=lambda c: (-counts[c], c))
    assert (claims.prediction[0], claims.top_votes[0]) == (best, counts[best])
    assert (claims.runner_up[0], claims.runner_up_votes[0]) == (second, counts[second])
    assert claims.margin[0] == min(counts[best] - counts[c] - (c < best) for c in rivals)
    assert claims.certified[0].tolist() == [claims.margin[0] >= 2, claims.margin[0] >= 4]


@pytest.mark.parametrize("rule", RULES)
def test_all_patch_sizes_at_once_and_never_more_for_a_larger_patch(rule):
    rng = np.random.default_rng(3)
    votes = np.where(rng.random((40, 16)) < 0.85, 1, rng.integers(0, 4, (40, 16)))
    ablations, sizes = columns(16, 3, 1), [1, 2, 3, 4]
    together = certify(votes, ablations, num_classes=4, patch_sizes=sizes, rule=rule).certified
    for column, size in enumerate(sizes):
        alone = certify(votes, ablations, num_classes=4, patch_sizes=[size], rule=rule).certified
        assert np.array_equal(together[:, column], alone[:, 0])
    assert 0 < together.sum() < together.size
    assert (together[:, :-1] >= together[:, 1:]).all()


@pytest.mark.parametrize(
    ("votes", "changes", "message"),
    [
        ([[0, 1]], {}, "expected"),
        ([[0, 1, 2]], {}, "classes"),
        ([[0, -1, 1]], {}, "classes"),
        ([[0.0, 1.0, 1.0]], {}, "integers"),
        ([[0, 0, 0]], {"num_classes": 1}, "num_classes"),
    ],
)
def test_wrong_calls_are_refused(votes, changes, message):
    call = {"num_classes": 2, "patch_sizes": [1]}
    with pytest.raises(ValueError, match=message):
        certify(np.array(votes), columns(3, 1, 1), **(call | changes))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rule": "paper"}, "certify.rule: paper is not one of strict, count, loc"),
        ({"patch_sizes": [4]}, "certify.patch_sizes: 4 does not fit into the image, 3x3 pixels"),
        ({"delta_rule": "printed"}, "certify.delta_rule: printed is not one of exact, paper_ref"),
        ({"rule": "loc", "delta_rule": "paper_reference"}, "certify.delta_rule: paper_reference"),
    ],
)
def test_what_a_user_can_mend_is_said_in_one_line(changes, line):
    call = {"num_classes": 2, "patch_sizes": [1]}
    with pytest.raises(CasemateError) as caught:
        certify(np.array([[0, 1, 1]]), columns(3, 1, 1), **(call | changes))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
