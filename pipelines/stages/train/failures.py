"""Failure policy of training: which failures of workers are retried.

Light to import: Ray's controller, which decides, loads this module without torch and timm.
"""

import time

from ray.train import FailureConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.failure_handling import (
    DefaultFailurePolicy,
    FailureDecision,
)
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from components.core.errors import CasemateError


def mistake_in(error: TrainingFailedError) -> CasemateError | None:
    """The user's mistake among the errors of the workers; other errors may follow from it."""
    failures = error.worker_failures.values() if isinstance(error, WorkerGroupError) else ()
    return next((failure for failure in failures if isinstance(failure, CasemateError)), None)


def lacked_room(error: TrainingFailedError) -> bool:
    """Whether Ray found no room for the workers; it tries again after a minute."""
    return isinstance(error, ControllerError) and isinstance(
        error.controller_failure, WorkerGroupStartupTimeoutError
    )


class MistakesEndTraining(DefaultFailurePolicy):  # type: ignore[misc]  # Ray has no types
    """Ray's retries after lost workers, but none after a user's mistake, nor without an end."""

    def __init__(self, failure_config: FailureConfig, *, max_wait: float) -> None:
        super().__init__(failure_config)
        self.max_wait, self.waits_since = max_wait, time.monotonic()
        self.waits = False

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        if mistake_in(training_failed_error):
            return FailureDecision.RAISE
        waited, self.waits = self.waits, lacked_room(training_failed_error)
        if self.waits and not waited:
            self.waits_since = time.monotonic()
        if self.waits and time.monotonic() - self.waits_since >= self.max_wait:
            return FailureDecision.RAISE
        return super().make_decision(training_failed_error)
