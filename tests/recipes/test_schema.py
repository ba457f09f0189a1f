"""The JSON Schema for editors: it accepts what `lint` accepts, and knows every key."""

import copy
import json

import pytest
import yaml
from jsonschema import Draft202012Validator

from pipelines.recipe.load import available, find, load
from pipelines.recipe.schema.for_editors import json_schema
from pipelines.recipe.schema.meanings import described_schema
from tests.e2e.cli import call

MISSPELT = "xyzzy"


@pytest.fixture(scope="module")
def validator():
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def written(name):
    return yaml.safe_load(find(name).read_text(encoding="utf-8"))


def sections(values, *, path=()):
    """Every mapping whose keys the schema fixes, by its path."""
    if isinstance(values, list):
        for number, inner in enumerate(values):
            yield from sections(inner, path=(*path, number))
    if isinstance(values, dict):
        yield path
        for key, inner in values.items():
            if key not in FREE:
                yield from sections(inner, path=(*path, key))


FREE = ("options", "space", "limits", "compare")  # their keys belong to others


def with_unknown_key(values, path):
    changed = copy.deepcopy(values)
    place = changed
    for key in path:
        place = place[key]
    place[MISSPELT.upper()] = 1  # no name of a section either
    return changed


@pytest.mark.parametrize("name", available())
def test_ready_recipes_fit_as_written_and_resolved(validator, name):
    assert [error.message for error in validator.iter_errors(written(name))] == []
    assert [error.message for error in validator.iter_errors(load(name).resolved())] == []


@pytest.mark.parametrize("name", ["demo", "aas-vitb-trades", "uvit-analyze-in21k"])
def test_an_unknown_key_in_any_section_is_marked(validator, name):
    values = written(name)
    for path in sections(values):
        assert not validator.is_valid(with_unknown_key(values, path)), path


def test_wrong_values_are_marked_and_user_code_is_not(validator):
    base = {"name": "mine", "data": {"source": "mnist5k"}}
    attack = {"kind": "python:mine.py:Attack", "strength": 3}
    for good in ({"train": {"objective": attack}}, {"seed": 3, "train": {"epochs": None}}):
        assert validator.is_valid({**base, **good})
    for bad in (
        {"seed": -1},
        {"train": {"epochs": "many"}},
        {"train": {"objective": {"kind": "x"}}},
    ):
        assert not validator.is_valid({**base, **bad})
    assert not validator.is_valid({"name": "mine"})
    assert validator.is_valid({"name": "mine", "extends": "demo"})


def test_the_command_prints_it():
    told = call("recipes", "--schema")
    assert told.code == 0
    assert json.loads(told.out) == json_schema()


def test_every_key_has_a_meaning():
    """Below the field in its settings class; editors and the reference show it."""
    schema = described_schema()
    bare = {
        f"{name}.{key}"
        for name, one in {"Recipe": schema, **schema["$defs"]}.items()
        for key, value in one.get("properties", {}).items()
        if key != "kind" and not value.get("description")
    }
    assert not bare
