"""Small files in place of datasets and weights: a plan reads them, nothing else does.

A plan counts data and weights by content, so made-up content gives fingerprints that are the same
on every machine.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DIFFUSERS, OURS = "diffusers:", "model:"


def places_of(values: Mapping[str, Any]) -> list[str]:
    """The files and folders that a resolved recipe reads, as it names them."""
    return sorted(set(_named(values)))


def _named(values: Any) -> Iterator[str]:
    if isinstance(values, list):
        for inner in values:
            yield from _named(inner)
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        if isinstance(value, str) and _is_place(key, value):
            yield value
        if key in ("judges", "other_models"):
            yield from value.values()
        yield from _named(value)


def _is_place(key: str, value: str) -> bool:
    if key == "denoiser":  # others are models of the recipe
        return value.startswith((DIFFUSERS, OURS))
    return key == "path" or (key == "pretrained" and value != "timm")


def make(place: str, root: Path) -> None:
    """A stand-in for one place below `root`; its content follows from its name."""
    path = root / place.removeprefix(DIFFUSERS).removeprefix(OURS)
    if place.startswith(DIFFUSERS):
        _write(path / "unet" / "config.json", place)
        _write(path / "unet" / "diffusion_pytorch_model.safetensors", place)
        _write(path / "scheduler" / "scheduler_config.json", place)
    elif place.startswith("data/") and not path.suffix:
        _write(path / "labels.txt", place)
        _write(path / "images" / "first.png", place)
    elif place.startswith("data/"):
        _write(path, place)
    else:
        content = hashlib.sha256(place.encode()).hexdigest()
        header = {"format": 1, "spec": {}, "digest": content}
        _write(path / "model.json", json.dumps(header))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
