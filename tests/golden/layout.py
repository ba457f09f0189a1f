"""Where the record is, and the key sets of files that a flow leaves."""

from pathlib import Path
from typing import Any

from tests.golden.documents import columns_of, header_of, key_paths, read_json
from tests.steps import files_of

HERE = Path(__file__).resolve().parent
RECORD = HERE / "record"
RECIPES, CLAIMS, KEYS = RECORD / "recipes.json", RECORD / "claims.json", RECORD / "keys.json"
ESTIMATES = RECORD / "estimates.json"
TINY_KEYS = RECORD / "keys-tiny.json"  # of the flow that end-to-end tests share
CERTIFICATES = RECORD / "certificates"
FLOWS = ("flow", "further", "given")  # recipes of this folder
KEPT = ("votes.parquet", "certificates.parquet", "certificate.json")


def keys_record(storage: Path) -> list[dict[str, Any]]:
    """Key paths of every JSON file and header below a storage; equal ones share an entry."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for name, keys in keys_of(storage).items():
        shared.setdefault(tuple(keys), []).append(name)
    entries = [{"files": sorted(names), "keys": list(keys)} for keys, names in shared.items()]
    return sorted(entries, key=lambda entry: entry["files"])


def keys_of(storage: Path) -> dict[str, list[str]]:
    """The same by file, named without its fingerprint."""
    found = {}
    for manifest in sorted(storage.glob("*/*/manifest.json")):
        folder = manifest.parent
        step = f"{folder.parent.name}/{folder.name.rpartition('-')[0]}"
        for own, path in files_of(folder).items():
            name = f"{step}/{own}"
            if path.suffix == ".json":
                found[name] = key_paths(read_json(path))
            elif path.suffix == ".parquet":
                found[name] = header_keys(path)
    return found


def header_keys(path: Path) -> list[str]:
    """Columns of a Parquet file, and key paths of its header."""
    return [*columns_of(path), *key_paths(header_of(path))]
