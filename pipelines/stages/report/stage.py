"""Report: finished folders to one HTML page and its tables as CSV."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml
from torch import Tensor

from components.certify.l2.cohen_tsv import audit, read_cohen_tsv
from components.core.errors import CasemateError
from components.data.prepared import PreparedDataset
from components.report import attacked, chapters, galleries, results
from components.report.analysis.chapters import chapters as analysis_chapters
from components.report.analysis.chapters import read_analyses
from components.report.certified import certificate_facts
from components.report.content import Chapter, Content, Fact, Gallery
from components.report.evaluation.chapters import chapters as evaluation_chapters
from components.report.evaluation.chapters import read_evaluation
from components.report.evaluation.headline import with_evaluation
from components.report.page import render
from components.report.radii import ComparedTable
from components.report.sweeps import own_charts
from components.report.tables import to_csv
from pipelines.recipe.schema.place import CompareSection

MAX_ABLATED_ITEMS = 4  # one wide strip each; more would hide the chart above


class ReportSettings(Protocol):
    """The report section of a recipe."""

    @property
    def title(self) -> str | None: ...
    @property
    def num_examples(self) -> int: ...
    @property
    def compare(self) -> Mapping[str, CompareSection]: ...


class ReportRecipe(Protocol):
    """The parts of a recipe that this stage uses."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def report(self) -> ReportSettings: ...

    def resolved(self) -> dict[str, Any]: ...


class ReportOutput(Protocol):
    """The parts of the output folder that this stage uses."""

    @property
    def path(self) -> Path: ...

    def write_text(self, name: str, text: str) -> object: ...
    def provenance(self) -> dict[str, object]: ...


def run(recipe: ReportRecipe, inputs: Mapping[str, Path], out: ReportOutput) -> None:
    """Read the finished steps, write `tables/*.csv` and, last, `report.html`."""
    content = build_content(recipe, inputs, out)
    for table in content.tables():
        out.write_text(f"tables/{table.name}.csv", to_csv(table))
    out.write_text("report.html", render(content))


def build_content(recipe: ReportRecipe, inputs: Mapping[str, Path], out: ReportOutput) -> Content:
    """The page's content from the folders of finished steps; only `prepare` is required."""
    if "prepare" not in inputs:
        raise CasemateError(
            "report", "prepare", "is not finished; the report needs the prepared dataset"
        )
    dataset = PreparedDataset.open(inputs["prepare"])
    compared = tuple(_compared(name, entry) for name, entry in recipe.report.compare.items())
    found = replace(read_results(dataset, inputs), compared=compared)
    pictures = [
        gallery
        for result in own_charts(found.certificates, found.sweeps())
        if result.family.visible(result.document.evidence) is not None
        for gallery in _ablations(result, dataset, num_examples=recipe.report.num_examples)
    ]
    evaluated = read_evaluation(inputs)
    shown = (
        chapters.attack_chapter(found.attacks),
        chapters.patch_chapter(found, pictures=pictures),
        chapters.radius_chapter(found),
        *evaluation_chapters(evaluated),
        *analysis_chapters(read_analyses(inputs), dataset.classes),
        chapters.example_chapter(found, num_examples=recipe.report.num_examples),
        chapters.training_chapter(found.trained),
        chapters.tuning_chapter(found.tuned),
        chapters.threat_chapter(found),
        _verify_chapter(found, beside=out.path),
    )
    return Content(
        recipe.report.title or recipe.name,
        f"Recipe {recipe.name}, seed {recipe.seed}",
        chapters.identity(found),
        with_evaluation(chapters.headline(found), evaluated),
        chapters.checks(found),
        tuple(chapter for chapter in shown if chapter),
        yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True),
        (
            Fact("dataset digest", dataset.digest, code=True),
            *_model_facts(found),
            *_flat(out.provenance()),
        ),
        tuple(verdict for attack in found.attacks for verdict in attacked.verdicts(attack)),
    )


def read_results(dataset: PreparedDataset, inputs: Mapping[str, Path]) -> chapters.Results:
    """Every finished folder of the run, in the flow's order."""
    facts = chapters.Dataset(
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
    return chapters.Results(
        facts,
        (*given, *trained),
        results.read_tune("tune", inputs["tune"]) if "tune" in inputs else None,
        tuple(results.read_attack(step, inputs[step]) for step in steps["attack"]),
        tuple(results.read_certify(step, inputs[step]) for step in steps["certify"]),
    )


def _compared(name: str, entry: CompareSection) -> ComparedTable:
    """Published radii of another work, and its impossible rows."""
    rows = read_cohen_tsv(Path(entry.path).expanduser())
    problems = (
        audit(rows, sigma=entry.sigma, n=entry.num_estimate, alpha=entry.failure_prob)
        if entry.sigma
        else ()
    )
    correct = np.array([row.correct for row in rows])
    return ComparedTable(name, correct, np.array([row.radius for row in rows]), tuple(problems))


def _ablations(
    result: results.CertifyResult, dataset: PreparedDataset, *, num_examples: int
) -> list[Gallery]:
    """The first certified test items as the votes see them."""
    known = set(result.columns["item_id"])
    split = dataset.load("test", limit=min(num_examples, MAX_ABLATED_ITEMS))  # votes start there
    chosen = [i for i, item in enumerate(split.item_ids) if item in known]
    if not chosen:
        return []
    images: dict[str, Tensor] = {
        split.item_ids[i]: split.pixels(slice(i, i + 1))[0] for i in chosen
    }
    votes = results.read_band_votes(result, list(images))
    return [galleries.ablation_gallery(result, images=images, votes=votes, classes=dataset.classes)]


def _verify_chapter(found: chapters.Results, *, beside: Path) -> Chapter | None:
    """Commands that check each certificate; paths are relative, so that the page can be moved."""
    if not found.certificates:
        return None
    facts: list[Fact] = []
    for result in found.certificates:
        folder = Path(os.path.relpath(result.folder, beside.parent)).as_posix()
        command = f"casemate verify {shlex.quote(folder)}"
        facts += certificate_facts(result, model=found.model_of(result), command=command)
    intro = (
        "Each command recomputes every claim of a certificate from its stored votes and needs no "
        "model and no GPU. Run it in the folder that holds this report's own folder."
    )
    return Chapter("verify", "Check the certificates", intro, facts=tuple(facts))


def _model_facts(found: chapters.Results) -> tuple[Fact, ...]:
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
