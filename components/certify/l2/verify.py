"""Checks that every correct l2 certificate passes, independent of its votes."""

from collections.abc import Iterator

from components.certify.claim_rows import CERTIFICATE_NAME, StoredClaims
from components.certify.l2.certificate import max_radius_of
from components.certify.l2.evidence import drawn_of
from components.certify.l2.settings import GaussianClaimSettings
from components.certify.vote_rows import VOTES_NAME, Votes
from components.core.noise_streams import NOISE_IMPLS, noise_impl, noise_kind


def audit_gaussian(
    votes: Votes, claim: GaussianClaimSettings, stored: StoredClaims
) -> Iterator[str]:
    """Problems of the claimed radii and of the noise that the votes record."""
    drawn = drawn_of(votes.header)
    added, claimed, behind = drawn.sigma, stored.threat.get("sigma"), drawn.denoiser
    if not isinstance(claimed, int | float) or claimed > added:
        yield f"{CERTIFICATE_NAME}: claims sigma {claimed}, the noise added had {added}"
    if behind is not None and not behind.get("sigma_added", 0) >= added:
        yield f"{VOTES_NAME}: noise of {behind.get('sigma_added')} was added, not of sigma {added}"
    found = votes.header.noise_impl
    if noise_kind(found, drawn.method) is None:
        known = " or ".join(repr(noise_impl(drawn.method, kind)) for kind in NOISE_IMPLS)
        yield f"{VOTES_NAME}: noise_impl is {found!r}, method {drawn.method} draws by {known}"
    bound = max_radius_of(votes.header, claim)
    for row in stored.rows:
        if not row["radius"] <= bound:
            yield f"item {row['item_id']}: radius {row['radius']!r} exceeds the possible {bound!r}"
        if not 0 <= row["k"] <= row["n"]:
            yield f"item {row['item_id']}: k is {row['k']} of n = {row['n']}"
        if row["abstain"] and (row["radius"] != 0 or row["correct"]):
            yield f"item {row['item_id']}: abstains but claims a radius or a correct prediction"
