"""Cost of a prepared dataset: what it stores, and the time to encode its images."""

from components.core.errors import CasemateError
from pipelines.recipe.costs import (
    Question,
    StepCost,
    Work,
    image_bytes,
    known_splits,
    unknown_step,
)
from pipelines.recipe.schema.recipe import Recipe


def costs_of(recipe: Recipe, asked: Question) -> list[StepCost]:
    """The one step that writes all splits."""
    try:
        return [_step(recipe, asked)]
    except CasemateError as error:
        return [unknown_step("prepare", error)]


def _step(recipe: Recipe, asked: Question) -> StepCost:
    splits = known_splits(recipe, asked)
    counts = [count for count in splits.values() if count is not None]
    if len(counts) < len(splits) and (recipe.train or not counts):
        remedy = "is not known without the data; give --items N and --train-items N"
        raise CasemateError("data.limits", "", remedy)
    num_items, shard = sum(counts), recipe.data.shard_size
    return StepCost(
        step="prepare",
        num_items=num_items,
        works=[
            Work(
                what="images",
                most=num_items,
                least=num_items,
                flops=0.0,
                probe=lambda lab: lab.encoding(recipe),
            )
        ],
        storage=num_items * image_bytes(recipe),
        objects=1 + sum(-(-count // shard) for count in counts),
        assumed=["images take as much as their pixels, the most that PNG does"],
    )
