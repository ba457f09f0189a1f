"""Image datasets of the Hugging Face hub, through their own package `datasets` (an extra)."""

import importlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from components.core.errors import CasemateError
from components.data.sources.base import Entry, NamedSplits, Pixels, UndecodableItemError
from components.data.sources.files import decode_image_bytes, decode_image_file
from components.data.sources.labels import check_label_range, checked_labels, numbered_classes
from components.data.sources.splitting import split_hints


@dataclass(frozen=True, slots=True)
class Address:
    """Arguments of `load_dataset`."""

    hub_name: str
    config: str | None
    revision: str | None
    cache: str | None


@dataclass(frozen=True, slots=True)
class HubSource(NamedSplits):
    """A dataset of the hub; each worker opens it once from the cache."""

    address: Address
    image_column: str
    label_column: str
    splits: tuple[tuple[str, str], ...]  # (name on the hub, ours)
    classes: tuple[str, ...]

    def entries(self) -> list[Entry]:
        dataset = _load(self.address)
        found: list[Entry] = []
        for theirs, ours in self.splits:
            where = f"{self.address.hub_name}-{theirs}"
            labels = _labels(dataset[theirs], self.label_column, where=where)
            check_label_range(labels, where=where, num_classes=len(self.classes))
            version = str(getattr(dataset[theirs], "_fingerprint", ""))
            found += [
                Entry(f"hf-{where}-{row:05d}", label, ours, f"{theirs}:{row}", version)
                for row, label in enumerate(labels)
            ]
        return found

    def decode(self, entry: Entry) -> Pixels:
        split, row = entry.locator.rsplit(":", 1)
        dataset = _undecoded(self.address, split, self.image_column)
        image = dataset[int(row)][self.image_column]
        if image["bytes"] is not None:
            return decode_image_bytes(image["bytes"], where=entry.item_id)
        if image["path"] is not None:
            return decode_image_file(Path(image["path"]))
        remedy = "has neither bytes nor a file; set data.on_error=skip to leave it out"
        raise UndecodableItemError("data.source", entry.item_id, remedy)


def open_huggingface(
    hub_name: str,
    path: Path | None,
    *,
    config: str | None = None,
    revision: str | None = None,
    image_column: str = "image",
    label_column: str = "label",
    splits: dict[str, str] | None = None,
) -> HubSource:
    """A dataset of the hub, downloaded if needed; `path` is the cache folder."""
    address = Address(hub_name, config, revision, cache=None if path is None else str(path))
    dataset = _load(address)
    hints = split_hints(dataset.keys(), splits)
    if not hints:
        there = ", ".join(dataset.keys())
        raise CasemateError("data.options.splits", None, f"must be set; {hub_name} has {there}")
    for theirs in hints:
        for key, column in (("image_column", image_column), ("label_column", label_column)):
            if column not in dataset[theirs].features:
                columns = ", ".join(dataset[theirs].features)
                remedy = f"is not a column of {hub_name}; there are {columns}"
                raise CasemateError(f"data.options.{key}", column, remedy)
    names = getattr(dataset[next(iter(hints))].features[label_column], "names", None)
    if names is None:
        labels = [_labels(dataset[theirs], label_column, where=hub_name) for theirs in hints]
        names = numbered_classes([label for row in labels for label in row])
    chosen = tuple(sorted(hints.items(), key=lambda pair: ("train", "val", "test").index(pair[1])))
    return HubSource(address, image_column, label_column, chosen, tuple(names))


def _labels(split: Any, column: str, *, where: str) -> list[int]:
    labels = np.asarray(list(split[column]))
    return checked_labels(labels, where=where, num_items=len(labels))


def _package(hub_name: str) -> Any:
    """Import the package; a local folder named `datasets` is not accepted."""
    try:
        package = importlib.import_module("datasets")
    except ImportError:
        package = None
    if not hasattr(package, "load_dataset"):
        remedy = "needs the package datasets; run: pip install 'casemate[hf]'"
        raise CasemateError("data.source", f"hf:{hub_name}", remedy)
    return package


@lru_cache(maxsize=2)
def _load(address: Address) -> Any:
    package = _package(address.hub_name)
    try:
        return package.load_dataset(
            address.hub_name, address.config, revision=address.revision, cache_dir=address.cache
        )
    except Exception as error:  # no network, unknown name, no permission: many types of errors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = f"cannot be loaded ({reason})"
        raise CasemateError("data.source", f"hf:{address.hub_name}", remedy) from error


@lru_cache(maxsize=6)
def _undecoded(address: Address, split: str, image_column: str) -> Any:
    """One split whose images come as stored bytes: Pillow decodes them as everywhere here."""
    raw_image = _package(address.hub_name).Image(decode=False)
    return _load(address)[split].cast_column(image_column, raw_image)
