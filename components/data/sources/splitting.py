"""Mapping of foreign split names to train, val and test."""

from collections.abc import Iterable, Mapping

from components.core.errors import CasemateError

USUAL = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


def usual_split(name: str) -> str | None:
    """train, val or test for a usual name, ignoring case; None for others."""
    return USUAL.get(name.casefold())


def split_hints(present: Iterable[str], chosen: Mapping[str, str] | None) -> dict[str, str]:
    """Foreign name -> train, val or test; empty if no name is that of a split.

    `chosen` maps our splits to foreign ones; splits that it does not name are left out. Without it
    the usual names are recognised; an unknown name beside them is an error, not a guess.
    """
    names = set(present)
    if chosen is not None:
        return _chosen_hints(names, chosen)
    hints = {name: ours for name in names if (ours := usual_split(name))}
    strange = names - set(hints)
    if strange and hints:
        raise not_understood(strange)
    return hints


def not_understood(names: Iterable[str]) -> CasemateError:
    """Error for names that are not recognised as splits."""
    remedy = "must be set, e.g. {train: train, test: validation}; not understood: "
    return CasemateError("data.options.splits", None, remedy + ", ".join(sorted(names)))


def _chosen_hints(names: set[str], chosen: Mapping[str, str]) -> dict[str, str]:
    key = "data.options.splits"
    for ours, theirs in chosen.items():
        if ours not in ("train", "val", "test"):
            raise CasemateError(key, ours, "is not a split; choose train, val, test")
        if theirs not in names:
            there = ", ".join(sorted(names))
            raise CasemateError(key, theirs, f"does not exist; choose from {there}")
    hints = {theirs: ours for ours, theirs in chosen.items()}
    if not chosen or len(hints) < len(chosen):
        raise CasemateError(key, dict(chosen), "must name a different source for each split")
    return hints
