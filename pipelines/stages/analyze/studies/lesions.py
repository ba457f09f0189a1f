"""Accuracy after parts of trained networks are removed, at inference only."""

from dataclasses import dataclass

import pyarrow as pa

from components.analyze.blocks import find_blocks
from components.analyze.lesions import lesion_predictions, lesions_of, measurements
from components.analyze.settings import BlockSettings, LesionSettings
from components.evaluate.metrics import MetricRow, rows_of
from pipelines.stages.analyze.analysis import Analysis
from pipelines.stages.analyze.results import StudyResult
from pipelines.stages.analyze.studies.variants import predicted, results_by_model, variant_tables
from pipelines.stages.analyze.worker import AnalyzeWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class LesionTask:
    """Predictions of one model on these test items after every lesion."""

    model: str
    places: tuple[int, ...]
    how: LesionSettings
    blocks: BlockSettings

    def run(self, worker: AnalyzeWorker) -> pa.Table:
        blocks = worker.blocks(self.model, self.blocks)
        lesions = lesions_of(blocks, self.how, seed=worker.config.seed)
        with worker.plain(self.model) as model:
            return predicted(
                worker, self.places, lambda x: lesion_predictions(model, blocks, x, lesions)
            )


def analyze(analysis: Analysis) -> StudyResult:
    """All lesions of all models."""
    how, where = analysis.how, analysis.section.blocks
    lesions = {
        model: lesions_of(find_blocks(analysis.network(model), where), how, seed=analysis.seed)
        for model in analysis.analyzed
    }
    results = results_by_model(analysis, LesionTask, {"how": how, "blocks": where})
    rows: list[MetricRow] = []
    for model, own in results.items():
        rows += rows_of(analysis.subject(model), analysis.study, measurements(own, lesions[model]))
    names = {model: [lesion.name for lesion in own] for model, own in lesions.items()}
    return StudyResult(
        rows=rows,
        num_items=len(analysis.items),
        headlines=[("lesions: whole network", "none", "accuracy")],
        tables=variant_tables(results, names),
    )
