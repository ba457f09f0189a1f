"""Assignment of items to train, val and test by hashes, independent of listing order.

Every choice sorts items by SHA-256 of (stream, seed, item id), so adding a worker, renaming a
parent folder or listing files in another order changes no split.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from components.core.digests import digest_bytes
from components.core.errors import CasemateError
from components.data.sources.base import Entry

SPLITS = ("train", "val", "test")


def hash_rank(stream: str, *, seed: int, item_id: str) -> str:
    """A uniform sort key for one purpose; streams are independent of each other."""
    return digest_bytes(stream.encode(), str(seed).encode(), item_id.encode())


def assign_splits(
    entries: Iterable[Entry],
    *,
    classes: Sequence[str],
    seed: int,
    val_fraction: float,
    test_fraction: float,
    limits: Mapping[str, int],
    test_only: bool = False,
) -> dict[str, list[Entry]]:
    """Entries per split, in the shuffled order in which they are stored.

    A native val or test split is used unchanged; a missing one is taken, class by class, from the
    train entries: `fraction` of each class, rounded half up. Limits apply last. Sources that are
    `test_only` may have no training items, and classes without items; for other
    sources an empty split is an error.
    """
    _check_settings(val_fraction=val_fraction, test_fraction=test_fraction, limits=limits)
    native: dict[str, list[Entry]] = {split: [] for split in SPLITS}
    for entry in entries:
        native[entry.split_hint or "train"].append(entry)
    wanted = {"test": test_fraction, "val": val_fraction}
    carved = {split: share for split, share in wanted.items() if not native[split]}
    splits = _carve(native, carved, seed=seed)
    if not test_only:
        _check_carved(splits, carved, num_items=len(native["train"]), num_classes=len(classes))
    for split, limit in limits.items():
        chosen = stratified_subset(splits[split], limit=limit, stream=split, seed=seed)
        if split == "train" and not test_only:
            chosen = _with_every_class(chosen, splits[split], stream=split, seed=seed)
        splits[split] = chosen
    remedy = "raise data.limits.train" if "train" in limits else "add images of this class"
    if not test_only:
        labels = (entry.label for entry in splits["train"])
        check_training_classes(labels, classes=classes, remedy=remedy)
    return {split: shuffled(splits[split], seed=seed) for split in SPLITS}


def _check_carved(
    splits: Mapping[str, Sequence[Entry]],
    fractions: Mapping[str, float],
    *,
    num_items: int,
    num_classes: int,
) -> None:
    for split, fraction in fractions.items():
        if fraction and num_items and not splits[split]:
            remedy = (
                f"leaves the {split} split empty: {num_items} images in {num_classes} classes, "
                "and each class gives its share rounded; raise it or add images"
            )
            raise CasemateError(f"data.{split}_fraction", fraction, remedy)


def check_training_classes(labels: Iterable[int], *, classes: Sequence[str], remedy: str) -> None:
    """Raise an error for classes without a training item."""
    present = set(labels)
    for label, name in enumerate(classes):
        if label not in present:
            raise CasemateError("data", f"class {name}", f"has no training item; {remedy}")


def stratified_subset(
    entries: Sequence[Entry], *, limit: int, stream: str, seed: int
) -> list[Entry]:
    """`limit` entries with the classes in proportion (Hamilton's largest remainders).

    Every class gets its exact share rounded down or up; equal remainders are decided by hash, so
    that no class is favoured by its index.
    """
    if limit >= len(entries):
        return list(entries)
    groups = _by_class(entries)
    shares = {label: Fraction(limit * len(g), len(entries)) for label, g in groups.items()}
    counts = {label: int(share) for label, share in shares.items()}

    def claim(label: int) -> tuple[Fraction, str]:
        tie = hash_rank(f"data.limit.{stream}.class", seed=seed, item_id=str(label))
        return counts[label] - shares[label], tie  # largest remainder first

    for label in sorted(groups, key=claim)[: limit - sum(counts.values())]:
        counts[label] += 1
    chosen: list[Entry] = []
    for label, members in groups.items():
        ranked = _ranked(members, stream=f"data.limit.{stream}", seed=seed)
        chosen += [entry for _, entry in ranked[: counts[label]]]
    return chosen


def _with_every_class(
    chosen: list[Entry], entries: Sequence[Entry], *, stream: str, seed: int
) -> list[Entry]:
    """The chosen items with one of each class that got none, instead of some of the largest class.

    A class of 3 among 1,000 gets none of 100 items, and training needs every class. Nothing
    changes where each class has an item, or where there are more classes than items.
    """
    groups, every = _by_class(chosen), _by_class(entries)
    left = sorted(every.keys() - groups.keys())
    if len(every) > len(chosen):
        return chosen
    for label in left:
        largest = max(groups, key=lambda other: (len(groups[other]), -other))
        groups[largest].pop()  # the last one in the order of its hashes
        ranked = _ranked(every[label], stream=f"data.limit.{stream}", seed=seed)
        groups[label] = [ranked[0][1]]
    return [entry for members in groups.values() for entry in members]


def _carve(
    native: Mapping[str, list[Entry]], fractions: Mapping[str, float], *, seed: int
) -> dict[str, list[Entry]]:
    splits = {"train": [], **{split: list(native[split]) for split in ("val", "test")}}
    for members in _by_class(native["train"]).values():
        rest = [entry for _, entry in _ranked(members, stream="data.split", seed=seed)]
        for split, fraction in fractions.items():
            count = rounded_share(fraction, len(members))
            splits[split] += rest[:count]
            rest = rest[count:]
        splits["train"] += rest
    return splits


def rounded_share(fraction: float, num_items: int) -> int:
    """A share of items, rounded half up."""
    exact = Fraction(str(fraction)) * num_items  # 0.29 means 29/100, not its nearest double
    return int(exact + Fraction(1, 2))


def _by_class(entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    groups: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.label].append(entry)
    return groups


def _ranked(entries: Iterable[Entry], *, stream: str, seed: int) -> list[tuple[str, Entry]]:
    keyed = [(hash_rank(stream, seed=seed, item_id=entry.item_id), entry) for entry in entries]
    return sorted(keyed, key=lambda pair: pair[0])


def shuffled(entries: Iterable[Entry], *, seed: int) -> list[Entry]:
    """The order in which a split is stored."""
    return [entry for _, entry in _ranked(entries, stream="data.order", seed=seed)]


def _check_settings(
    *, val_fraction: float, test_fraction: float, limits: Mapping[str, int]
) -> None:
    for key, fraction in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
        if not 0 <= fraction < 1:
            raise CasemateError(f"data.{key}", fraction, "is outside [0, 1)")
    if val_fraction + test_fraction >= 1:
        both = f"{val_fraction} + test_fraction {test_fraction}"
        raise CasemateError("data.val_fraction", both, "leaves nothing to train on")
    for split, limit in limits.items():
        if split not in SPLITS:
            raise CasemateError(f"data.limits.{split}", limit, f"is not one of the splits {SPLITS}")
        if limit < 1:
            raise CasemateError(f"data.limits.{split}", limit, "must be at least 1")
