"""Evaluate models on test items, suite by suite."""

from collections.abc import Mapping
from pathlib import Path

from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir


def run(recipe: Recipe, inputs: Mapping[str, Path], out: StageDir) -> None:
    raise NotImplementedError(out.part)
