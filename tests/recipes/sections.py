"""Small recipes with one section under test."""

from typing import Any

from pipelines.recipe.check import check
from pipelines.recipe.load import parse
from pipelines.recipe.schema.recipe import Recipe
from tests.refusals import refusal_of


def certified_by(settings: str) -> str:
    """The override that gives a recipe this certificate, named p."""
    return f"certify={{p: {{{settings}}}}}"


def recipe_with(
    stage: str, section: object, *, model: object, data: Any = None, **changes: Any
) -> Recipe:
    """A recipe that trains `model` and has this section; None: none."""
    values = {"name": "x", "data": data or {"source": "mnist5k"}, "model": model, "train": {}}
    own = {} if section is None else {stage: section}
    return parse({**values, **own, **changes}, source="x.yaml")


def refused_with(stage: str, section: object, **options: Any) -> str:
    """The line with which such a recipe is refused, when it is read or by the gate."""
    line = refusal_of(lambda: check(recipe_with(stage, section, **options)))
    return line.removeprefix("x.yaml: ")
