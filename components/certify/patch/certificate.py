"""Patch certificates from votes: settings of a claim, rows and accuracies.

Three kinds of evidence: all votes over ablations, votes that stopped early, pairs of masks. The
table of full column votes without a second rule has the layout of the first version, byte for byte.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import pyarrow as pa
from scipy import optimize, special

from components.certify.claim_rows import ITEM_FIELDS, Derived, Row, item_fields
from components.certify.header import VotesHeader
from components.certify.patch.ablations import DELTA_RULES, num_touched
from components.certify.patch.double_masking import certify_pairs
from components.certify.patch.early_stop import PartialClaims, certify_partial
from components.certify.patch.evidence import ablations_of, early_stop_of, masks_of
from components.certify.patch.rules import PatchClaims, certify, check_rules
from components.certify.patch.settings import (
    AblationClaimSettings,
    DoubleMaskingClaimSettings,
    SecondRule,
)
from components.certify.vote_rows import ItemVotes, Votes
from components.core.errors import CasemateError
from components.core.settings import default_of
from components.core.statistics import CONFIDENCE, exact_accuracy
from components.core.types import Array

SECOND_RULES: tuple[str, ...] = get_args(SecondRule)
SIZES = ("certified_patch_sizes", pa.list_(pa.int32()))
COUNT_FIELDS = ("top_votes", "runner_up", "runner_up_votes", "margin")
PARTIAL_FIELDS = ("num_outstanding", "margin_low", "margin_high")


def check_sizes(header: VotesHeader, sizes: object) -> tuple[int, ...]:
    """Patch sizes in ascending order, or an error unless every one fits into the images."""
    if not isinstance(sizes, Sequence) or not sizes:
        raise CasemateError("certify.patch_sizes", sizes, "is not a list of sizes in pixels")
    side = min(header.image.size)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= side:
            raise CasemateError("certify.patch_sizes", size, f"is not in 1..{side} pixels")
    return tuple(sorted(set(sizes)))


def check_pair_claim(
    header: VotesHeader, claim: Mapping[str, object]
) -> DoubleMaskingClaimSettings:
    """The claim in canonical form: sizes sorted, all of them hidden by the masks."""
    sizes, masks = check_sizes(header, claim["patch_sizes"]), masks_of(header)
    for size in sizes:
        if not masks.covers(size):
            remedy = (
                f"is larger than the {masks.patch} pixels these masks hide; vote with other masks"
            )
            raise CasemateError("certify.patch_sizes", size, remedy)
    return DoubleMaskingClaimSettings(patch_sizes=sizes)


def check_ablation_claim(header: VotesHeader, claim: Mapping[str, Any]) -> AblationClaimSettings:
    """The claim in canonical form: sizes sorted, rules known and compatible."""
    sizes = check_sizes(header, claim["patch_sizes"])
    usual = {
        name: default_of(AblationClaimSettings, name) for name in ("second_rule", "delta_rule")
    }
    rule, second = claim["rule"], claim.get("second_rule", usual["second_rule"])
    delta_rule = claim.get("delta_rule", usual["delta_rule"])
    if delta_rule not in DELTA_RULES:
        known = ", ".join(DELTA_RULES)
        raise CasemateError("certify.delta_rule", delta_rule, f"is not one of {known}")
    check_rules([rule], delta_rule=delta_rule)
    if second not in SECOND_RULES or second == rule:
        again = "is already the rule; leave it out with --second-rule none"
        remedy = again if second == rule else "is neither none nor loc"
        raise CasemateError("certify.second_rule", second, remedy)
    checked = AblationClaimSettings(
        patch_sizes=sizes, rule=rule, delta_rule=delta_rule, second_rule=second
    )
    _check_supported(header, checked)
    return checked


def _check_supported(header: VotesHeader, claim: AblationClaimSettings) -> None:
    """Reject claims that votes do not support because voting stopped early for other claims."""
    if (stop := early_stop_of(header)) is None:
        return
    cannot = "cannot be derived: voting stopped early, once"
    known = ", ".join(map(str, stop.patch_sizes))
    for size in claim.patch_sizes:
        if size not in stop.patch_sizes:
            raise CasemateError(
                "certify.patch_sizes", size, f"{cannot} sizes {known} were decided; vote again"
            )
    requested = {"rule": claim.rule, "second_rule": claim.second_rule}
    for name, rule in requested.items():
        if rule not in ("none", *stop.rules):
            remedy = f"{cannot} {', '.join(stop.rules)} was decided; vote again"
            raise CasemateError(f"certify.{name}", rule, remedy)
    if claim.delta_rule != "exact":
        remedy = f"{cannot} rule exact was decided; vote again"
        raise CasemateError("certify.delta_rule", claim.delta_rule, remedy)


def is_sound(claim: Mapping[str, object]) -> bool:
    """False for a claim that only reproduces published tables."""
    return bool(claim.get("delta_rule", "exact") == "exact")


def derive_ablations(votes: Votes, claim: AblationClaimSettings) -> Derived:
    """Rows and accuracies of a checked claim from votes over ablations."""
    header, sizes = votes.header, claim.patch_sizes
    partial = early_stop_of(header) is not None
    second = claim.second_rule if claim.second_rule != "none" else None
    fields = PARTIAL_FIELDS if partial else COUNT_FIELDS
    names = [SIZES[0], *([f"{SIZES[0]}_{second}"] if second else [])]
    rows: list[Row] = []
    num_right = 0  # votes for the label
    for items in votes.some_items():
        predictions = np.stack([item.streams[header.kind] for item in items])
        rows += _ablation_rows(votes, items, predictions, claim, fields=fields)
        num_right += int((predictions == np.array([i.label for i in items])[:, None]).sum())
    correct = np.array([row["correct"] for row in rows])
    certified = [
        _touched_entry(votes, claim, size)
        | {
            name.replace(SIZES[0], "accuracy"): exact_accuracy(
                correct & np.array([size in row[name] for row in rows])
            )
            for name in names
        }
        for size in sizes
    ]
    summary = {
        "num_items": len(rows),
        "standard_accuracy": exact_accuracy(correct),
        "certified": certified,
    }
    num_votes = len(rows) * len(ablations_of(header))
    if partial:
        asked = num_votes - sum(int(row["num_outstanding"]) for row in rows)
        summary["votes_asked"] = {"value": asked / num_votes, "num_votes": asked}
    else:
        summary["ablation_accuracy"] = ablation_accuracy(num_right / num_votes, len(rows))
    schema = [*ITEM_FIELDS, *((f, pa.int32()) for f in fields), *((c, SIZES[1]) for c in names)]
    return Derived(pa.schema(schema), rows, summary)


def _ablation_rows(
    votes: Votes,
    items: Sequence[ItemVotes],
    predictions: Array,
    claim: AblationClaimSettings,
    *,
    fields: Sequence[str],
) -> list[Row]:
    """The rows of some items, from their (N, K) votes."""
    claims = _claims(votes, items, predictions, claim, rule=claim.rule)
    columns = {SIZES[0]: claims.certified}
    if (second := claim.second_rule) != "none":
        columns[f"{SIZES[0]}_{second}"] = _claims(
            votes, items, predictions, claim, rule=second
        ).certified
    sizes = np.array(claim.patch_sizes)
    return [
        item_fields(item, int(claims.prediction[i]))
        | {name: getattr(claims, name)[i] for name in fields}
        | {name: sizes[certified[i]].tolist() for name, certified in columns.items()}
        for i, item in enumerate(items)
    ]


def _claims(
    votes: Votes,
    items: Sequence[ItemVotes],
    predictions: Array,
    claim: AblationClaimSettings,
    *,
    rule: str,
) -> PatchClaims | PartialClaims:
    """Verdicts under one rule; an error names an item whose votes stopped before a decision."""
    header = votes.header
    num_classes, sizes = header.num_classes, claim.patch_sizes
    delta_rule = claim.delta_rule if rule != "loc" else "exact"
    if early_stop_of(header) is None:
        return certify(
            predictions,
            ablations_of(header),
            num_classes=num_classes,
            patch_sizes=sizes,
            rule=rule,
            delta_rule=delta_rule,
        )
    claims = certify_partial(
        predictions, ablations_of(header), num_classes=num_classes, patch_sizes=sizes, rule=rule
    )
    if (undecided := claims.undecided).any():
        item = items[int(undecided.argmax())].item_id
        raise CasemateError("votes", f"of item {item}", "stopped before they decided the claim")
    return claims


def _touched_entry(votes: Votes, claim: AblationClaimSettings, size: int) -> dict[str, int]:
    ablations, rule = ablations_of(votes.header), claim.delta_rule
    entry = {"patch_size": size, "num_touched": num_touched(ablations, size, delta_rule=rule)}
    return entry | ({} if rule == "exact" else {"exact_touched": num_touched(ablations, size)})


def derive_pairs(votes: Votes, claim: DoubleMaskingClaimSettings) -> Derived:
    """Rows and accuracies of a checked claim from pairs of masks."""
    header, sizes = votes.header, claim.patch_sizes
    rows = [row for items in votes.some_items() for row in _pair_rows(votes, items, sizes)]
    correct = np.array([row["correct"] for row in rows])
    proven = exact_accuracy(correct & np.array([bool(row[SIZES[0]]) for row in rows]))
    summary = {
        "num_items": len(rows),
        "num_masks": len(masks_of(header)),
        "standard_accuracy": exact_accuracy(correct),
        "certified": [{"patch_size": size, "accuracy": proven} for size in sizes],
    }
    counts = [("num_agreeing", pa.int32()), ("num_pairs", pa.int32())]
    return Derived(pa.schema([*ITEM_FIELDS, *counts, SIZES]), rows, summary)


def _pair_rows(votes: Votes, items: Sequence[ItemVotes], sizes: Sequence[int]) -> list[Row]:
    predictions = np.stack([item.streams["pairs"] for item in items])
    claims = certify_pairs(
        predictions, masks_of(votes.header), num_classes=votes.header.num_classes
    )
    return [
        item_fields(item, int(claims.prediction[i]))
        | {
            "num_agreeing": claims.num_agreeing[i],
            "num_pairs": predictions.shape[1],
            SIZES[0]: list(sizes) if claims.certified[i] else [],
        }
        for i, item in enumerate(items)
    ]


def ablation_accuracy(share: float, num_items: int) -> dict[str, float | int]:
    """Share of correct votes over all ablations and items, with a 95% interval over items.

    Votes of one item are not independent, so the interval is for the mean of N shares in [0, 1]:
    all q with N KL(share || q) <= ln(2 / 0.05) (Hoeffding 1963, Theorem 1).
    """

    def excess(q: float) -> float:
        divergence = special.rel_entr(share, q) + special.rel_entr(1 - share, 1 - q)
        return float(num_items * divergence - math.log(2 / (1 - CONFIDENCE)))

    low = optimize.bisect(excess, 0.0, share) if share > 0 else 0.0
    high = optimize.bisect(excess, share, 1.0) if share < 1 else 1.0
    return {"value": share, "low": low, "high": high, "num_items": num_items}
