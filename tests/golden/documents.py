"""What JSON files and tables hold, in forms that can be recorded and compared."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

# Keys whose values name versions of software, or the run that wrote a file.
VERSION_KEYS = frozenset({"software", "git_revision", "mlflow_run_id", "created_by"})


def digest(value: object) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys; floats count to the last bit."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def without(value: Any, keys: frozenset[str]) -> Any:
    """A JSON value without these keys, at any depth."""
    if isinstance(value, Mapping):
        return {key: without(inner, keys) for key, inner in value.items() if key not in keys}
    return [without(inner, keys) for inner in value] if isinstance(value, list) else value


def key_paths(value: Any) -> list[str]:
    """Every key of a JSON value by its path, sorted; elements of a list are merged."""
    return sorted(set(_paths(value, "")))


def _paths(value: Any, above: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"{above}{key}"
            yield from _paths(inner, f"{above}{key} / ")
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner, f"{above}[] / ")


def table_digest(path: Path) -> str:
    """SHA-256 of a Parquet file as a table: columns, types and rows, not the bytes."""
    table = pq.read_table(path)
    return digest({"columns": columns_of(path), "rows": table.to_pylist()})


def columns_of(path: Path) -> list[str]:
    """Columns of a Parquet file with their types."""
    schema = pq.read_schema(path)
    return [f"{field.name}: {field.type}" for field in schema]


def header_of(path: Path) -> dict[str, Any]:
    """JSON documents in the metadata of a Parquet file, by their names."""
    metadata = pq.read_schema(path).metadata or {}
    return {key.decode(): _json_or_text(value) for key, value in metadata.items()}


def _json_or_text(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def write_json(path: Path, value: object) -> None:
    """A record as it is committed: sorted, one value a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """A committed record."""
    return json.loads(path.read_text())
