"""The studies of the analyze stage: each a function of an analysis, and the tasks of its units.

The module of a study has `analyze(analysis) -> StudyResult`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.stages.analyze.analysis import Analysis
    from pipelines.stages.analyze.results import StudyResult


def study_of(name: str) -> "Callable[[Analysis], StudyResult]":
    """The function that makes a study."""
    found: Callable[[Analysis], StudyResult] = import_module(f"{__name__}.{name}").analyze
    return found
