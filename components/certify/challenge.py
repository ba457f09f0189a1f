"""Attacks inside the certified threat model; their robust accuracy is an upper bound of certified
accuracy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from components.certify.settings import ChallengeSettings, ClaimSettings
from components.certify.tasks import VoteSettings, VoteTask
from components.core.statistics import exact_accuracy

SCHEMA = pa.schema(
    [
        ("item_id", pa.string()),
        ("adversarial_prediction", pa.int32()),
        ("num_evaluations", pa.int32()),
        ("norm", pa.float64()),
    ]
)
Claimed = Mapping[str, Any]  # one row of certificates.parquet

VotesT = TypeVar("VotesT", bound=VoteSettings)
ChallengeT = TypeVar("ChallengeT", bound=ChallengeSettings)
ClaimT = TypeVar("ClaimT", bound=ClaimSettings)


@dataclass(frozen=True)  # no slots: generic classes set __orig_class__
class ChallengeTask(Generic[VotesT, ChallengeT, ClaimT]):
    """The input of a worker that attacks a certificate."""

    task: VoteTask[VotesT]
    settings: ChallengeT
    claim: ClaimT
    seed: int


@dataclass(frozen=True, slots=True)
class Target:
    """One item to attack: its position in the test split, its claimed class and its clean votes."""

    item: int
    prediction: int
    votes: tuple[int, ...]  # of ablations or pairs; empty for noise


def challenge_row(item_id: str, prediction: int, num_evaluations: int, norm: float) -> pa.Table:
    """The outcome of one attack; prediction -1: the vote is too close to call."""
    values = (item_id, prediction, num_evaluations, norm)
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, values, strict=True))], schema=SCHEMA)


def compare(
    claims: Sequence[Claimed],
    after: Mapping[str, int],
    *,
    is_certified: Callable[..., bool],
) -> dict[str, object]:
    """Accuracies of claim and attack on the same items; an undecided vote (-1) is not broken."""
    certified, robust, broken = [], [], []
    for claim in claims:
        safe = is_certified(claim)
        claimed = safe or is_certified(claim, second=True)
        verdict = after.get(claim["item_id"], -1)
        fell = verdict not in (-1, claim["prediction"])
        certified.append(bool(claim["correct"] and safe))
        robust.append(bool(claim["correct"] and not fell))
        if claimed and fell:
            broken.append(claim["item_id"])
    return {
        "num_items": len(claims),
        "certified": exact_accuracy(np.array(certified)),
        "standing": exact_accuracy(np.array(robust)),
        "broken_certified": len(broken),
        "broken_items": broken,
    }
