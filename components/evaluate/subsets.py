"""Subsets of items: the same for every model, worker and order of the data.

Items are ordered by BLAKE2b of `seed|item id`; a smaller subset is the beginning of a larger one.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

from components.core.errors import CasemateError
from components.evaluate.settings import SubsetSettings


def seeded_order(item_ids: Sequence[str], *, seed: int) -> list[str]:
    """All items, sorted by the hash of their id."""
    return sorted(item_ids, key=lambda item_id: (_hash(item_id, seed), item_id))


def choose_items(
    item_ids: Sequence[str], labels: Sequence[int], subset: SubsetSettings, *, seed: int
) -> list[str]:
    """The chosen item ids, in seeded order; those of a given list in its order."""
    if len(set(item_ids)) < len(item_ids):
        raise ValueError("an item occurs twice")
    if subset.item_ids is not None:
        return _listed(item_ids, subset.item_ids)
    if subset.num_items is None or subset.num_items >= len(item_ids):
        return seeded_order(item_ids, seed=seed)
    if subset.by_class:
        return stratified(item_ids, labels, num_items=subset.num_items, seed=seed)
    return seeded_order(item_ids, seed=seed)[: subset.num_items]


def stratified(
    item_ids: Sequence[str], labels: Sequence[int], *, num_items: int, seed: int
) -> list[str]:
    """`num_items` items, each class with its share: the whole part of it, then one item each for
    the largest remainders (ties to the lower class). In seeded order.
    """
    members: dict[int, list[str]] = defaultdict(list)
    for item_id, label in zip(item_ids, labels, strict=True):
        members[label].append(item_id)
    shares = {
        label: Fraction(num_items * len(ids), len(item_ids)) for label, ids in members.items()
    }
    counts = {label: int(share) for label, share in shares.items()}
    by_remainder = sorted(shares, key=lambda label: (counts[label] - shares[label], label))
    for label in by_remainder[: num_items - sum(counts.values())]:
        counts[label] += 1
    chosen = [
        item_id
        for label, ids in members.items()
        for item_id in seeded_order(ids, seed=seed)[: counts[label]]
    ]
    return seeded_order(chosen, seed=seed)


def _listed(item_ids: Sequence[str], wanted: Sequence[str]) -> list[str]:
    known = set(item_ids)
    if unknown := [item_id for item_id in wanted if item_id not in known]:
        remedy = f"is not an item of this dataset ({len(unknown)} such ids)"
        raise CasemateError("subset.item_ids", unknown[0], remedy)
    if len(set(wanted)) < len(wanted):
        raise CasemateError("subset.item_ids", f"{len(wanted)} ids", "name an item twice")
    return list(wanted)


def _hash(item_id: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}|{item_id}".encode()).digest()
