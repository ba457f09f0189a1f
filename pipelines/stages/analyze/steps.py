"""Plan of the analyze stage: one step per study, and its headline figures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.core.errors import CasemateError
from components.core.settings import plain
from pipelines.recipe.schema.analyze import AnalyzeSection
from pipelines.stages.registry import DATASET, Headline, Planning, Step

JUDGE = "judge"  # steps of model folders that classify perturbations
ANALYZED = "analyzed_model"  # steps of further model folders that are analyzed
OF_BLOCKS = ("correlation", "lesions", "restricted_attention")  # studies that use `blocks`


def steps(planning: Planning) -> list[Step]:
    """A step for each study, after the models it needs."""
    recipe, section = planning.recipe, planning.recipe.analyze
    if section is None:
        return []
    models = recipe.analyzed_models()
    others = _folders(ANALYZED, "analyze.other_models", section.other_models)
    folders = section.perturbations.judges if section.perturbations else {}
    judges = _folders(JUDGE, "analyze.perturbations.judges", folders)
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


def _folders(stage: str, key: str, folders: Mapping[str, str]) -> list[Step]:
    """The steps of model folders; a folder counts by its digest."""
    found = []
    for name, path in folders.items():
        folder = Path(path).expanduser().absolute()
        try:
            from components.models.checkpoint import read_header

            digest = str(read_header(folder)["digest"])
        except CasemateError as error:
            raise CasemateError(f"{key}.{name}", error.value, error.remedy) from error
        found.append(Step(stage, name, identity={"digest": digest}, given=folder))
    return found
