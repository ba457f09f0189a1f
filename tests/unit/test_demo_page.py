"""The results page of `demo-cifar10`: made from the kept figures, shares never rounded up."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notebooks.replications import demo_cifar10
from notebooks.replications.runs import RESULTS

KEPT = RESULTS / "demo-cifar10.json"


def test_the_page_is_that_of_its_figures():
    made = demo_cifar10.render(json.loads(KEPT.read_text()))
    assert made == KEPT.with_suffix(".md").read_text()


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_a_share_is_cut_off_and_never_rounded_up(count, num_items):
    exact = Fraction(min(count, num_items), num_items)
    shown = Fraction(demo_cifar10.cut(float(exact))) / 100
    assert 0 <= exact - shown < Fraction(1, 1000)


@pytest.mark.parametrize("part", ["patch", "l2"])
def test_the_demo_certifies_and_its_certificates_are_sound(part):
    kept = json.loads(KEPT.read_text())["certificates"][part]
    first = kept["certified"][0]["accuracy"]
    assert kept["sound"]
    assert first["low"] > 0.1  # chance, of ten classes
    assert kept["challenge"]["broken_certified"] == 0
    values = [entry["accuracy"]["value"] for entry in kept["certified"]]
    assert values == sorted(values, reverse=True)


def test_the_robust_model_of_the_demo_is_better_than_chance():
    attacks = json.loads(KEPT.read_text())["attacks"]
    assert attacks["linf"]["main"]["robust_accuracy"]["low"] > 0.1
    assert attacks["linf"]["standard"]["robust_accuracy"]["value"] < 0.1
