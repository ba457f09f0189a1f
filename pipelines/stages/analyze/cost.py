"""Cost estimates of the studies of a recipe: forward passes, FLOPs, hours; no weights are read.

Variants of a network share the blocks before their first difference; `least_passes` counts the
blocks that run. Passes of judges, two per item and judge, count like those of the models.
"""

from collections.abc import Sequence
from itertools import pairwise

from components.analyze.blocks import Blocks, find_blocks
from components.analyze.lesions import lesions_of
from components.analyze.prefixes import Variant, num_shared, shared_order
from components.analyze.restricted import restrictions_of
from pipelines.recipe.costs import CostedNetwork, Question, StepCost
from pipelines.recipe.model_costs import folder_costs, model_cost, num_test_items
from pipelines.recipe.schema.analyze import AnalyzeSection
from pipelines.recipe.schema.recipe import Recipe
from pipelines.stages.evaluate.cost import SuiteWork, step_cost


def costs_of(recipe: Recipe, asked: Question) -> list[StepCost]:
    """One step per study: items, passes, FLOPs, memory."""
    section = recipe.analyze
    if section is None:
        return []
    models = [model_cost(recipe, name) for name in recipe.analyzed_models()]
    models += folder_costs("analyze.other_models", section.other_models)
    found = []
    for study in section.studies():
        works = [_work(recipe, section, study, model, asked) for model in models]
        step, size = f"analyze.{study}", section.micro_batch
        found.append(step_cost(step, _mean(works), models, asked, micro_batch=size, recipe=recipe))
    return found


def _mean(works: Sequence[SuiteWork]) -> SuiteWork:
    """The work of a model on average."""
    count = len(works)
    return SuiteWork(
        works[0].num_items,
        round(sum(work.passes for work in works) / count),
        gradients=round(sum(work.gradients for work in works) / count),
        least_share=sum(work.least_share for work in works) / count,
    )


def _work(
    recipe: Recipe, section: AnalyzeSection, study: str, model: CostedNetwork, asked: Question
) -> SuiteWork:
    """The work of one study for one model."""
    if section.accumulation and study == "accumulation":
        images = section.accumulation.num_images
        return SuiteWork(images, 2 * images, gradients=images * section.accumulation.num_steps)
    subset = getattr(section, study).subset
    count = num_test_items(recipe, subset, asked, key=f"analyze.{study}")
    if section.gaps and study == "gaps":
        passes = 2 if section.gaps.search is None else 4  # clean and attacked, before and after
        return SuiteWork(count, passes * count, gradients=count * section.gaps.num_steps)
    if section.perturbations and study == "perturbations":
        how = section.perturbations
        passes = 2 * (len(how.judges) + len(how.judge_models))
        return SuiteWork(count, passes * count, gradients=count * how.num_steps)
    if study == "correlation":
        return SuiteWork(count, count)
    variants = _variants(section, study, find_blocks(model.net, section.blocks), seed=recipe.seed)
    return SuiteWork(count, count * len(variants), least_share=_share_run(variants))


def _variants(section: AnalyzeSection, study: str, blocks: Blocks, *, seed: int) -> list[Variant]:
    depth = len(blocks.sites)
    if section.lesions and study == "lesions":
        return [one.variant(depth) for one in lesions_of(blocks, section.lesions, seed=seed)]
    assert section.restricted_attention is not None
    return [one.variant for one in restrictions_of(blocks, section.restricted_attention, seed=seed)]


def _share_run(variants: Sequence[Variant]) -> float:
    """Share of the blocks of plain passes that run when prefixes are shared."""
    depth = len(variants[0])
    order = [variants[index] for index in shared_order(variants)]
    run = depth + sum(depth - num_shared(one, other) for one, other in pairwise(order))
    return run / (depth * len(variants))
