"""The model format: `model.safetensors` + `model.json`; never a pickled class.

A model with a user-defined architecture, or a saved program, also has `code/`: a copy of the code
or program whose digest `model.json` names. The folder is self-contained; loading it runs that code.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from components.core import user_code
from components.core.code_copies import look_in
from components.core.digests import digest_bytes, digest_json
from components.core.documents import parse_json
from components.core.errors import CasemateError
from components.core.files import atomic, write_json
from components.core.folders import Folder
from components.models.networks import program
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec

FORMAT = 1
CODE = "code"  # folder of user code beside the weights


def weights_digest(model: PixelModel) -> str:
    """Digest of spec and weights, recorded with votes and certificates."""
    state = model.net.state_dict()
    tensors = [
        digest_bytes(
            name.encode(),
            str(value.dtype).encode(),
            str(tuple(value.shape)).encode(),
            value.detach().cpu().contiguous().numpy().tobytes(),
        )
        for name, value in sorted(state.items())
    ]
    return digest_json({"spec": model.spec.to_dict(), "tensors": tensors})


def save_model(folder: Path, model: PixelModel, *, recipe_digest: str) -> str:
    """Write both files, JSON last; returns the model's digest."""
    folder.mkdir(parents=True, exist_ok=True)
    if user_code.is_reference(model.spec.architecture):
        user_code.copy_code(model.spec.architecture, folder / CODE)
    if program.is_program(model.spec.architecture):
        program.copy_program(model.spec.architecture, folder / CODE)
    with atomic(folder / "model.safetensors") as temporary:
        save_file(_own_tensors(model), temporary)
    digest = weights_digest(model)
    header = {
        "format": FORMAT,
        "spec": model.spec.to_dict(),
        "digest": digest,
        "recipe_digest": recipe_digest,
    }
    write_json(folder / "model.json", header)
    return digest


def _own_tensors(model: PixelModel) -> dict[str, torch.Tensor]:
    """The tensors of the network; safetensors refuses those that share memory: they are copied."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.net.state_dict().items():
        tensor = value.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found


def read_header(folder: Folder) -> dict[str, Any]:
    """Parsed model.json."""
    path = folder / "model.json"
    try:
        header: dict[str, Any] = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CasemateError(
            "model", folder, "has no model.json; is this a model folder?"
        ) from error
    except NotADirectoryError as error:
        raise CasemateError("model", folder, "is a file; name the model folder") from error
    except ValueError as error:
        raise CasemateError("model", path, f"is not valid JSON: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else None
        raise CasemateError("model", path, f"has format {found}, expected {FORMAT}")
    if "spec" not in header or not isinstance(header.get("digest"), str):
        raise CasemateError("model", path, "lacks spec or digest; is this a model folder?")
    return header


def load_model(folder: Folder, *, device: str | torch.device = "cpu") -> PixelModel:
    """The model in eval mode; raises an error if the weights do not match the recorded digest."""
    header = read_header(folder)
    look_in((folder / CODE).absolute())
    model = PixelModel(ModelSpec.from_dict(header["spec"], source=str(folder / "model.json")))
    path = folder / "model.safetensors"
    try:
        model.net.load_state_dict(load_file(path))
    except (FileNotFoundError, SafetensorError, RuntimeError) as error:
        raise CasemateError("model", path, f"cannot be loaded: {error}") from error
    if (digest := weights_digest(model)) != header["digest"]:
        raise CasemateError(
            "model",
            path,
            f"has digest {digest[:12]}, model.json names {header['digest'][:12]}; restore the file",
        )
    return model.to(device).eval()
