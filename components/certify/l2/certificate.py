"""l2 certificates from votes: settings of a claim, one claim per item, rows and figures.

Three methods: a fixed number of draws (Cohen et al. 2019), the same with the randomised bound,
and draws that stop when the declared radii are decided. Votes whose header names no method keep
the layout of the first certificates, byte for byte.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from components.certify.claim_rows import ITEM_FIELDS, Derived, Row, item_fields
from components.certify.l2.bounds import max_radius, max_randomized_radius
from components.certify.l2.claims import (
    GaussianClaim,
    certify_counts,
    check_can_certify,
    check_can_reach,
    check_randomized,
    registered_uniform,
)
from components.certify.l2.curves import (
    average_certified_radius,
    bound_distribution,
    num_possible_failures,
)
from components.certify.l2.evidence import is_sequential, method_of, plan_of
from components.certify.l2.predict import predict_counts
from components.certify.l2.sequential import SequentialClaim, certify_prefix, choose_class
from components.certify.votes import ItemVotes, Votes
from components.core.errors import CasemateError
from components.core.types import Array, IntArray
from components.evaluate.accuracy import accuracy

L2_CLAIM = ("failure_prob", "radii")
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


def check_l2_claim(header: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The claim in its one written form, or an error that names the bad setting."""
    radii, alpha = settings["radii"], settings["failure_prob"]
    if not isinstance(radii, Sequence) or not radii:
        raise CasemateError("certify.radii", radii, "is not a list of l2 distances in pixels")
    least = 0 if is_sequential(header) else math.ulp(0.0)  # radius 0 asks for an answer
    for radius in radii:
        if not isinstance(radius, int | float) or not least <= radius <= sys.float_info.max:
            raise CasemateError("certify.radii", radius, "is not a positive l2 distance in pixels")
    if not isinstance(alpha, int | float):
        raise CasemateError("certify.failure_prob", alpha, "is not a probability")
    if is_sequential(header):
        _check_answerable(header, radii, alpha)
    elif method_of(header) == "randomized":
        check_randomized(alpha)
    check_can_certify(n=header["settings"]["num_estimate"], alpha=alpha)
    return {"failure_prob": float(alpha), "radii": sorted({float(radius) for radius in radii})}


def _check_answerable(header: Mapping[str, Any], radii: Sequence[float], alpha: float) -> None:
    """Draws that stopped early answer what they were stopped for, and nothing else."""
    declared = header["settings"]["declared"]
    cannot = "cannot be answered: drawing stopped early, once"
    if alpha != declared["failure_prob"]:
        remedy = f"{cannot} {declared['failure_prob']:g} was honoured; draw again"
        raise CasemateError("certify.failure_prob", alpha, remedy)
    known = ", ".join(f"{radius:g}" for radius in declared["radii"])
    for radius in radii:
        if radius not in declared["radii"]:
            remedy = f"{cannot} radii {known} were decided; draw again"
            raise CasemateError("certify.radii", radius, remedy)


def check_reachable(header: Mapping[str, Any], claim: Mapping[str, Any]) -> None:
    """Refuse radii of a new claim that no votes of this number could have certified."""
    if is_sequential(header):
        return  # only declared radii pass `check_l2_claim`, and those were in reach
    drawn = header["settings"]
    check_can_reach(
        claim["radii"],
        sigma=float(drawn["sigma"]),
        n=drawn["num_estimate"],
        alpha=claim["failure_prob"],
        randomized=method_of(header) == "randomized",
    )


def reach_of(header: Mapping[str, Any], settings: Mapping[str, Any]) -> float:
    """The radius that no claim from this many draws can exceed."""
    if is_sequential(header):
        return plan_of(header).reach
    drawn, alpha = header["settings"], settings["failure_prob"]
    most = max_randomized_radius if method_of(header) == "randomized" else max_radius
    return most(sigma=float(drawn["sigma"]), n=drawn["num_estimate"], alpha=alpha)


def counts_of(votes: Array, header: Mapping[str, Any]) -> IntArray:
    """(C,) votes per class."""
    return np.bincount(votes, minlength=header["num_classes"])


def claim_fixed(item: ItemVotes, header: Mapping[str, Any], *, alpha: float) -> GaussianClaim:
    """CERTIFY from all draws of an item, with the bound of the header's method."""
    drawn, uniform = header["settings"], None
    if method_of(header) == "randomized":
        uniform = registered_uniform(run_seed=drawn["run_seed"], item_id=item.item_id)
    return certify_counts(
        counts_of(item.streams["select"], header),
        counts_of(item.streams["estimate"], header),
        sigma=float(drawn["sigma"]),
        alpha=alpha,
        uniform=uniform,
    )


def claim_sequential(select: Array, estimate: Array, header: Mapping[str, Any]) -> SequentialClaim:
    """The claim of the draws so far; not finished: draw on."""
    declared = header["settings"]["declared"]
    selection = choose_class(
        select,
        num_classes=header["num_classes"],
        num_select=header["settings"]["num_select"],
        step=declared["select_step"],
        lead=declared["select_lead"],
    )
    if selection is None or selection.n0 != len(select):
        raise CasemateError("votes", f"{len(select)} selecting draws", "are not where looks end")
    return certify_prefix(estimate, plan_of(header), chosen=selection.chosen)


def derive_l2(votes: Votes, settings: Mapping[str, Any]) -> Derived:
    """certified accuracy(r) = mean[correct and radius >= r]; ACR = mean[radius * correct]."""
    header, alpha = votes.header, settings["failure_prob"]
    row_of = _sequential_row if is_sequential(header) else _fixed_row
    rows = [row_of(item, header, alpha) for item in votes.items()]
    fields = [*ITEM_FIELDS, *BOUND_FIELDS]
    if "method" in header["settings"]:
        fields += METHOD_FIELDS[method_of(header)]
    return Derived(pa.schema(fields), rows, _summary(rows, header, settings))


def _bound_fields(item: ItemVotes, claim: GaussianClaim | SequentialClaim) -> Row:
    names = ("n", "k", "p_lower", "radius")
    return (
        item_fields(item, claim.prediction)
        | {"n0": len(item.streams["select"])}
        | {name: getattr(claim, name) for name in names}
    )


def _fixed_row(item: ItemVotes, header: Mapping[str, Any], alpha: float) -> Row:
    row = _bound_fields(item, claim_fixed(item, header, alpha=alpha))
    if "method" in header["settings"]:
        # PREDICT may use the estimating draws: their number was fixed beforehand.
        row["predicted"] = predict_counts(counts_of(item.streams["estimate"], header), alpha=alpha)
    if method_of(header) == "randomized":
        seed = header["settings"]["run_seed"]
        row["uniform"] = registered_uniform(run_seed=seed, item_id=item.item_id)
    return row


def _sequential_row(item: ItemVotes, header: Mapping[str, Any], alpha: float) -> Row:
    """Refuses draws that end anywhere but at the first look that decides all radii."""
    estimate = item.streams["estimate"]
    claim = claim_sequential(item.streams["select"], estimate, header)
    if not claim.finished or claim.n != len(estimate):
        stop = f"{claim.n} draws decide" if claim.finished else "its radii are not decided"
        found = f"holds {len(estimate)} draws, but {stop}"
        raise CasemateError("votes", f"item {item.item_id}", found)
    return _bound_fields(item, claim) | {"num_looks": claim.num_looks}


def _summary(
    rows: list[Row], header: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    columns = ("correct", "abstain", "radius", "p_lower", "n")
    correct, abstain, radius, p_lower, n = (np.array([r[c] for r in rows]) for c in columns)
    summary: dict[str, Any] = {
        "num_items": len(rows),
        "standard_accuracy": accuracy(correct),  # at radius 0: correct and not abstained
        "abstain_rate": accuracy(abstain),
        "average_certified_radius": average_certified_radius(correct, radius),
        "max_radius": reach_of(header, settings),
        "certified": [
            {"radius": r, "accuracy": accuracy(correct & (radius >= r))} for r in settings["radii"]
        ],
    }
    if "method" not in header["settings"]:
        return summary
    spread = bound_distribution(p_lower)
    summary |= {
        "method": method_of(header),
        "num_possible_failures": num_possible_failures(
            num_items=len(rows), failure_prob=settings["failure_prob"]
        ),
        "bound_distribution": {
            "edges": spread.edges.tolist(),
            "counts": spread.counts.tolist(),
            "quantiles": {f"{level:g}": value for level, value in spread.quantiles.items()},
        },
    }
    if is_sequential(header):
        return summary | {"draws_used": _draws_used(n, at_most=header["settings"]["num_estimate"])}
    predicted = np.array([row["predicted"] for row in rows])
    right = predicted == np.array([row["label"] for row in rows])
    summary["prediction_accuracy"] = accuracy(right)  # PREDICT: the label without a radius
    summary["prediction_abstain_rate"] = accuracy(predicted < 0)
    return summary


def _draws_used(n: IntArray, *, at_most: int) -> dict[str, Any]:
    """Estimating draws that decided the items."""
    return {
        "mean": int(n.sum()) / len(n),
        "median": float(np.median(n)),
        "max": int(n.max()),
        "total": int(n.sum()),
        "share": int(n.sum()) / (len(n) * at_most),  # of what a fixed number would have drawn
    }
