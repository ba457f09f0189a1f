"""Read tensors from a weights file without running code in it."""

import argparse
import pickle
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from components.core.errors import CasemateError
from components.models.networks.program import members_of, program_kind

TORCH_STARTS = (b"PK", b"\x80")  # a zip archive, or the bare pickles of old versions
# Errors of torch's reader on a damaged pickle.
DAMAGE = (LookupError, TypeError, AttributeError, AssertionError, struct.error)
# Where training scripts put the state dict, plain weights before averaged ones.
ENTRIES = ("state_dict", "model", "model_state_dict", "net", "state_dict_ema", "model_ema", "last")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a file and the dotted entry that held them ("" for the file itself)."""

    tensors: dict[str, Tensor]
    entry: str


def read_checkpoint(path: Path, *, entry: str | None = None) -> Checkpoint:
    """The state dict of a .safetensors or torch file; `entry` chooses one of several."""
    if not path.is_file():
        raise CasemateError("weights", path, "is not a file; check the path")
    content: Any = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    if not isinstance(content, Mapping):
        raise CasemateError("weights", path, f"holds a {type(content).__name__}, not a state dict")
    found: Mapping[Any, Any] = content
    trail = [entry] if entry else []
    if entry:
        if not isinstance(content.get(entry), Mapping):
            raise CasemateError("--entry", entry, f"is not in {path}; it has {_entries(content)}")
        found = content[entry]
    while nested := [name for name in ENTRIES if isinstance(found.get(name), Mapping)]:
        trail.append(nested[0])
        found = found[nested[0]]
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CasemateError(
            "weights", path, f"holds no tensors; name one of {_entries(content)} with --entry"
        )
    return Checkpoint(tensors, ".".join(trail))


def _entries(content: Mapping[Any, Any]) -> list[str]:
    return sorted(str(name) for name, value in content.items() if isinstance(value, Mapping))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise CasemateError("weights", path, f"cannot be read as safetensors: {error}") from error
    return tensors


def _read_torch(path: Path) -> Any:
    with path.open("rb") as file:
        start = file.read(8)
    if not start.startswith(TORCH_STARTS):
        found = f"begins with {start!r}" if start else "is empty"
        raise CasemateError("weights", path, f"is not a torch file: it {found}; is it complete?")
    if kind := program_kind(members_of(path)):
        remedy = f"is a program ({kind}) with its network; name it as --model, without an import"
        raise CasemateError("weights", path, remedy)
    try:
        # DeiT and timm store their command line as a Namespace, which holds values, not code.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CasemateError("weights", path, _refusal(str(error))) from error
    except DAMAGE as error:
        raise CasemateError("weights", path, "cannot be read: it is damaged") from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        reason = str(error).partition(". ")[0].partition("\n")[0] or "it ends too early"
        raise CasemateError(
            "weights", path, f"cannot be read: {reason}; is it complete, is it a torch file?"
        ) from error


def _refusal(message: str) -> str:
    """Message for an error of `weights_only`: the file contains code, or is not a pickle."""
    if code := re.search(r"GLOBAL (\S+)", message):
        return (
            f"needs Python code ({code[1]}) to be unpickled, which is not allowed; save its "
            "state_dict() alone where you trust the file, and import that"
        )
    return "cannot be read: it is not a torch file, or is damaged"
