"""Which of our splits a foreign split's name means."""

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
    """Ours for a usual word, upper and lower case alike."""
    return USUAL.get(name.casefold())


def split_hints(present: Iterable[str], chosen: Mapping[str, str] | None) -> dict[str, str]:
    """Foreign name -> train, val or test; empty when the names speak of no split at all.

    `chosen` says which foreign split each of ours is, and what it leaves out is left out. Without
    it the usual words are understood; a foreign word beside them is an error, not a guess.
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
    """What to say about names among which a split is suspected."""
    remedy = "must be set, e.g. {train: train, test: validation}; not understood: "
    return CasemateError("data.options.splits", None, remedy + ", ".join(sorted(names)))


def _chosen_hints(names: set[str], chosen: Mapping[str, str]) -> dict[str, str]:
    key = "data.options.splits"
    for ours, theirs in chosen.items():
        if ours not in ("train", "val", "test"):
            raise CasemateError(key, ours, "is no split; choose train, val, test")
        if theirs not in names:
            there = ", ".join(sorted(names))
            raise CasemateError(key, theirs, f"is not there; choose of {there}")
    hints = {theirs: ours for ours, theirs in chosen.items()}
    if not chosen or len(hints) < len(chosen):
        raise CasemateError(key, dict(chosen), "must give each split a source of its own")
    return hints
