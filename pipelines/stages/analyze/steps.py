"""Plan of the analyze stage: one step per study, and its headline figures."""

from functools import partial
from typing import Any

from components.core.settings import plain
from pipelines.recipe.schema.analyze import AnalyzeSection
from pipelines.stages.evaluate.steps import given_models
from pipelines.stages.registry import DATASET, Planning, Step, stored_headlines, stored_metrics

JUDGE = "judge"  # steps of model folders that classify perturbations
ANALYZED = "analyzed_model"  # steps of further model folders that are analyzed
OF_BLOCKS = ("correlation", "lesions", "restricted_attention")  # studies that use `blocks`


def steps(planning: Planning) -> list[Step]:
    """A step for each study, after the models it needs."""
    recipe, section = planning.recipe, planning.recipe.analyze
    if section is None:
        return []
    models = recipe.analyzed_models()
    others = given_models(ANALYZED, "analyze.other_models", section.other_models)
    folders = section.perturbations.judges if section.perturbations else {}
    judges = given_models(JUDGE, "analyze.perturbations.judges", folders)
    found = [*others, *judges]
    for study in section.studies():
        used = list(models)
        if study == "perturbations" and section.perturbations:
            used += [name for name in section.perturbations.judge_models if name not in models]
        needs = [DATASET, *(recipe.step_of(model) for model in used)]
        needs += [step.name for step in others]
        if study == "perturbations":
            needs += [step.name for step in judges]
        identity = {
            "study": study,
            "settings": _settings(section, study),
            "models": [*models, *section.other_models],
            "micro_batch": section.micro_batch,
            "seed": recipe.seed,
        }
        if study in OF_BLOCKS:
            identity["blocks"] = plain(section.blocks)
        found.append(Step("analyze", study, tuple(needs), identity))
    return found


headlines = stored_headlines
metrics = partial(stored_metrics, "analyze")


def _settings(section: AnalyzeSection, study: str) -> dict[str, Any]:
    """The settings of a study; judges count by their names, their content by their steps."""
    values: dict[str, Any] = plain(getattr(section, study))
    if "judges" in values:
        values["judges"] = sorted(values["judges"])
    return values
