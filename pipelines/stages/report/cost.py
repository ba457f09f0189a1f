"""Cost of the report: it computes no passes."""

from pipelines.recipe.costs import Question, StepCost
from pipelines.recipe.schema.recipe import Recipe

PAGE_BYTES = 1_000_000  # a page with its tables and cards: those of the demo take 1.4 MB


def costs_of(recipe: Recipe, asked: Question) -> list[StepCost]:
    """One page, and a card of every model."""
    num_models = len(recipe.model_names())
    return [
        StepCost(
            step="report",
            num_items=0,
            storage=PAGE_BYTES * (1 + num_models // 4),
            objects=1 + 2 * num_models,
            assumed=["tables of the report are not counted"],
        )
    ]
