"""Failure policy of training: which failures of workers are retried.

Light to import: Ray's controller, which decides, loads this module without torch and timm.
"""

import time

from ray.exceptions import RayError
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


def lost_at_start(error: TrainingFailedError) -> bool:
    """Whether a worker failed while the group formed, as on a node that dies in this moment."""
    failure = error.controller_failure if isinstance(error, ControllerError) else None
    own = isinstance(getattr(failure, "cause", None), CasemateError)
    return isinstance(failure, RayError) and not isinstance(failure, CasemateError) and not own


class MistakesEndTraining(DefaultFailurePolicy):  # type: ignore[misc]  # Ray has no types
    """Ray's retries after lost workers, but none after a user's mistake, nor without an end."""

    def __init__(self, failure_config: FailureConfig, *, max_wait: float) -> None:
        super().__init__(failure_config)
        self.max_wait, self.waits_since = max_wait, time.monotonic()
        self.waits, self.num_lost = False, 0

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        if mistake_in(training_failed_error):
            return FailureDecision.RAISE
        waited, self.waits = self.waits, lacked_room(training_failed_error)
        if self.waits and not waited:
            self.waits_since = time.monotonic()
        if self.waits and time.monotonic() - self.waits_since >= self.max_wait:
            return FailureDecision.RAISE
        if lost_at_start(training_failed_error):  # Ray itself would give up
            self.num_lost += 1
            again = self.num_lost <= self.failure_config.max_failures
            return FailureDecision.RETRY if again else FailureDecision.RAISE
        return super().make_decision(training_failed_error)
