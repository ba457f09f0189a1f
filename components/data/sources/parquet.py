"""Parquet files with a column of encoded images and a column of labels.

Images are bytes, or the struct `{bytes, path}` that Hugging Face writes; labels are integers, or
strings that name their class. Splits are read from the words of file names, such as
`train-00000-of-00002.parquet` or `cifar10_Test.parquet`, or of the folder a file is in; listing
reads the labels only. A worker reads row groups and keeps at most `GROUPS_KEPT` bytes of them, or
one group if it is larger.
"""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.core.errors import CasemateError
from components.data.places import Place, RemotePath, below
from components.data.sources.base import Entry, NamedSplits, Pixels, UndecodableItemError
from components.data.sources.files import decode_image_bytes
from components.data.sources.kept import Kept
from components.data.sources.labels import (
    check_class_names,
    check_label_range,
    checked_labels,
    numbered_classes,
)
from components.data.sources.splitting import not_understood, split_hints, usual_split
from components.data.sources.versions import check_unchanged, file_version

_DAMAGED = (OSError, pa.ArrowException)
GROUPS_KEPT = 2**28  # bytes; shuffled shards jump between row groups
_groups = Kept(GROUPS_KEPT)
_HALF_SPLITS = ("train", "test", "valid")  # trainset.parquet: an error instead of a guess


@dataclass(frozen=True, slots=True)
class ParquetSource(NamedSplits):
    """Files below `root`, each with its split."""

    root: Place
    splits: tuple[tuple[str, str | None], ...]  # (place below root, split)
    image_column: str
    label_column: str
    classes: tuple[str, ...]

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        for place, split in self.splits:
            path = self.root / place
            version = file_version(path)
            labels = _as_numbers(path, _label_values(path, self.label_column), self.classes)
            rows = [(g, r) for g, size in enumerate(_group_sizes(path)) for r in range(size)]
            found += [
                Entry(f"parquet-{place}-{index:05d}", label, split, f"{place}:{g}:{r}", version)
                for index, (label, (g, r)) in enumerate(zip(labels, rows, strict=True))
            ]
        return found

    def decode(self, entry: Entry) -> Pixels:
        return decode_image_bytes(self.encoded(entry), where=entry.item_id)

    def encoded(self, entry: Entry) -> bytes:
        """The cell of the image column."""
        place, group, row = entry.locator.rsplit(":", 2)
        column = _read_group(self.root / place, entry.version, int(group), self.image_column)
        content = column[int(row)].as_py()
        content = content.get("bytes") if isinstance(content, dict) else content
        if content is None:
            remedy = "has no image bytes; embed them, or set data.on_error=skip"
            raise UndecodableItemError("data.path", entry.item_id, remedy)
        cell: bytes = content
        return cell


def open_parquet(
    path: Place,
    *,
    image_column: str = "image",
    label_column: str = "label",
    classes: list[str] | None = None,
    splits: dict[str, str] | None = None,
) -> ParquetSource:
    """One file or all `*.parquet` of a folder; columns and types are checked before any pixel."""
    root, places = _list_files(path)
    files = _with_splits(places, splits)
    for place, _ in files:
        _check_columns(root / place, image_column=image_column, label_column=label_column)
    names = _class_names([root / place for place, _ in files], label_column, classes)
    return ParquetSource(root, files, image_column, label_column, names)


def _list_files(path: Place) -> tuple[Place, list[str]]:
    if path.is_file():
        return path.parent, [path.name]
    prepared = (path / "dataset.json").is_file()  # a step also keeps each file by its content
    files = path.iterdir() if prepared else path.rglob("*.parquet")
    places = sorted(below(file, path).as_posix() for file in files if file.suffix == ".parquet")
    if not places:
        remedy = "is neither a Parquet file nor a folder of them"
        raise CasemateError("data.path", path, remedy)
    return path, places


def _with_splits(
    places: list[str], splits: dict[str, str] | None
) -> tuple[tuple[str, str | None], ...]:
    """Each file with its split; None for all if there are no splits."""
    names = {place: _split_name(place) for place in places}
    hints = split_hints(names.values(), splits)
    if not hints:
        if doubtful := {name for name in names.values() if _half_splits(name)}:
            raise not_understood(doubtful)
        return tuple((place, None) for place in places)
    return tuple((place, hints[name]) for place, name in names.items() if name in hints)


def _split_name(place: str) -> str:
    """`a/train-0.parquet`, `train/0.parquet` and `A_Train1.parquet` all belong to `train`.

    The nearest name with a split word decides; a name with two of them is an error.
    """
    path = Path(place)
    levels = (path.stem, *reversed(path.parent.parts))
    for name in levels:
        words = [word for word in _words(name) if usual_split(word)]
        if words:
            return words[0] if len({usual_split(word) for word in words}) == 1 else name
    doubtful = (word for name in levels for word in _half_splits(name))
    return next(doubtful, path.stem.split("-")[0])


def _half_splits(name: str) -> list[str]:
    return [word for word in _words(name) if word.startswith(_HALF_SPLITS)]


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\W\d_]+", name.casefold()) if word]


def schema_of(path: Place) -> pa.Schema:
    """Names and types of a file's columns."""
    return _opened(path).schema_arrow


def _check_columns(path: Place, *, image_column: str, label_column: str) -> None:
    schema = schema_of(path)
    for key, column in (("image_column", image_column), ("label_column", label_column)):
        if column not in schema.names:
            remedy = f"is not a column of {path}; there are {', '.join(schema.names)}"
            raise CasemateError(f"data.options.{key}", column, remedy)
    kind = schema.field(image_column).type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        remedy = f"holds {kind} in {path}; expected encoded images as bytes"
        raise CasemateError("data.options.image_column", image_column, remedy)


def _class_names(paths: list[Place], label_column: str, given: list[str] | None) -> tuple[str, ...]:
    """Given by the user, else stored by Hugging Face, else the values of the column itself."""
    stored = {path: _stored_names(path, label_column) for path in paths}
    _check_agreement({path: names for path, names in stored.items() if names or not given})
    names = tuple(given) if given else stored[paths[0]]
    if names:
        check_class_names(names, key="data.options.classes", where=paths[0])
        return names
    values = {path: _label_values(path, label_column) for path in paths}
    texts = {path for path, column in values.items() if column and isinstance(column[0], str)}
    numbers = {path for path, column in values.items() if column} - texts
    if texts and numbers:
        remedy = f"has named labels, {min(numbers, key=str)} has numbers; set data.options.classes"
        raise CasemateError("data.path", min(texts, key=str), remedy)
    found = [value for column in values.values() for value in column]
    return tuple(sorted(set(found))) if texts else numbered_classes(found)


def _check_agreement(stored: dict[Place, tuple[str, ...]]) -> None:
    """Raise an error if a label means different classes in two files."""
    for (first, theirs), (path, ours) in pairwise(stored.items()):
        columns = enumerate(zip_longest(ours, theirs, fillvalue="nothing"))
        for label, (here, there) in columns:
            if here != there:
                remedy = f"calls class {label} {here} and {first.name} calls it {there}"
                raise CasemateError(
                    "data.path", path, f"{remedy}; write all files with the same classes"
                )


def _stored_names(path: Place, label_column: str) -> tuple[str, ...]:
    metadata = _opened(path).schema_arrow.metadata or {}
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        return tuple(str(name) for name in features[label_column]["names"])
    except (KeyError, TypeError, ValueError):  # written by another tool: no names
        return ()


def _label_values(path: Place, column: str) -> list[Any]:
    """Values of the label column: all integers or all strings."""
    try:
        labels = pq.read_table(_readable(path), columns=[column]).column(column)
    except _DAMAGED as error:
        raise _unreadable(path, error) from error
    whole = pa.types.is_integer(labels.type)
    text = pa.types.is_string(labels.type) or pa.types.is_large_string(labels.type)
    if not (whole or text) or labels.null_count:
        remedy = f"is {labels.type} with {labels.null_count} gaps; labels are integers or names"
        raise CasemateError("data.path", f"{path} [{column}]", remedy)
    values: list[Any] = labels.to_pylist()
    return values


def _as_numbers(path: Place, values: list[Any], classes: tuple[str, ...]) -> list[int]:
    number = {name: index for index, name in enumerate(classes)}
    for index, value in enumerate(values):
        if isinstance(value, str) and value not in number:
            remedy = f"has the label {value!r} at {index}, which is not a class"
            raise CasemateError("data.path", path, remedy)
    plain = np.array([number[v] if isinstance(v, str) else v for v in values], dtype=np.int64)
    labels = checked_labels(plain, where=str(path), num_items=len(values))
    check_label_range(labels, where=str(path), num_classes=len(classes))
    return labels


def _group_sizes(path: Place) -> list[int]:
    metadata = _opened(path).metadata
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _read_group(path: Place, version: str, group: int, column: str) -> Any:
    size = _footer(path, version).row_group(group).total_byte_size
    return _groups.get(
        (path, version, group, column), size, lambda: _group(path, version, group, column)
    )


def _group(path: Place, version: str, group: int, column: str) -> Any:
    check_unchanged(path, version)
    try:
        file = pq.ParquetFile(_readable(path), metadata=_footer(path, version))
        return file.read_row_group(group, columns=[column]).column(column)
    except _DAMAGED as error:
        raise _unreadable(path, error) from error


@lru_cache(maxsize=64)  # else it is read again with every group
def _footer(path: Place, version: str) -> Any:
    check_unchanged(path, version)
    return _opened(path).metadata


def _opened(path: Place) -> Any:
    try:
        return pq.ParquetFile(_readable(path))
    except _DAMAGED as error:
        raise _unreadable(path, error) from error


def _readable(path: Place) -> Any:
    """What pyarrow opens: a path, or a file that reads ranges."""
    return path.open() if isinstance(path, RemotePath) else path


def _unreadable(path: Place, error: Exception) -> CasemateError:
    reason = str(error).splitlines()[0]
    return CasemateError("data.path", path, f"is not a readable Parquet file ({reason})")
