"""Accuracy with attention only between some tokens, at inference only."""

from dataclasses import dataclass

import pyarrow as pa

from components.analyze.blocks import find_blocks
from components.analyze.prefixes import variant_predictions
from components.analyze.restricted import measurements, restrictions_of
from components.analyze.settings import BlockSettings, RestrictedAttentionSettings
from components.evaluate.metrics import MetricRow, rows_of
from pipelines.stages.analyze.analysis import Analysis
from pipelines.stages.analyze.results import StudyResult
from pipelines.stages.analyze.studies.variants import predicted, results_by_model, variant_tables
from pipelines.stages.analyze.worker import AnalyzeWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class RestrictedTask:
    """Predictions of one model on these test items under every restriction."""

    model: str
    places: tuple[int, ...]
    how: RestrictedAttentionSettings
    blocks: BlockSettings

    def run(self, worker: AnalyzeWorker) -> pa.Table:
        blocks = worker.blocks(self.model, self.blocks)
        found = worker.once(
            f"restrictions {self.model}",
            lambda: restrictions_of(blocks, self.how, seed=worker.config.seed),
        )
        variants = [restriction.variant for restriction in found]
        with worker.plain(self.model) as model:
            return predicted(
                worker, self.places, lambda x: variant_predictions(model, blocks, x, variants)
            )


def analyze(analysis: Analysis) -> StudyResult:
    """All restrictions of all models."""
    how, where = analysis.how, analysis.section.blocks
    restrictions = {
        model: restrictions_of(find_blocks(analysis.network(model), where), how, seed=analysis.seed)
        for model in analysis.analyzed
    }
    results = results_by_model(analysis, RestrictedTask, {"how": how, "blocks": where})
    rows: list[MetricRow] = []
    for model, own in results.items():
        rows += rows_of(
            analysis.subject(model), analysis.study, measurements(own, restrictions[model])
        )
    names = {
        model: [f"{one.item}-{one.level}" for one in own] for model, own in restrictions.items()
    }
    return StudyResult(
        rows=rows, num_items=len(analysis.items), tables=variant_tables(results, names)
    )
