"""Mistakes in training workers: not tried again, and told as the one line that they are."""

import subprocess
import sys

from ray.exceptions import ActorDiedError, RayTaskError
from ray.train import FailureConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from components.core.errors import CasemateError
from pipelines.stages.train.failures import MistakesEndTraining, lacked_room, mistake_in
from tests.e2e.cli import ROOT

MISTAKE = CasemateError("train.batch_size", 7, "leaves a worker an odd number of images")
LOST = WorkerGroupError("lost", {0: RuntimeError("connection closed"), 1: OSError("reset")})


def test_a_mistake_of_any_worker_ends_the_training():
    failed = WorkerGroupError("both", {0: RuntimeError("connection closed"), 1: MISTAKE})
    policy = MistakesEndTraining(FailureConfig(max_failures=3), max_wait=60)
    assert policy.make_decision(failed) is FailureDecision.RAISE
    assert mistake_in(failed) is MISTAKE


def test_a_mistake_with_a_cause_is_still_one():
    told = CasemateError("data", "a shard", "is damaged")
    told.__cause__ = OSError("truncated")
    assert mistake_in(WorkerGroupError("one", {0: told})) is told


def test_lost_workers_are_tried_again():
    policy = MistakesEndTraining(FailureConfig(max_failures=2), max_wait=60)
    decisions = [policy.make_decision(LOST) for _ in range(3)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RETRY, FailureDecision.RAISE]
    assert mistake_in(LOST) is None


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("on_start", str(cause), cause).as_instanceof_cause()


def test_workers_lost_while_the_group_forms_are_tried_again():
    lost = ControllerError(task_error(FileNotFoundError(2, "No such file or directory")))
    dead = ControllerError(ActorDiedError())
    policy = MistakesEndTraining(FailureConfig(max_failures=2), max_wait=60)
    decisions = [policy.make_decision(error) for error in (lost, dead, lost)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RETRY, FailureDecision.RAISE]
    for final in (task_error(MISTAKE), ValueError("a bug of the controller")):
        policy = MistakesEndTraining(FailureConfig(max_failures=2), max_wait=60)
        assert policy.make_decision(ControllerError(final)) is FailureDecision.RAISE


def test_workers_without_room_are_waited_for_up_to_the_limit():
    no_room = ControllerError(WorkerGroupStartupTimeoutError(2))
    patient = MistakesEndTraining(FailureConfig(max_failures=0), max_wait=1e9)
    assert patient.make_decision(no_room) is FailureDecision.RETRY
    done = MistakesEndTraining(FailureConfig(max_failures=0), max_wait=0)
    assert done.make_decision(no_room) is FailureDecision.RAISE
    assert lacked_room(no_room)
    assert not lacked_room(LOST)


def test_the_controller_pays_for_nothing_heavy():
    code = "import sys, pipelines.stages.train.failures; print(*sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert not {"torch", "timm", "mlflow"} & set(said.stdout.split())
