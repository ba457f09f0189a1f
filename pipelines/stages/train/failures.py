"""Failure policy of training: which failures of workers are retried.

Light to import: Ray's controller, which decides, loads this module without torch and timm.
"""

from ray.train.v2._internal.execution.failure_handling import (
    DefaultFailurePolicy,
    FailureDecision,
)
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

from components.core.errors import CasemateError


def mistake_in(error: TrainingFailedError) -> CasemateError | None:
    """The user's mistake among the errors of the workers; other errors may follow from it."""
    failures = error.worker_failures.values() if isinstance(error, WorkerGroupError) else ()
    return next((failure for failure in failures if isinstance(failure, CasemateError)), None)


class MistakesEndTraining(DefaultFailurePolicy):  # type: ignore[misc]  # Ray has no types
    """Ray's retries after lost workers, but none after a user's mistake."""

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        if mistake_in(training_failed_error):
            return FailureDecision.RAISE
        return super().make_decision(training_failed_error)
