"""Plan of the tune stage: one step for all trials."""

from components.core.settings import plain
from pipelines.stages.registry import DATASET, Planning, Step
from pipelines.stages.train.steps import model_identity


def steps(planning: Planning) -> list[Step]:
    """The search, if the recipe has one."""
    recipe = planning.recipe
    if recipe.tune is None:
        return []
    identity = {
        "model": model_identity(recipe.model),
        "seed": recipe.seed,
        "train": plain(recipe.train, exclude={"variants"}) if recipe.train else None,
        "tune": recipe.tune.model_dump(mode="json"),
    }
    return [Step("tune", "", (DATASET,), identity)]
