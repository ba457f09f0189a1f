"""Digests, fingerprints and estimates as they were recorded: a refactoring moves none of them.

`record.py` says what is recorded and how it is renewed.
"""

import os
from contextlib import chdir
from pathlib import Path

import pytest

from tests.golden import adapter, standins
from tests.golden.documents import read_json
from tests.golden.layout import ESTIMATES, RECIPES
from tests.golden.record import estimates_record, recipe_files, recipes_record

RECORDED = read_json(RECIPES)


@pytest.fixture(scope="module")
def recipes_now(tmp_path_factory):
    return recipes_record(tmp_path_factory.mktemp("recipes"))


def test_every_recipe_is_recorded():
    assert sorted(recipe_files()) == sorted(RECORDED)


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_recipes_keep_their_digests_and_fingerprints(name, recipes_now):
    assert recipes_now[name] == RECORDED[name]


def planned(root: Path, *, order: int, age: int, text: str = "") -> list[dict[str, str]]:
    """Fingerprints of recipes that read data, weights and denoisers, with stand-ins in `root`."""
    recipes = [adapter.load_recipe(recipe_files()[n]) for n in ("dds-ft-vit", "golden/given")]
    places = [p for recipe in recipes for p in standins.places_of(adapter.resolved(recipe))]
    for place in places[::order]:
        standins.make(place, root)
    if text:
        (root / "data" / "cifar10" / "labels.txt").write_text(text)
    for path in root.rglob("*"):
        os.utime(path, (age, age))
    with chdir(root):
        return [adapter.fingerprints(recipe, root) for recipe in recipes]


def test_fingerprints_depend_on_content_alone(tmp_path):
    """Not on the place of the files, their age, or the order in which they were written."""
    here = planned(tmp_path / "here", order=1, age=1)
    assert planned(tmp_path / "else" / "where", order=-1, age=2) == here
    changed = planned(tmp_path / "changed", order=1, age=1, text="other labels")
    kept = [step for step, mark in changed[0].items() if mark == here[0][step]]
    assert all(step.startswith("denoiser.") for step in kept)  # weights, as they were
    assert changed[1] == here[1]  # reads no such file


def test_estimates_stay():
    assert estimates_record() == read_json(ESTIMATES)
