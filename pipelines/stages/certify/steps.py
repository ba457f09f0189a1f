"""Plan of the certify stage: one step per certificate, and its headline figures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from components.core.folders import Folder
from components.core.shares import shown
from pipelines.stages.registry import DATASET, Headline, Planning, Step, headline


def steps(planning: Planning) -> list[Step]:
    """A step for each certificate, after the denoiser on disk that it names."""
    recipe = planning.recipe
    found: list[Step] = []
    for name, entry in recipe.certificates().items():
        section = entry.section
        needs = [DATASET, recipe.step_of(section.model)]
        if entry.finer:
            needs.append(f"certify.{entry.finer}")
        if behind := recipe.certified_behind(section):
            needs.append(f"train.{behind}")
        elif source := section.denoiser_on_disk:
            folder = Path(source.partition(":")[2]).expanduser().absolute()
            digest = _source_digest(source)
            found.append(Step("denoiser", name, identity={"digest": digest}, given=folder))
            needs.append(found[-1].name)
        identity = {"certify": section.identity(_source_digest), "seed": recipe.seed}
        found.append(Step("certify", name, tuple(needs), identity))
    return found


def _source_digest(source: str) -> str:
    """The content of a denoiser on disk."""
    from components.denoising.loading import source_digest

    return source_digest(source)


def headlines(steps: Sequence[tuple[Step, Folder | None]]) -> list[Headline]:
    """Accuracy of each smoothed classifier, and its certified accuracies."""
    models = [_model_of(step) for step, _ in steps]
    rows: list[Headline] = []
    for (step, folder), model in zip(steps, models, strict=True):
        if folder:
            which = f", {step.part}" if models.count(model) > 1 else ""
            rows += _headlines(folder, model, which)
    return rows


def metrics(finished: Mapping[str, Folder]) -> dict[str, float]:
    """The figures of each certificate."""
    from components.certify.registry import family_of

    values: dict[str, float] = {}
    for part, folder in finished.items():
        document = json.loads((folder / "certificate.json").read_text())
        found = family_of(document["kind"]).metrics(document["summary"])
        values |= {f"certify/{part}/{name}": value for name, value in found.items()}
    return values


def _model_of(step: Step) -> str:
    certify = step.identity["certify"]
    assert isinstance(certify, Mapping)
    return str(certify["model"])


def _headlines(folder: Folder, model: str, which: str) -> list[Headline]:
    """The rows of one certificate; `which` names it where a model has several."""
    from components.certify.registry import family_of

    document = json.loads((folder / "certificate.json").read_text())
    summary = document["summary"]
    rows = [headline(f"smoothed, clean{which}", model, shown(summary["standard_accuracy"]))]
    if label := summary.get("prediction_accuracy"):
        rows.append(headline(f"smoothed, label alone{which}", model, shown(label)))
    doubt = which if document["sound"] else f"{which} (not sound)"
    for entry in summary["certified"]:
        at = family_of(document["kind"]).budget_text(entry)
        rows.append(headline(f"certified {at}{doubt}", model, shown(entry["accuracy"])))
        rows[-1]["kind"] = "proven"
    return rows
