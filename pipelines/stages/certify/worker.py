"""What runs on an actor: the family's own workers, loaded from what a task says."""

from components.certify.challenge import ChallengeTask
from components.certify.registry import family_of
from components.certify.settings import ChallengeSettings, ClaimSettings
from components.certify.tasks import VoteSettings, VoteTask
from components.core.units import WorkFn


def make_voter(task: VoteTask[VoteSettings]) -> WorkFn:
    """What computes the votes of a unit."""
    return family_of(task.votes.kind).worker(task)


def make_challenger(
    challenge: ChallengeTask[VoteSettings, ChallengeSettings, ClaimSettings],
) -> WorkFn:
    """What attacks a certified item."""
    return family_of(challenge.task.votes.kind).challenger(challenge)
