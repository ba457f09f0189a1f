"""Plan of the tune stage: one step for all trials."""

import json
from collections.abc import Mapping

from components.core.folders import Folder
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


def metrics(finished: Mapping[str, Folder]) -> dict[str, float]:
    """The figure of the best trial."""
    values = {}
    for folder in finished.values():
        table = json.loads((folder / "trials.json").read_text())
        values[f"tune/best_{table['metric']}"] = float(table["rows"][0][table["metric"]]["value"])
    return values
