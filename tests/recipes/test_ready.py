"""Ready recipes: each one loads, is free of warnings, and resolves to its reviewed snapshot.

A changed default or recipe shows up here as a changed snapshot. To renew them after review:
`CASEMATE_RENEW_SNAPSHOTS=1 pytest tests/recipes`.
"""

import os
from pathlib import Path

import pytest
import yaml

from pipelines.lint import warnings_of
from pipelines.recipe import RECIPES, available, headline, load, loads

SNAPSHOTS = Path(__file__).parent / "snapshots"
RENEW = "renew with CASEMATE_RENEW_SNAPSHOTS=1 pytest tests/recipes, and review the difference"


@pytest.mark.parametrize("name", available())
def test_resolved_recipe_equals_its_snapshot(name):
    snapshot = SNAPSHOTS / f"{name}.yaml"
    found = load(name).to_yaml()
    if os.environ.get("CASEMATE_RENEW_SNAPSHOTS"):
        snapshot.write_text(found, encoding="utf-8")
    assert snapshot.is_file(), f"no snapshot of {name}: {RENEW}"
    assert found == snapshot.read_text(encoding="utf-8"), RENEW


def test_no_snapshot_outlives_its_recipe():
    assert sorted(path.stem for path in SNAPSHOTS.glob("*.yaml")) == available()


@pytest.mark.parametrize("name", available())
def test_ready_recipe_survives_yaml(name):
    recipe = load(name)
    again = loads(recipe.to_yaml(), source=name)
    assert again == recipe
    assert again.digest() == recipe.digest()


@pytest.mark.parametrize("name", available())
def test_ready_recipe_has_no_warnings(name):
    assert warnings_of(load(name)) == []


@pytest.mark.parametrize("name", available())
def test_ready_recipe_says_what_it_is(name):
    assert load(name).name == name
    assert len(headline(name)) > 20
    written = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    assert not written.keys() & {"cluster", "storage", "tracking"}  # where it runs is the user's


def numbers(values, *, path=()):
    """Every number of a nested value by its path."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from numbers(value, path=(*path, key))
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield path, values


@pytest.mark.parametrize("name", available())
def test_smoke_shrinks_and_keeps_the_chain(name):
    full, smoke = load(name), load(name, smoke=True)
    assert smoke.model_names() == full.model_names()
    assert smoke.attack.keys() == full.attack.keys()
    assert smoke.certify.keys() == full.certify.keys()
    assert smoke.data.limits.keys() == {"train", "val", "test"}
    assert sum(smoke.data.limits.values()) <= 264
    assert smoke.digest() != full.digest()
    before = dict(numbers(full.resolved()))
    grown = {path for path, value in numbers(smoke.resolved()) if value > before.get(path, value)}
    assert not grown
    sizes = [c.num_items for c in [*smoke.attack.values(), *smoke.certify.values()]]
    assert all(size is not None and size <= 16 for size in sizes)


def test_smoke_caps_what_was_left_open():
    text = """
    name: open
    data: {source: digits, limits: {train: 50}}
    train: {epochs: 300}
    attack:
      linf:
        eps: 0.1
        attacks: [{kind: autoattack}, {kind: aas, inner: {kind: pgd}}]
        curves: {steps: [1, 3, 10, 100]}
    certify: {l2: {kind: gaussian, sigma: 0.25, block_size: 1000, micro_batch: 40}}
    """
    smoke = loads(text, source="open", smoke=True)
    attack = smoke.attack["linf"]
    assert attack.num_items == attack.sanity.num_items == attack.curves.num_items == 16
    assert (attack.attacks[0].num_steps, attack.attacks[0].num_queries) == (3, 50)
    assert attack.attacks[1].inner.num_steps == 3  # sections inside lists shrink, too
    assert attack.curves.steps == [1, 3]
    assert smoke.data.limits["train"] == 50  # what is smaller stays
    assert smoke.train.epochs == 2
    assert smoke.certify["l2"].block_size == 80  # the largest multiple of 40 below the cap
