"""Plan of the attack stage: one step per entry, and its headline figures."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from components.core.folders import Folder
from components.core.shares import shown
from components.report.wording import pixels
from pipelines.stages.registry import DATASET, Headline, Planning, Step, headline


def steps(planning: Planning) -> list[Step]:
    """A step for each entry of the attack section."""
    recipe, found = planning.recipe, []
    for name, section in recipe.attack.items():
        surrogate = [section.surrogate] if section.surrogate else []
        models = dict.fromkeys([*section.models, *surrogate])
        needs = (DATASET, *(recipe.step_of(model) for model in models))
        identity = {"attack": section.model_dump(mode="json"), "seed": recipe.seed}
        found.append(Step("attack", name, needs, identity))
    return found


def headlines(steps: Sequence[tuple[Step, Folder | None]]) -> list[Headline]:
    """Clean accuracy of each model, and accuracy after each line of the attack list."""
    folders = [folder for _, folder in steps if folder]
    rows = [_headlines(json.loads((folder / "summary.json").read_text())) for folder in folders]
    return [row for found in rows for row in found]


def metrics(finished: Mapping[str, Folder]) -> dict[str, float]:
    """Accuracy of each model without and under all attacks."""
    values = {}
    for part, folder in finished.items():
        models = json.loads((folder / "summary.json").read_text())["models"]
        for model, summary in models.items():
            for name in ("clean_accuracy", "robust_accuracy"):
                values[f"attack/{part}/{model}/{name}"] = float(summary[name]["value"])
    return values


def _headlines(result: Mapping[str, Any]) -> list[Headline]:
    """The rows of one entry; the last row of a model has its verdict."""
    norm, eps = result["threat"]["kind"], result["threat"]["eps"]
    budget = norm if eps is None else f"{norm} {pixels(eps)}"
    if precision := result["threat"].get("precision"):
        budget += f", {precision}"
    rows: list[Headline] = []
    for model, summary in result["models"].items():
        clean = f"clean, {precision}" if precision else "clean"
        rows.append(headline(clean, model, shown(summary["clean_accuracy"])))
        left = {attack["entry"]: attack["robust_accuracy"] for attack in summary["attacks"]}
        rows += [
            headline(f"{entry} {budget}", model, shown(value)) for entry, value in left.items()
        ]
        if sanity := summary.get("sanity"):
            rows[-1] |= {"verdict": sanity["verdict"], "reasons": sanity["reasons"]}
    return rows
