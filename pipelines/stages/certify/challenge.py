"""Attacks on a finished certificate: a certified item that is broken refutes it."""

from collections.abc import Sequence
from functools import partial

import pyarrow.parquet as pq

from components.certify.challenge import ChallengeTask, Claimed, Target, compare
from components.certify.claim_rows import CERTIFICATES_NAME
from components.certify.family import AnyFamily
from components.certify.registry import family_of
from components.certify.settings import ChallengeSettings, ClaimSettings
from components.certify.tasks import VoteSettings
from components.certify.vote_rows import Votes
from components.core.settings import plain
from components.core.units import Unit
from pipelines.recipe.schema.place import ClusterSection
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.shards import run_units
from pipelines.stages.certify.worker import make_challenger


def run(
    challenge: ChallengeTask[VoteSettings, ChallengeSettings, ClaimSettings],
    votes: Votes,
    cluster: ClusterSection,
    out: StageDir,
) -> dict[str, object]:
    """Attack the first items of the certificate and compare claim and outcome on those items."""
    settings, family = challenge.settings, family_of(votes.header.kind)
    rows = pq.read_table(out.path / CERTIFICATES_NAME).to_pylist()
    claims: dict[str, Claimed] = {row["item_id"]: row for row in rows}
    items = challenge.task.items()
    order = items.take(min(settings.num_items, len(claims))).item_ids
    units = _units(family, votes, claims, order)
    parts = out.parts("challenge", run_id=votes.sha256)
    run_units(
        units,
        make=make_challenger,
        config=challenge,
        parts=parts,
        cluster=cluster,
        label=f"{out.step} challenge",
        out=out,
        phase="challenge",
    )
    found = [row for table in parts.tables([u.name for u in units]) for row in table.to_pylist()]
    after = {row["item_id"]: row["adversarial_prediction"] for row in found}
    return {
        **family.describe_challenge(settings),
        "settings": plain(settings),
        **compare(
            [claims[item_id] for item_id in order],
            after,
            is_certified=partial(family.is_certified, settings),
        ),
    }


def _units(
    family: AnyFamily, votes: Votes, claims: dict[str, Claimed], order: Sequence[str]
) -> list[Unit]:
    """One unit per item with a claim; an abstention claims nothing that could be attacked."""
    clean = family.challenged_votes(votes, order)
    return [
        Unit(
            f"item-{i:08d}",
            f"item {item_id}",
            Target(
                i,
                claims[item_id]["prediction"],
                tuple(clean[item_id].tolist()) if clean else (),
            ),
        )
        for i, item_id in enumerate(order)
        if not claims[item_id]["abstain"]
    ]
