"""What runs on an actor: the family's own workers, loaded from what a task says."""

from typing import Any

from components.certify.challenge import ChallengeTask
from components.certify.registry import family_of
from components.certify.tasks import VoteTask
from components.core.units import WorkFn


def make_voter(task: VoteTask[Any]) -> WorkFn:
    """What computes the votes of a unit."""
    return family_of(task.votes.kind).worker(task)


def make_challenger(challenge: ChallengeTask[Any, Any, Any]) -> WorkFn:
    """What attacks a certified item."""
    return family_of(challenge.task.votes.kind).challenger(challenge)
