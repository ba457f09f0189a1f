"""Workers of the certify stage: those of the certificate's family, built from a task."""

from components.certify.challenge import ChallengeTask
from components.certify.registry import family_of
from components.certify.settings import ChallengeSettings, ClaimSettings
from components.certify.tasks import VoteSettings, VoteTask
from components.core.units import WorkFn


def make_voter(task: VoteTask[VoteSettings]) -> WorkFn:
    """The worker that computes the votes of a unit."""
    return family_of(task.votes.kind).worker(task)


def make_challenger(
    challenge: ChallengeTask[VoteSettings, ChallengeSettings, ClaimSettings],
) -> WorkFn:
    """The worker that attacks a certified item."""
    return family_of(challenge.task.votes.kind).challenger(challenge)
