"""l2 certificates from votes: settings of a claim, one claim per item, rows and figures.

Three methods: a fixed number of draws (Cohen et al. 2019), the same with the randomised bound,
and draws that stop when the declared radii are decided. Certificates from votes without a `method`
in the header keep the layout of the first version, byte for byte.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from components.certify.claim_rows import ITEM_FIELDS, Derived, Row, item_fields
from components.certify.header import VotesHeader
from components.certify.l2.bounds import max_radius, max_randomized_radius
from components.certify.l2.claims import (
    GaussianClaim,
    certify_counts,
    check_can_certify,
    check_radii,
    check_randomized,
    registered_uniform,
)
from components.certify.l2.curves import (
    average_certified_radius,
    bound_distribution,
    num_possible_failures,
)
from components.certify.l2.evidence import drawn_of, is_sequential, method_of, plan_of
from components.certify.l2.predict import predict_counts
from components.certify.l2.sequential import SequentialClaim, certify_prefix, choose_class
from components.certify.l2.settings import GaussianClaimSettings
from components.certify.vote_rows import ItemVotes, Votes
from components.core.errors import CasemateError
from components.core.statistics import exact_accuracy
from components.core.types import Array, IntArray

BOUND_FIELDS = [
    ("n0", pa.int32()),
    ("n", pa.int32()),
    ("k", pa.int32()),
    ("p_lower", pa.float64()),
    ("radius", pa.float64()),
]
METHOD_FIELDS = {
    "fixed": [("predicted", pa.int32())],
    "randomized": [("predicted", pa.int32()), ("uniform", pa.float64())],
    "sequential": [("num_looks", pa.int32())],
}


def check_l2_claim(header: VotesHeader, claim: Mapping[str, object]) -> GaussianClaimSettings:
    """The claim in canonical form, or an error that names the bad setting."""
    radii, alpha = claim["radii"], claim["failure_prob"]
    if not isinstance(radii, Sequence) or not radii:
        raise CasemateError("certify.radii", radii, "is not a list of l2 distances in pixels")
    least = 0 if is_sequential(header) else math.ulp(0.0)  # radius 0: a prediction only
    for radius in radii:
        if not isinstance(radius, int | float) or not least <= radius <= sys.float_info.max:
            raise CasemateError("certify.radii", radius, "is not a positive l2 distance in pixels")
    if not isinstance(alpha, int | float):
        raise CasemateError("certify.failure_prob", alpha, "is not a probability")
    if is_sequential(header):
        _check_supported(header, radii, alpha)
    elif method_of(header) == "randomized":
        check_randomized(alpha)
    check_can_certify(n=drawn_of(header).num_estimate, alpha=alpha)
    distances = tuple(sorted({float(radius) for radius in radii}))
    return GaussianClaimSettings(failure_prob=float(alpha), radii=distances)


def _check_supported(header: VotesHeader, radii: Sequence[float], alpha: float) -> None:
    """Reject claims that votes do not support because drawing stopped early for other claims."""
    declared = header.settings["declared"]
    cannot = "cannot be derived: drawing stopped early, once"
    if alpha != declared["failure_prob"]:
        remedy = f"{cannot} {declared['failure_prob']:g} was reached; draw again"
        raise CasemateError("certify.failure_prob", alpha, remedy)
    known = ", ".join(f"{radius:g}" for radius in declared["radii"])
    for radius in radii:
        if radius not in declared["radii"]:
            remedy = f"{cannot} radii {known} were decided; draw again"
            raise CasemateError("certify.radii", radius, remedy)


def check_new_radii(header: VotesHeader, claim: GaussianClaimSettings) -> None:
    """Reject radii of a new claim that this number of votes could never certify."""
    if is_sequential(header):
        return  # only declared radii pass `check_l2_claim`, and those were certifiable
    drawn = drawn_of(header)
    check_radii(
        claim.radii,
        sigma=drawn.sigma,
        n=drawn.num_estimate,
        alpha=claim.failure_prob,
        randomized=drawn.method == "randomized",
    )


def max_radius_of(header: VotesHeader, claim: GaussianClaimSettings) -> float:
    """The radius that no claim from this many draws can exceed."""
    if is_sequential(header):
        return plan_of(header).max_certifiable_radius
    drawn = drawn_of(header)
    most = max_randomized_radius if drawn.method == "randomized" else max_radius
    return most(sigma=drawn.sigma, n=drawn.num_estimate, alpha=claim.failure_prob)


def counts_of(votes: Array, header: VotesHeader) -> IntArray:
    """(C,) votes per class."""
    return np.bincount(votes, minlength=header.num_classes)


def claim_fixed(item: ItemVotes, header: VotesHeader, *, alpha: float) -> GaussianClaim:
    """CERTIFY from all draws of an item, with the bound of the header's method."""
    counts = {stream: counts_of(votes, header) for stream, votes in item.streams.items()}
    return claim_counts(counts, header, item_id=item.item_id, alpha=alpha)


def claim_counts(
    counts: Mapping[str, IntArray], header: VotesHeader, *, item_id: str, alpha: float
) -> GaussianClaim:
    """CERTIFY from the (C,) votes per class of each stream."""
    drawn, uniform = drawn_of(header), None
    if drawn.method == "randomized":
        uniform = registered_uniform(run_seed=drawn.run_seed, item_id=item_id)
    return certify_counts(
        counts["select"],
        counts["estimate"],
        sigma=drawn.sigma,
        alpha=alpha,
        uniform=uniform,
    )


def claim_sequential(select: Array, estimate: Array, header: VotesHeader) -> SequentialClaim:
    """The claim from the draws so far; more draws are needed unless it is `finished`."""
    declared = header.settings["declared"]
    selection = choose_class(
        select,
        num_classes=header.num_classes,
        num_select=drawn_of(header).num_select,
        step=declared["select_step"],
        lead=declared["select_lead"],
    )
    if selection is None or selection.n0 != len(select):
        raise CasemateError("votes", f"{len(select)} selecting draws", "do not end at a look")
    return certify_prefix(estimate, plan_of(header), chosen=selection.chosen)


def derive_l2(votes: Votes, claim: GaussianClaimSettings) -> Derived:
    """certified accuracy(r) = mean[correct and radius >= r]; ACR = mean[radius * correct]."""
    header, alpha = votes.header, claim.failure_prob
    row_of = _sequential_row if is_sequential(header) else _fixed_row
    rows = [row_of(item, header, alpha) for item in votes.items()]
    fields = [*ITEM_FIELDS, *BOUND_FIELDS]
    if drawn_of(header).names_method:
        fields += METHOD_FIELDS[method_of(header)]
    return Derived(pa.schema(fields), rows, _summary(rows, header, claim))


def _bound_fields(item: ItemVotes, claim: GaussianClaim | SequentialClaim) -> Row:
    names = ("n", "k", "p_lower", "radius")
    return (
        item_fields(item, claim.prediction)
        | {"n0": len(item.streams["select"])}
        | {name: getattr(claim, name) for name in names}
    )


def _fixed_row(item: ItemVotes, header: VotesHeader, alpha: float) -> Row:
    row, drawn = _bound_fields(item, claim_fixed(item, header, alpha=alpha)), drawn_of(header)
    if drawn.names_method:
        # PREDICT may use the estimating draws: their number was fixed in advance.
        row["predicted"] = predict_counts(counts_of(item.streams["estimate"], header), alpha=alpha)
    if drawn.method == "randomized":
        row["uniform"] = registered_uniform(run_seed=drawn.run_seed, item_id=item.item_id)
    return row


def _sequential_row(item: ItemVotes, header: VotesHeader, alpha: float) -> Row:
    """The row of an item; draws must end at the first look that decides all radii."""
    estimate = item.streams["estimate"]
    claim = claim_sequential(item.streams["select"], estimate, header)
    if not claim.finished or claim.n != len(estimate):
        stop = f"{claim.n} draws decide" if claim.finished else "its radii are not decided"
        found = f"holds {len(estimate)} draws, but {stop}"
        raise CasemateError("votes", f"item {item.item_id}", found)
    return _bound_fields(item, claim) | {"num_looks": claim.num_looks}


def _summary(
    rows: list[Row], header: VotesHeader, claim: GaussianClaimSettings
) -> dict[str, object]:
    columns = ("correct", "abstain", "radius", "p_lower", "n")
    correct, abstain, radius, p_lower, n = (np.array([r[c] for r in rows]) for c in columns)
    summary: dict[str, Any] = {
        "num_items": len(rows),
        "standard_accuracy": exact_accuracy(correct),  # at radius 0: correct and not abstained
        "abstain_rate": exact_accuracy(abstain),
        "average_certified_radius": average_certified_radius(correct, radius),
        "max_radius": max_radius_of(header, claim),
        "certified": [
            {"radius": r, "accuracy": exact_accuracy(correct & (radius >= r))} for r in claim.radii
        ],
    }
    if not drawn_of(header).names_method:
        return summary
    spread = bound_distribution(p_lower)
    summary |= {
        "method": method_of(header),
        "num_possible_failures": num_possible_failures(
            num_items=len(rows), failure_prob=claim.failure_prob
        ),
        "bound_distribution": {
            "edges": spread.edges.tolist(),
            "counts": spread.counts.tolist(),
            "quantiles": {f"{level:g}": value for level, value in spread.quantiles.items()},
        },
    }
    if is_sequential(header):
        return summary | {"draws_used": _draws_used(n, at_most=drawn_of(header).num_estimate)}
    predicted = np.array([row["predicted"] for row in rows])
    right = predicted == np.array([row["label"] for row in rows])
    summary["prediction_accuracy"] = exact_accuracy(right)  # PREDICT: the label without a radius
    summary["prediction_abstain_rate"] = exact_accuracy(predicted < 0)
    return summary


def _draws_used(n: IntArray, *, at_most: int) -> dict[str, object]:
    """Statistics of the estimating draws per item."""
    return {
        "mean": int(n.sum()) / len(n),
        "median": float(np.median(n)),
        "max": int(n.max()),
        "total": int(n.sum()),
        "share": int(n.sum()) / (len(n) * at_most),  # of the draws of method `fixed`
    }
