"""Evaluate models on test items: one suite per step, on the sharded executor.

Units are blocks of items, so a killed step continues in the middle of a suite, and results do not
depend on workers or order.
"""

from collections.abc import Mapping

from components.core.folders import Folder
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.evaluate import results
from pipelines.stages.evaluate.evaluation import of_step
from pipelines.stages.evaluate.suites import suite_of


def run(recipe: Recipe, inputs: Mapping[str, Folder], out: StageDir) -> None:
    """Evaluate the suite of the step; write its tables and its summary."""
    evaluation = of_step(recipe, inputs, out)
    results.write(evaluation, suite_of(evaluation.suite)(evaluation), out)
