"""What a file is that a user names as a model."""

from collections.abc import Sequence
from pathlib import Path

from components.core.errors import CasemateError
from components.models.importing.read import read_checkpoint
from components.models.networks.program import members_of, program_kind
from components.models.places.registry import FORMS

WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
ARCHIVE = b"PK\x03\x04"  # how zip files begin; their directory, at the end, may be missing
PICKLES = (".pkl", ".pickle", ".joblib")
DAMAGED = "is damaged or incomplete: it is not a readable archive; export or copy it again"
_INSTEAD = "save the network with torch.export, or its state_dict() beside its code"


def kind_of_file(path: Path) -> str:
    """`pt2` or `torchscript`; an error that says what any other file is."""
    names = members_of(path)
    if kind := program_kind(names):
        return kind
    raise CasemateError("model", path, _what_it_is(path, names))


def _what_it_is(path: Path, names: Sequence[str]) -> str:
    if path.name == "model.json":
        return f"is a file of a model folder; name the folder: {path.parent}"
    if any(name.endswith((".so", ".cubin")) for name in names):
        return (
            "holds compiled code (AOTInductor), which has no gradients; save the exported program"
        )
    if path.suffix == ".pt2":  # even if an archive is seen: one inside it
        return DAMAGED
    if path.suffix in WEIGHTS or any(name.endswith("/data.pkl") for name in names):
        return _about_weights(path)
    if path.suffix in PICKLES:
        return f"is a pickle, and loading it would run its code; {_INSTEAD}"
    if path.suffix == ".onnx":
        return "is an ONNX graph, which has no gradients here; export the network with torch.export"
    if _begins_as_archive(path):
        return DAMAGED
    if path.suffix == ".py":
        return f"is code; name what builds the network: python:{path}:FACTORY"
    return f"is a file of an unknown kind; name {FORMS}"


def _begins_as_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(ARCHIVE)) == ARCHIVE


def _about_weights(path: Path) -> str:
    """What a file of tensors is, or a pickle that needs code."""
    try:
        read_checkpoint(path)
    except CasemateError as error:
        if "needs Python code" not in error.remedy:
            return error.remedy
        return f"is a pickled object, and loading it would run its code; {_INSTEAD}"
    return (
        "holds weights without their network; for a timm architecture: casemate import-weights, "
        "for your own: --model python:FILE.py:FACTORY --weights FILE"
    )
