"""Chapters of the studies of the analyze stage; studies that were not made have none."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc

from components.analyze.gaps import GapState, densities
from components.analyze.settings import GapSettings
from components.analyze.states import read_arrays
from components.core.errors import at_key
from components.core.folders import Folder
from components.core.tables import read_table
from components.core.types import Array
from components.evaluate.metrics import METRICS_NAME, MetricRow, read_metrics
from components.report.analysis import charts
from components.report.analysis.galleries import accumulation_gallery, perturbation_gallery
from components.report.content import Chapter, Chart
from components.report.results import RUN_AGAIN, read_json

STAGE = "analyze"
BINS_PER_DECADE = 16  # of histograms in figures
ALIGNMENT = "patch_alignment"  # item of rows that are not about judges
MEASURES = {
    "pearson_flat": "Absolute Pearson correlation of all entries of all images",
    "pearson_per_sample": "Absolute Pearson correlation within an image, mean over images",
    "pearson_per_feature": "Absolute Pearson correlation of a channel, mean over channels",
    "cka_exact": "Linear CKA of all images",
    "cka_minibatch": "Linear CKA, unbiased estimate from minibatches",
}
TOKENS = {"all": "all tokens", "cls": "class token"}


@dataclass(frozen=True, slots=True)
class Study:
    """A finished step: its numbers by model, its summary and its folder."""

    folder: Folder
    rows: Mapping[str, Sequence[MetricRow]]
    summary: Mapping[str, Any]

    @property
    def details(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.summary["details"]
        return found

    @property
    def num_items(self) -> int:
        return int(self.summary["num_items"])

    def array(self, name: str) -> Array:
        """An array of the step."""
        found: Array = np.load(self.folder / name, allow_pickle=False)
        return found

    def pictures(self, name: str) -> Array:
        """Pictures in [0, 1]."""
        return self.array(f"pictures/{name}.npy").astype(np.float32) / 255


@dataclass(frozen=True, slots=True)
class Analyses:
    """All studies of a run, by name."""

    studies: Mapping[str, Study] = field(default_factory=dict)


def read_analyses(folders: Mapping[str, Folder]) -> Analyses:
    """The results of all steps `analyze.<study>`; empty without one."""
    found = {}
    for step, folder in folders.items():
        stage, _, study = step.partition(".")
        if stage != STAGE:
            continue
        summary = read_json(folder / "summary.json", step=step)
        with at_key(step, then=RUN_AGAIN):
            rows: dict[str, list[MetricRow]] = {}
            for row in read_metrics(folder / METRICS_NAME):
                rows.setdefault(row.model, []).append(row)
            found[study] = Study(folder, rows, summary)
    return Analyses(found)


def chapters(found: Analyses, classes: Sequence[str]) -> tuple[Chapter, ...]:
    """One chapter per study, in the order of the stage."""
    makers = {
        "correlation": _correlation,
        "lesions": _lesions,
        "restricted_attention": _restricted,
        "gaps": _gaps,
    }
    shown = [makers[name](found.studies[name]) for name in makers if name in found.studies]
    if study := found.studies.get("perturbations"):
        shown.append(_perturbations(study, classes))
    if study := found.studies.get("accumulation"):
        shown.append(_accumulation(study, classes))
    return tuple(shown)


def _correlation(study: Study) -> Chapter:
    shown: list[Chart] = []
    for model, streams in study.details["blocks"].items():
        method = MEASURES[study.details["measures"][model]]
        for stream, blocks in streams.items():
            shown.append(
                charts.correlation_chart(
                    study.array(f"matrices/{model}.{stream}.npy"),
                    blocks,
                    title=f"{model}: {TOKENS[stream]}",
                    method=f"{method}, {study.num_items:,} images.",
                    name=f"{STAGE}.correlation.{model}-{stream}",
                )
            )
    intro = (
        "How similar the outputs of two blocks are (Bhojanapalli et al. 2021, sec. 4). Blocks are "
        "numbered in the order of execution; values are in the table behind each chart."
    )
    return Chapter("analysis-correlation", "Correlation of blocks", intro, tuple(shown))


def _lesions(study: Study) -> Chapter:
    change = "after parts of the trained network are removed"
    return _changed(study, "lesions", "Lesions", change, charts.lesion_charts)


def _restricted(study: Study) -> Chapter:
    name, title = "restricted_attention", "Restricted attention"
    change = "with attention between some tokens only"
    return _changed(study, name, title, change, charts.restricted_charts)


def _changed(
    study: Study, name: str, title: str, change: str, charts_of: Callable[..., Iterable[Chart]]
) -> Chapter:
    """Accuracy of changed networks, charts of every model."""
    shown = tuple(
        chart
        for model, rows in study.rows.items()
        for chart in charts_of(rows, model=model, name=f"{STAGE}.{name}.{model}")
    )
    intro = f"Accuracy on {study.num_items:,} items {change} (Bhojanapalli et al. 2021, sec. 4)."
    return Chapter(f"analysis-{name.replace('_', '-')}", title, intro, shown)


def _gaps(study: Study) -> Chapter:
    table = read_table(study.folder / "states.parquet")
    how = GapSettings(number_format=study.summary["settings"]["number_format"])
    shown = []
    for model in study.rows:
        own = table.filter(pc.equal(table["model"], model)).drop_columns(["model"])
        states = {n: GapState.of_arrays(a, how).histogram for n, a in read_arrays(own).items()}
        found = {n: densities(h, bins_per_decade=BINS_PER_DECADE) for n, h in states.items()}
        edges = next(iter(found.values()))[0]
        limits = next(iter(states.values())).limits
        shown.append(
            charts.gap_chart(
                edges.tolist(),
                {name: shares.tolist() for name, (_, shares) in found.items()},
                limits=(limits.cancels, limits.underflows),
                title=f"{model}: gaps of attention logits",
                name=f"{STAGE}.gaps.{model}",
            )
        )
    intro = (
        f"Largest minus second largest attention logit of every query on {study.num_items:,} "
        "items, clean and attacked, before and after adaptive attention scaling (Jain & Dutta, "
        "sec. 3)."
    )
    return Chapter("analysis-gaps", "Gaps of attention logits", intro, tuple(shown))


def _perturbations(study: Study, classes: Sequence[str]) -> Chapter:
    settings = study.summary["settings"]
    gallery = perturbation_gallery(
        study.pictures("originals"),
        {model: study.pictures(model) for model in study.rows},
        np.array(study.details["labels"]),
        classes=classes,
        eps_text=f"{settings['eps'] * 255:g}/255",
    )
    judged = {
        model: [row for row in rows if row.item != ALIGNMENT] for model, rows in study.rows.items()
    }
    tables = [charts.alignment_table(study.rows, name=f"{STAGE}.perturbations.alignment")]
    if any(judged.values()):
        tables.append(charts.semantics_table(judged, name=f"{STAGE}.perturbations.semantics"))
    intro = (
        f"Perturbations of {study.num_items:,} items. Alignment: how much more they change between "
        f"patches than inside. A judge recognises a perturbation if the true class is among its "
        f"{settings['top_k']} highest."
    )
    return Chapter(
        "analysis-perturbations", "Perturbations", intro, galleries=(gallery,), tables=tuple(tables)
    )


def _accumulation(study: Study, classes: Sequence[str]) -> Chapter:
    settings = study.summary["settings"]
    confidence = study.details["confidence"]
    gallery = accumulation_gallery(
        study.pictures("seeds"),
        {m: (study.pictures(m), np.array(confidence[m])) for m in study.rows},
        np.array(study.details["targets"]),
        classes=classes,
        preset_text=f"preset {settings['preset']}, {settings['num_steps']} steps",
    )
    intro = 'Noise that becomes an image of a class (the thesis "Adversarially Robust Vision '
    intro += 'Transformers", sec. 4.3.2).'
    return Chapter("analysis-accumulation", "Gradient accumulation", intro, galleries=(gallery,))
