"""Workers of the certify stage: those of the certificate's family, built from a task."""

import json
from dataclasses import replace

import pyarrow as pa

from components.certify.challenge import ChallengeTask
from components.certify.registry import family_of
from components.certify.settings import ChallengeSettings, ClaimSettings
from components.certify.tasks import VoteSettings, VoteTask
from components.core.arithmetic import EXACT, use
from components.core.units import WorkFn
from pipelines.runtime.devices import check_device, device_name, worker_device


def on_device(task: VoteTask[VoteSettings], device: str) -> VoteTask[VoteSettings]:
    """The task on another device."""
    return replace(task, votes=replace(task.votes, device=device))


def make_prober(task: VoteTask[VoteSettings]) -> WorkFn:
    """The worker that tells its device, and what the family decides on it."""
    use(EXACT)
    device = worker_device()
    own = on_device(task, device)

    def probe(_: object) -> pa.Table:
        decisions = json.dumps(family_of(own.votes.kind).decide(own))
        return pa.table(
            {"device": [device], "name": [device_name(device)], "decisions": [decisions]}
        )

    return probe


def make_voter(task: VoteTask[VoteSettings]) -> WorkFn:
    """The worker that computes the votes of a unit."""
    use(task.votes.arithmetic)
    check_device(task.votes.device)
    return family_of(task.votes.kind).worker(task)


def make_challenger(
    challenge: ChallengeTask[VoteSettings, ChallengeSettings, ClaimSettings],
) -> WorkFn:
    """The worker that attacks a certified item."""
    use(challenge.task.votes.arithmetic)
    check_device(challenge.task.votes.device)
    return family_of(challenge.task.votes.kind).challenger(challenge)
