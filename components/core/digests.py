"""Digests of content: equal content has the same digest on every machine."""

import hashlib
import json
from pathlib import Path


def digest_bytes(*chunks: bytes) -> str:
    """SHA-256 over length-prefixed chunks, so that moving a boundary changes the digest."""
    state = hashlib.sha256()
    for chunk in chunks:
        state.update(len(chunk).to_bytes(8, "little"))
        state.update(chunk)
    return state.hexdigest()


def canonical_json(value: object) -> str:
    """Canonical JSON of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_json(value: object) -> str:
    """SHA-256 of the canonical JSON text."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
