"""Accuracy with attention only between some tokens, at inference only."""

from components.analyze.restricted import measurements, restricted_predictions, restrictions_of
from pipelines.stages.analyze.analysis import Analysis
from pipelines.stages.analyze.results import StudyResult
from pipelines.stages.analyze.studies.variants import VariantStudy

RESTRICTIONS = VariantStudy("restrictions", restrictions_of, restricted_predictions, measurements)


def analyze(analysis: Analysis) -> StudyResult:
    """All restrictions of all models."""
    return RESTRICTIONS.analyze(analysis)
