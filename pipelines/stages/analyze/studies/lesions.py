"""Accuracy after parts of trained networks are removed, at inference only."""

from components.analyze.lesions import lesion_predictions, lesions_of, measurements
from pipelines.stages.analyze.analysis import Analysis
from pipelines.stages.analyze.results import StudyResult
from pipelines.stages.analyze.studies.variants import VariantStudy

LESIONS = VariantStudy("lesions", lesions_of, lesion_predictions, measurements)


def analyze(analysis: Analysis) -> StudyResult:
    """All lesions of all models."""
    return LESIONS.analyze(analysis, headlines=[("lesions: whole network", "none", "accuracy")])
