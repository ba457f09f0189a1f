"""Independent recount of patch claims by sets and loops, without code of the certificates."""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from components.certify.claim_rows import Row, StoredClaims
from components.certify.header import VotesHeader
from components.certify.patch.settings import AblationClaimSettings, DoubleMaskingClaimSettings
from components.certify.vote_rows import Votes

UNSEEN = 65535  # repeated here: the audit must not share code with what it checks


def audit_ablations(
    votes: Votes, claim: AblationClaimSettings, stored: StoredClaims
) -> Iterator[str]:
    """Problems of claims from votes over ablations, by item."""
    deltas = {size: recount_touched(votes.header, size) for size in claim.patch_sizes}
    certified = stored.summary["certified"]
    for entry in certified:
        size, counted = entry["patch_size"], entry.get("exact_touched", entry["num_touched"])
        if counted != deltas[size]:
            yield f"patch size {size}: {counted} touched bands, sets give {deltas[size]}"
    if claim.delta_rule != "exact":
        deltas = {entry["patch_size"]: entry["num_touched"] for entry in certified}
    claims = {row["item_id"]: row for row in stored.rows}
    for item in votes.items():
        if (row := claims.get(item.item_id)) is not None:  # else reported by the comparison of rows
            predictions = item.streams[votes.header.kind].tolist()
            problems = _audit_item(votes.header, claim, deltas, predictions, row)
            yield from (f"item {item.item_id}: {problem}" for problem in problems)


def _audit_item(
    header: VotesHeader,
    claim: AblationClaimSettings,
    deltas: Mapping[int, int],
    predictions: list[int],
    row: Row,
) -> Iterator[str]:
    """Margin and sizes of one item, from counts alone."""
    outstanding = predictions.count(UNSEEN) if header.settings.get("stopped_for") else 0
    best, margin = _recount_margin(
        [c for c in predictions if not outstanding or c != UNSEEN], header.num_classes
    )
    claimed = (row.get("margin_low", row.get("margin")), row.get("margin_high", row.get("margin")))
    if row["prediction"] != best or claimed != (margin - outstanding, margin + outstanding):
        yield f"margin by hand is {margin} for class {best}, {outstanding} votes outstanding"
    if outstanding > margin:
        yield f"{outstanding} outstanding votes could change the prediction"
    allowed = {size for size, delta in deltas.items() if margin - outstanding >= 2 * delta}
    sizes = set(row["certified_patch_sizes"])
    # `loc` may certify more than counts alone, never less.
    if claim.rule != "loc" and (beyond := sorted(sizes - allowed)):
        yield f"certified_patch_sizes {beyond} exceed margin {margin - outstanding}"
    loc = sizes if claim.rule == "loc" else set(row.get("certified_patch_sizes_loc", allowed))
    if claim.delta_rule == "exact" and (lost := sorted(allowed - loc)):
        yield f"rule loc lacks {lost}, which the counts alone prove"


def _recount_margin(predictions: list[int], num_classes: int) -> tuple[int, int]:
    counts = Counter(predictions)
    best = min(counts, key=lambda c: (-counts[c], c))
    rivals = (c for c in range(num_classes) if c != best)
    return best, min(counts[best] - counts[c] - (c < best) for c in rivals)


def recount_touched(header: VotesHeader, size: int) -> int:
    """The most ablations that a square of this side touches, by sets of pixels."""
    settings, image = header.settings, header.image

    def along(side: int) -> int:
        bands = [
            {(start + offset) % side for offset in range(settings["band"])}
            for start in range(0, side, settings["stride"])
        ]
        patches = (set(range(first, first + size)) for first in range(side - size + 1))
        return max(sum(not patch.isdisjoint(band) for band in bands) for patch in patches)

    sides = {
        "columns": [[image.width]],
        "rows": [[image.height]],
        "blocks": [[image.height, image.width]],
        "both": [[image.width], [image.height]],
    }
    return sum(prod(map(along, divided)) for divided in sides[header.kind])


def audit_pairs(
    votes: Votes, claim: DoubleMaskingClaimSettings, stored: StoredClaims
) -> Iterator[str]:
    """Problems of claims: pairs of a certified item that differ, patches that no mask hides."""
    largest, image = max(claim.patch_sizes), votes.header.image
    for name, side in (("height", image.height), ("width", image.width)):
        missed = _uncovered(votes.header.settings, side, largest)
        if missed is not None:
            yield f"patch size {largest}: no mask hides the patch at {name} {missed}"
    certified = {row["item_id"]: bool(row["certified_patch_sizes"]) for row in stored.rows}
    for item in votes.items():
        classes = set(item.streams["pairs"].tolist())
        if certified.get(item.item_id) and len(classes) > 1:
            yield f"item {item.item_id}: certified, but its pairs name classes {sorted(classes)}"


def _uncovered(settings: Mapping[str, Any], side: int, patch: int) -> int | None:
    """The first position along one side that lies inside no mask."""
    step = -(-(side - settings["mask_patch"] + 1) // settings["num_masks"])
    length = settings["mask_patch"] + step - 1
    hidden = [
        set(range(min(start, side - length), min(start, side - length) + length))
        for start in range(0, side - settings["mask_patch"] + 1, step)
    ]
    positions = range(side - patch + 1)
    return next(
        (p for p in positions if not any(h.issuperset(range(p, p + patch)) for h in hidden)), None
    )
