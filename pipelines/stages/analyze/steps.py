"""Plan of the analyze stage: one step per study, and its headline figures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.analyze.settings import PerturbationSettings
from components.core.errors import CasemateError
from components.core.settings import plain
from pipelines.recipe.schema.analyze import AnalyzeSection
from pipelines.stages.registry import DATASET, Headline, Planning, Step

JUDGE = "judge"  # steps of model folders that classify perturbations
OF_BLOCKS = ("correlation", "lesions", "restricted_attention")  # studies that use `blocks`


def steps(planning: Planning) -> list[Step]:
    """A step for each study, after the models it needs."""
    recipe, section = planning.recipe, planning.recipe.analyze
    if section is None:
        return []
    models = recipe.analyzed_models()
    judges = _judges(section.perturbations)
    found = list(judges)
    for study in section.studies():
        used = list(models)
        if study == "perturbations" and section.perturbations:
            used += [name for name in section.perturbations.judge_models if name not in models]
        needs = [DATASET, *(recipe.step_of(model) for model in used)]
        if study == "perturbations":
            needs += [step.name for step in judges]
        identity = {
            "study": study,
            "settings": _settings(section, study),
            "models": models,
            "micro_batch": section.micro_batch,
            "seed": recipe.seed,
        }
        if study in OF_BLOCKS:
            identity["blocks"] = plain(section.blocks)
        found.append(Step("analyze", study, tuple(needs), identity))
    return found


def headlines(steps: Sequence[tuple[Step, Path | None]]) -> list[Headline]:
    """The main figures of each study and model."""
    folders = [folder for _, folder in steps if folder]
    rows = [json.loads((folder / "summary.json").read_text())["headlines"] for folder in folders]
    return [row for found in rows for row in found]


def _settings(section: AnalyzeSection, study: str) -> dict[str, Any]:
    """The settings of a study; judges count by their names, their content by their steps."""
    values: dict[str, Any] = plain(getattr(section, study))
    if "judges" in values:
        values["judges"] = sorted(values["judges"])
    return values


def _judges(how: PerturbationSettings | None) -> list[Step]:
    """The judges of perturbations; a folder counts by its digest."""
    found = []
    for name, path in how.judges.items() if how else ():
        folder = Path(path).expanduser().absolute()
        try:
            from components.models.checkpoint import read_header

            digest = str(read_header(folder)["digest"])
        except CasemateError as error:
            key = f"analyze.perturbations.judges.{name}"
            raise CasemateError(key, error.value, error.remedy) from error
        found.append(Step(JUDGE, name, identity={"digest": digest}, given=folder))
    return found
