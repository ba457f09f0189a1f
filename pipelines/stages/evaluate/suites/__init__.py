"""The suites of the evaluate stage: each a function of an evaluation, and the tasks of its units.

`SUITES` maps a suite to its module, which has `evaluate(evaluation) -> SuiteResult`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.stages.evaluate.evaluation import Evaluation
    from pipelines.stages.evaluate.results import SuiteResult


def suite_of(name: str) -> "Callable[[Evaluation], SuiteResult]":
    """The function that evaluates a suite."""
    found: Callable[[Evaluation], SuiteResult] = import_module(f"{__name__}.{name}").evaluate
    return found
