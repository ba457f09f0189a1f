"""Patch rules against every attack there is, on cases small enough to try them all."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.certify.patch import RULES, certify_columns


def winner(votes):
    counts = Counter(votes)
    return min(counts, key=lambda c: (-counts[c], c))


def truly_robust(votes, *, width, band, stride, patch, num_classes):
    """Try every position and every reassignment of the bands it shows in."""
    starts = range(0, width, stride)
    bands = [{(start + i) % width for i in range(band)} for start in starts]
    before = winner(votes)
    for left in range(width - patch + 1):
        square = set(range(left, left + patch))
        touched = [k for k, columns in enumerate(bands) if columns & square]
        for values in product(range(num_classes), repeat=len(touched)):
            attacked = list(votes)
            for k, value in zip(touched, values, strict=True):
                attacked[k] = value
            if winner(attacked) != before:
                return False
    return True


def verdicts(votes, *, width, band, stride, patch, num_classes):
    return {
        rule: certify_columns(
            np.asarray(votes),
            num_classes=num_classes,
            image_width=width,
            band=band,
            stride=stride,
            patch_sizes=[patch],
            rule=rule,
        ).certified[:, 0]
        for rule in RULES
    }


@pytest.mark.parametrize(
    ("width", "band", "stride", "patch", "num_classes", "loc", "count", "strict"),
    [
        (6, 2, 1, 1, 3, 21, 21, 3),
        (8, 2, 1, 1, 2, 46, 46, 18),
        (9, 1, 1, 1, 3, 6285, 6285, 4773),
        (12, 1, 1, 1, 2, 2380, 2380, 1588),
        (7, 2, 2, 1, 3, 5, 1, 0),
        (9, 2, 2, 1, 3, 17, 3, 3),
        (16, 2, 3, 2, 3, 84, 21, 3),
    ],
)
def test_exhaustive_vote_tables(width, band, stride, patch, num_classes, loc, count, strict):
    num_bands = -(-width // stride)
    votes = np.array(list(product(range(num_classes), repeat=num_bands)))
    found = verdicts(
        votes, width=width, band=band, stride=stride, patch=patch, num_classes=num_classes
    )
    assert {rule: int(v.sum()) for rule, v in found.items()} == {
        "loc": loc,
        "count": count,
        "strict": strict,
    }


@st.composite
def small_votes(draw):
    width = draw(st.integers(2, 7))
    case = {
        "width": width,
        "band": draw(st.integers(1, min(3, width))),
        "stride": draw(st.integers(1, 3).filter(lambda s: s <= width)),
        "patch": draw(st.integers(1, min(3, width))),
        "num_classes": draw(st.integers(2, 4)),
    }
    num_bands = -(-width // case["stride"])
    # Mostly one class: uniform votes are hardly ever certified.
    common = draw(st.integers(0, case["num_classes"] - 1))
    vote = st.one_of(st.just(common), st.just(common), st.integers(0, case["num_classes"] - 1))
    return draw(st.lists(vote, min_size=num_bands, max_size=num_bands)), case


@settings(max_examples=150, deadline=None)
@given(small_votes())
def test_no_attack_changes_a_certified_prediction_and_loc_is_exact(drawn):
    votes, case = drawn
    found = {rule: bool(v[0]) for rule, v in verdicts([votes], **case).items()}
    robust = truly_robust(votes, **case)
    assert found["loc"] == robust
    assert not found["count"] or robust
    assert not found["strict"] or found["count"]


def test_the_rule_without_the_seam_would_be_wrong_here():
    votes = [0, 0, 0, 1, 0]  # a gap of 3 beats 2 * ceil((1+2-1)/2), yet column 0 flips two bands
    case = {"width": 9, "band": 2, "stride": 2, "patch": 1, "num_classes": 2}
    assert not truly_robust(votes, **case)
    assert not any(v[0] for v in verdicts([votes], **case).values())


def test_a_class_without_votes_can_still_win():
    # All bands say 1. One patch flips 2 of 4 votes to class 0, which wins the tie by its index.
    case = {"width": 4, "band": 2, "stride": 1, "patch": 1}
    assert not verdicts([[1, 1, 1, 1]], num_classes=2, **case)["loc"][0]
    assert verdicts([[0, 0, 0, 0]], num_classes=2, **case)["loc"][0]  # here the tie is ours
    assert not verdicts([[2, 2, 2, 2]], num_classes=1000, **case)["loc"][0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 5).flatmap(
        lambda c: st.tuples(st.just(c), st.lists(st.integers(0, c - 1), min_size=8, max_size=8))
    )
)
def test_counts_and_margin_by_hand(drawn):
    num_classes, votes = drawn
    claims = certify_columns(
        np.array([votes], dtype=np.uint16),
        num_classes=num_classes,
        image_width=8,
        band=1,
        stride=1,
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


@pytest.mark.parametrize(
    ("votes", "changes", "message"),
    [
        ([[0, 1]], {}, "expected"),
        ([[0, 1, 2]], {}, "classes"),
        ([[0, -1, 1]], {}, "classes"),
        ([[0.0, 1.0, 1.0]], {}, "integers"),
        ([[0, 1, 1]], {"rule": "paper"}, "rule"),
        ([[0, 0, 0]], {"num_classes": 1}, "num_classes"),
        ([[0, 1, 1]], {"patch_sizes": [4]}, "patch"),
    ],
)
def test_wrong_calls_are_refused(votes, changes, message):
    call = {"num_classes": 2, "image_width": 3, "band": 1, "stride": 1, "patch_sizes": [1]}
    with pytest.raises(ValueError, match=message):
        certify_columns(np.array(votes), **(call | changes))
