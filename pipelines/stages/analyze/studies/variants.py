"""Predictions of many variants of a network: what lesions and restricted attention share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import torch

from components.analyze.blocks import Blocks, find_blocks
from components.analyze.prefixes import variant_table
from components.analyze.settings import BlockSettings
from components.core.settings import Settings
from components.core.types import Images, IntArray
from components.core.units import Unit
from components.evaluate.metrics import Measurement, MetricRow, rows_of
from components.models.pixels import PixelModel
from pipelines.stages.analyze.analysis import Analysis
from pipelines.stages.analyze.results import StudyResult
from pipelines.stages.analyze.worker import AnalyzeWorker
from pipelines.stages.evaluate.evaluation import blocks as pieces
from pipelines.stages.evaluate.evaluation import units_of
from pipelines.stages.evaluate.results import in_order, with_models
from pipelines.stages.evaluate.worker import PlacesTask

PREDICTIONS_NAME = "predictions.parquet"
VARIANTS_NAME = "variants.parquet"
VARIANTS = pa.schema([("model", pa.string()), ("place", pa.int32()), ("name", pa.string())])


class Named(Protocol):
    """A variant of a network."""

    @property
    def name(self) -> str: ...


Some = TypeVar("Some", bound=Named)


@dataclass(frozen=True, slots=True)
class VariantStudy(Generic[Some]):
    """How the variants of a network are made, tried and measured."""

    name: str
    variants_of: Callable[..., Sequence[Some]]  # of (blocks, settings, seed=...)
    predict: Callable[[PixelModel, Blocks, Images, Sequence[Some]], IntArray]  # (V, B)
    measure: Callable[[pa.Table, Sequence[Some]], Iterable[Measurement]]

    def analyze(
        self, analysis: Analysis, *, headlines: Sequence[tuple[str, str, str]] = ()
    ) -> StudyResult:
        """All variants of all models."""
        how, where = analysis.how, analysis.section.blocks
        blocks = {m: find_blocks(analysis.network(m), where) for m in analysis.analyzed}
        variants = {
            model: self.variants_of(own, how, seed=analysis.seed) for model, own in blocks.items()
        }
        results = self._results(analysis)
        rows: list[MetricRow] = []
        for model, own in results.items():
            found = self.measure(own, variants[model])
            rows += rows_of(analysis.subject(model), analysis.study, found)
        names = {model: [one.name for one in own] for model, own in variants.items()}
        return StudyResult(
            rows=rows,
            num_items=len(analysis.items),
            headlines=headlines,
            tables=_variant_tables(results, names),
            details={"blocks": {model: own.names for model, own in blocks.items()}},
        )

    def _results(self, analysis: Analysis) -> dict[str, pa.Table]:
        """The rows of every model, sorted by item; units have the items of one pass."""
        groups = list(pieces(analysis.items.places, analysis.section.micro_batch))
        units: dict[str, list[Unit]] = {}
        for model in analysis.analyzed:
            tasks = [
                (
                    f"{model}, {len(group)} items",
                    VariantTask(self, model, group, analysis.how, analysis.section.blocks),
                )
                for group in groups
            ]
            units[model] = units_of(f"{analysis.study}-{model}", tasks)
        tables = iter(analysis.tables([unit for group in units.values() for unit in group]))
        return {
            model: in_order(pa.concat_tables(next(tables) for _ in own), "item_id")
            for model, own in units.items()
        }


@dataclass(frozen=True, slots=True)
class VariantTask(PlacesTask):
    """Predictions of all variants of one model on these test items."""

    study: VariantStudy[Any]
    model: str
    places: tuple[int, ...]
    how: Settings
    blocks: BlockSettings

    def run(self, worker: AnalyzeWorker) -> pa.Table:
        """One row per item; passes have at most `micro_batch` rows."""
        blocks = worker.blocks(self.model, self.blocks)
        variants = worker.once(
            f"{self.study.name} {self.model}",
            lambda: self.study.variants_of(blocks, self.how, seed=worker.config.seed),
        )
        items = worker.items(self.places)
        batches = torch.split(worker.pixels(items.images), worker.config.micro_batch)
        with worker.plain(self.model) as model:
            found = [self.study.predict(model, blocks, rows, variants) for rows in batches]
        return variant_table(items.item_ids, items.labels, np.concatenate(found, axis=1))


def _variant_tables(
    results: Mapping[str, pa.Table], names: Mapping[str, Sequence[str]]
) -> dict[str, pa.Table]:
    """The files of predictions and of the names of their variants."""
    rows = [
        {"model": model, "place": place, "name": name}
        for model, own in names.items()
        for place, name in enumerate(own)
    ]
    return {
        PREDICTIONS_NAME: with_models(results.items()),
        VARIANTS_NAME: pa.Table.from_pylist(rows, schema=VARIANTS),
    }
