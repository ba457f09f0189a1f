"""Report: finished folders to one HTML page and its tables as CSV."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml
from torch import Tensor

from components.certify import PublishedSettings
from components.core.errors import CasemateError
from components.core.folders import Folder
from components.core.object_stores import is_uri
from components.core.registry import load_reference
from components.data.prepared import PreparedDataset
from components.report import attacked, chapters, execution, results
from components.report.analysis.chapters import chapters as analysis_chapters
from components.report.analysis.chapters import read_analyses
from components.report.certified import certificate_facts
from components.report.content import Chapter, Content, Fact, Table
from components.report.evaluation.chapters import chapters as evaluation_chapters
from components.report.evaluation.chapters import read_evaluation
from components.report.evaluation.headline import with_evaluation
from components.report.execution import StepExecution
from components.report.page import render
from components.report.published import beside_published
from components.report.run_results import Dataset, Results
from components.report.tables import to_csv
from pipelines.recipe.load import SMOKE, header, load
from pipelines.runtime.artifacts import manifest_of
from pipelines.runtime.storage import StepPlace
from pipelines.stages.report.cards import flow_cards

PLACES = ("cluster", "storage", "tracking", "report")  # sections that change no result
CARDS = "cards"  # folder of the model cards


class ReportSettings(Protocol):
    """The report section of a recipe."""

    @property
    def title(self) -> str | None: ...
    @property
    def num_examples(self) -> int: ...
    @property
    def compare(self) -> Mapping[str, PublishedSettings]: ...


class ReportRecipe(Protocol):
    """The parts of a recipe that this stage uses."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def report(self) -> ReportSettings: ...

    def resolved(self) -> dict[str, Any]: ...


class DescribedModels(Protocol):
    """The part of the MLflow run that this stage uses."""

    def describe_model(self, trained_in: str | None, text: str) -> None: ...


class ReportOutput(Protocol):
    """The parts of the output folder that this stage uses."""

    @property
    def place(self) -> StepPlace: ...
    @property
    def run(self) -> DescribedModels: ...

    def write_text(self, name: str, text: str) -> object: ...
    def provenance(self) -> dict[str, object]: ...
    def page_of_run(self, run_id: str) -> str | None: ...


def run(recipe: ReportRecipe, inputs: Mapping[str, Folder], out: ReportOutput) -> None:
    """Read the finished steps, write `tables/*.csv`, `cards/*` and, last, `report.html`.

    The card of a registered model becomes the description of its version.
    """
    content = build_content(recipe, inputs, out)
    write_cards(recipe, inputs, out, recipe_text=content.recipe_text)
    for table in content.tables():
        out.write_text(f"tables/{table.name}.csv", to_csv(table))
    out.write_text("report.html", render(content))


def write_cards(
    recipe: ReportRecipe, inputs: Mapping[str, Folder], out: ReportOutput, *, recipe_text: str
) -> None:
    """A model card per classifier, as a page and as Markdown."""
    beside = out.place.path.parent
    for card in flow_cards(recipe.name, inputs, beside=beside, recipe_text=recipe_text):
        out.write_text(f"{CARDS}/{card.model}.html", card.html)
        out.write_text(f"{CARDS}/{card.model}.md", card.markdown)
        out.run.describe_model(card.trained_in, card.description)


def build_content(recipe: ReportRecipe, inputs: Mapping[str, Folder], out: ReportOutput) -> Content:
    """The page's content from the folders of finished steps; only `prepare` is required."""
    if "prepare" not in inputs:
        raise CasemateError(
            "report", "prepare", "is not finished; the report needs the prepared dataset"
        )
    dataset = PreparedDataset.open(inputs["prepare"])
    compare, num_examples = recipe.report.compare, recipe.report.num_examples
    found = replace(
        read_results(dataset, inputs),
        published=tuple(load_reference(e.reader)(name, e) for name, e in compare.items()),
        first_images=partial(_first_images, dataset),
    )
    evaluated, ran = read_evaluation(inputs), _executions(inputs, out)
    shown = (
        chapters.attack_chapter(found.attacks),
        *chapters.certificate_chapters(found, num_examples=num_examples),
        *evaluation_chapters(evaluated),
        *analysis_chapters(read_analyses(inputs), dataset.classes),
        chapters.class_chapter(found),
        chapters.example_chapter(found, num_examples=num_examples),
        chapters.training_chapter(found.trained),
        chapters.tuning_chapter(found.tuned),
        chapters.threat_chapter(found),
        _verify_chapter(found, beside=out.place.path),
    )
    headline = with_evaluation(chapters.headline(found), evaluated)
    published, compared = _published(recipe, headline, found)
    return Content(
        recipe.report.title or recipe.name,
        f"Recipe {recipe.name}, seed {recipe.seed}",
        (*chapters.identity(found), *execution.facts(ran)),
        headline,
        chapters.checks(found),
        tuple(chapter for chapter in shown if chapter),
        yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True),
        (
            Fact("dataset digest", dataset.digest, code=True),
            *_model_facts(found),
            *_flat(out.provenance()),
            *_mlflow_facts(ran, out.place),
        ),
        tuple(verdict for attack in found.attacks for verdict in attacked.verdicts(attack)),
        published=published,
        compared=compared,
        steps=execution.steps_table(ran),
    )


def _published(
    recipe: ReportRecipe, headline: Table, found: Results
) -> tuple[tuple[Fact, ...], Table | None]:
    """What the recipe's first comment says about the published result, if it names figures.

    Its figures stand beside ours if the run follows the recipe's file.
    """
    entries = header(recipe.source)
    if "Figures" not in entries:
        return (), None
    shown = ("Paper", "Figures", "Differs")
    facts = [Fact(name, entries[name]) for name in shown if name in entries]
    if recipe.source.endswith(SMOKE):
        facts.append(Fact("Ours", "the table above, of the --smoke form: not comparable"))
    elif not _follows_file(recipe):
        facts.append(Fact("Ours", "the table above, with other settings: not comparable"))
    else:
        return tuple(facts), beside_published(entries["Figures"], headline, found.certificates)
    return tuple(facts), None


def _follows_file(recipe: ReportRecipe) -> bool:
    """Whether no section that results depend on was changed by `--set`."""
    own, written = recipe.resolved(), load(recipe.source).resolved()
    return all(own.get(key) == value for key, value in written.items() if key not in PLACES)


def _executions(inputs: Mapping[str, Folder], out: ReportOutput) -> list[StepExecution]:
    """When and where the steps ran; folders that no flow has made are left out."""
    manifests = {step: manifest_of(folder) for step, folder in inputs.items()}
    return [
        StepExecution.read(
            step,
            manifest.execution,
            run_id=manifest.mlflow_run_id,
            page=out.page_of_run(manifest.mlflow_run_id),
        )
        for step, manifest in manifests.items()
        if manifest
    ]


def read_results(dataset: PreparedDataset, inputs: Mapping[str, Folder]) -> Results:
    """Every finished folder of the run, in the flow's order."""
    facts = Dataset(
        tuple(dataset.classes),
        dataset.channels,
        dataset.height,
        dataset.width,
        dataset.digest,
        dict(dataset.splits),
    )
    steps = {
        kind: [s for s in inputs if s.split(".")[0] == kind]
        for kind in ("model", "train", "attack", "certify")
    }
    given = [results.read_model(step, inputs[step]) for step in steps["model"]]
    trained = [results.read_train(step, inputs[step]) for step in steps["train"]]
    return Results(
        facts,
        (*given, *trained),
        results.read_tune("tune", inputs["tune"]) if "tune" in inputs else None,
        tuple(results.read_attack(step, inputs[step]) for step in steps["attack"]),
        tuple(results.read_certify(step, inputs[step]) for step in steps["certify"]),
    )


def _first_images(dataset: PreparedDataset, count: int) -> dict[str, Tensor]:
    """The first test items, where votes start: (C, H, W) pixels by item."""
    split = dataset.load("test", limit=count)
    return {item: split.pixels(slice(i, i + 1))[0] for i, item in enumerate(split.item_ids)}


def _verify_chapter(found: Results, *, beside: Path) -> Chapter | None:
    """Commands that check each certificate; paths are relative, so that the page can be moved."""
    if not found.certificates:
        return None
    facts: list[Fact] = []
    for result in found.certificates:
        folder = str(result.folder)
        if not is_uri(folder):
            folder = Path(os.path.relpath(folder, beside.parent)).as_posix()
        command = f"casemate verify {shlex.quote(folder)}"
        facts += certificate_facts(result, model=found.model_of(result), command=command)
    intro = (
        "Each command recomputes every claim of a certificate from its stored votes and needs no "
        "model and no GPU. Run it in the folder that holds this report's own folder."
    )
    return Chapter("verify", "Check the certificates", intro, facts=tuple(facts))


def _mlflow_facts(ran: Sequence[StepExecution], place: StepPlace) -> tuple[Fact, ...]:
    """How to open the runs where no server shows them: the database of the report's own storage."""
    storage = place.storage
    if not ran or ran[0].page or not storage.is_local or not (storage.path / "mlflow.db").is_file():
        return ()
    command = "mlflow ui --backend-store-uri sqlite:///../../mlflow.db"
    return (Fact("MLflow, from this folder", command, code=True),)


def _model_facts(found: Results) -> tuple[Fact, ...]:
    return tuple(Fact(f"model {t.model}", t.digest, code=True) for t in found.trained)


def _flat(value: object, prefix: str = "") -> list[Fact]:
    """Nested provenance as dotted terms; a mapping of plain values makes one line."""
    if not isinstance(value, Mapping):
        return [Fact(prefix, str(value), code=True)]
    if prefix and not any(isinstance(inner, Mapping) for inner in value.values()):
        return [Fact(prefix, ", ".join(f"{k} {v}" for k, v in value.items()), code=True)]
    return [
        fact
        for key, inner in value.items()
        for fact in _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    ]
