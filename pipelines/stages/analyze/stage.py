"""Analyze models on test items: one study per step, on the sharded executor.

Units are blocks of items. Their results are merged in the order of the units, so a killed step
continues in the middle of a study, and results do not depend on workers.
"""

from collections.abc import Mapping

from components.core.folders import Folder
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.analyze import results
from pipelines.stages.analyze.analysis import of_step
from pipelines.stages.analyze.studies import study_of


def run(recipe: Recipe, inputs: Mapping[str, Folder], out: StageDir) -> None:
    """Make the study that the step names; write its tables, arrays and summary."""
    analysis = of_step(recipe, inputs, out)
    results.write(analysis, study_of(out.part)(analysis), out)
