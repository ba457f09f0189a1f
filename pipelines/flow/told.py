"""What the flow's own run in MLflow shows: the result, without opening the runs of its steps.

All of it is read from finished steps, so a flow whose steps were finished before is complete, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from components.core.folders import Folder, fetched
from components.core.secrets import redacted
from components.report.content import Accuracy
from pipelines.flow.plan import PlannedStep
from pipelines.flow.sharing import is_own
from pipelines.flow.summary import metrics, summary
from pipelines.recipe.schema.recipe import Recipe
from pipelines.stages.registry import DATASET, STAGES, Headline, Stage

if TYPE_CHECKING:
    from pipelines.runtime.step_run import StepRun

REPORT, CARDS = "report", "cards"  # step, and the folder in it that has the model cards
PROVEN = "certified "  # how the headline of a certificate begins: its share is rounded down
TABLE = "| model | figure | accuracy | 95 % interval | items |\n|---|---|---:|---:|---:|"


def tell(run: "StepRun", recipe: Recipe, steps: Sequence[PlannedStep]) -> None:
    """Bring the run of a flow up to date with its finished steps; may be repeated."""
    finished = [step for step in steps if step.finished]
    if prepared := next((step for step in finished if step.name == DATASET), None):
        tell_dataset(run, recipe, prepared.contents(), context="flow")
    rows = summary(finished)
    run.results(metrics(finished))
    run.note(_note(recipe, rows))
    report = next((step for step in finished if step.name == REPORT), None)
    if report:
        _attach(run, fetched(report.contents()))
    for step in finished:
        if report and step.step.stage == "train":
            continue  # the report has made its model card the description
        if is_own(step) and (manifest := step.manifest()) and (text := _about(recipe, step, rows)):
            run.describe_model(manifest.mlflow_run_id, text)


def _attach(run: "StepRun", report: Path) -> None:
    """The report and the model cards, where they can be opened at once."""
    run.artifacts(report / "report.html")
    run.artifacts(*sorted((report / CARDS).glob("*.*")), folder=CARDS)


def begin(run: "StepRun", recipe: Recipe) -> None:
    """What is known before the first step: a few parameters, and the recipe with every default."""
    run.params(headline_parameters(recipe))
    resolved = redacted(recipe.resolved())
    run.text("recipe.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))


def tell_dataset(run: "StepRun", recipe: Recipe, prepared: Folder, *, context: str) -> None:
    """Tie a run to the prepared images by their digest."""
    from components.data.prepared import PreparedDataset
    from pipelines.runtime.run_origin import DATASET_TAG

    dataset = PreparedDataset.open(prepared)
    run.dataset(
        name=recipe.data.source,
        digest=dataset.digest,
        source=str(prepared),
        context=context,
        profile={"splits": dataset.splits, "classes": len(dataset.classes)},
    )
    run.origin({DATASET_TAG: dataset.digest})


def headline_parameters(recipe: Recipe) -> dict[str, Any]:
    """What tells flows apart in a table; every step's run has the parameters of its own."""
    found: dict[str, Any] = {
        "seed": recipe.seed,
        "data.source": recipe.data.source,
    }
    if given := recipe.given_model():
        found["model.pretrained"] = str(given)  # its own model.json says the architecture
    else:
        found["model.architecture"] = recipe.model.architecture
    if recipe.train:
        found["train.objective.kind"] = recipe.train.objective.kind
        found["train.epochs"] = recipe.train.epochs
    for name, attack in recipe.attack.items():
        found[f"attack.{name}.norm"] = attack.norm
        found[f"attack.{name}.eps"] = attack.eps
    for name, certificate in recipe.certify.items():
        found[f"certify.{name}.kind"] = certificate.kind
    return {key: value for key, value in found.items() if value is not None}


def step_parameters(stage: Stage, identity: Mapping[str, object]) -> dict[str, object]:
    """What the result of a step depends on, under the names of the recipe's keys.

    A training and a trial have the same names, so that MLflow compares them.
    """
    named: dict[str, object] = {}
    below: dict[str, object] = {}
    for key, value in identity.items():
        if key == stage.section and isinstance(value, Mapping):
            below |= value
        elif key in ("seed", "model", "train"):  # sections that a stage repeats
            named[key] = value
        else:
            below[key] = value
    return {**named, stage.section: below} if below else named


def _note(recipe: Recipe, rows: Iterable[Headline]) -> str:
    """The summary as Markdown."""
    lines = [f"Flow of the Casemate recipe **{recipe.name}**, seed {recipe.seed}.", ""]
    if table := [_row(row) for row in rows]:
        lines += [TABLE, *table, ""]
    doubts = [row for row in rows if row.get("verdict") == "suspect"]
    lines += [f"Suspect: {row['model']}: {'; '.join(row['reasons'])}" for row in doubts]
    lines += [
        "Artifacts: `report.html`, model cards, `recipe.yaml`. Runs of the steps are nested below."
    ]
    return "\n".join(lines)


def _about(recipe: Recipe, step: PlannedStep, rows: Iterable[Headline]) -> str:
    """What is known about the model that a step has registered; empty if it registers none."""
    part = step.step.part
    if step.step.stage == "train" and part not in recipe.denoisers():
        own, what = [row for row in rows if row["model"] == part], f"Model {part}"
    elif step.step.stage == "certify":
        stage = STAGES["certify"].steps()
        own = stage.headlines([(step.step, step.contents())])
        what = f"Smoothed classifier of the certificate {part}"
    else:
        return ""
    title = f"{what} of the recipe {recipe.name}."
    return "\n".join([title, "", TABLE, *map(_row, own)]) if own else title


def _row(row: Headline) -> str:
    share = Accuracy.parse(row, where=row["what"])
    value = share.percent("proven" if row["what"].startswith(PROVEN) else "attacked")
    return f"| {row['model']} | {row['what']} | {value} | {share.interval()} | {share.num_items} |"
