"""Saved programs as networks: `.pt2` files of torch.export and TorchScript archives.

An architecture `pt2:NAME/DIGEST` or `torchscript:NAME/DIGEST` names a file by its content. The file
is in the folder `code` of a model, beside its weights. Opening a program is like importing code:
PyTorch evaluates expressions in a .pt2 file, and TorchScript can read and write files. What a .pt2
file holds as a pickle is refused.
"""

import io
import json
import re
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from components.core.code_copies import file_of_copies
from components.core.digests import digest_file
from components.core.errors import CasemateError, first_line

KINDS = ("pt2", "torchscript")
_FORM = re.compile(r"(?P<kind>pt2|torchscript):(?P<name>[\w.-]+)/(?P<digest>[0-9a-f]{16})")
_opened: dict[str, Path] = {}  # files that were named by a path in this process
# Operations that behave differently in training, with the place of their flag.
_TRAINING_FLAGS = {"dropout": 2, "native_dropout": 2, "batch_norm": 5, "instance_norm": 5}


class Program(nn.Module):
    """A saved program: its parts cannot be replaced, and it has one mode."""

    def __init__(self, program: nn.Module, kind: str) -> None:
        super().__init__()
        self.program, self.kind = program, kind
        self.training = False
        for part in program.modules():
            part.training = False

    def forward(self, images: Tensor) -> Tensor:
        # TorchScript compiles itself anew during the first calls, which moves last digits.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            logits: Tensor = self.program(images)
        return logits

    def train(self, mode: bool = True) -> "Program":
        """Nothing: a program is saved in eval mode and has no other."""
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "Program":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.kind == "pt2":
            _move_constants(self.program, fn(torch.empty(0)).device)
        return self


def program_kind(members: Sequence[str]) -> str | None:
    """`pt2` or `torchscript`, by the names of the files in an archive; None: it is neither."""
    if any(re.search(r"(^|/)(models/.+|serialized_exported_program)\.json$", n) for n in members):
        return "pt2"
    return "torchscript" if any(name.endswith("/constants.pkl") for name in members) else None


def members_of(path: Path) -> list[str]:
    """The names of the files in an archive; none if it is not a readable archive."""
    if not zipfile.is_zipfile(path):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return []


def is_program(architecture: str) -> bool:
    """Whether an architecture is a saved program."""
    return architecture.partition(":")[0] in KINDS


def architecture_of(path: Path, kind: str) -> str:
    """The architecture of a program file, which `load_program` then finds."""
    digest = digest_file(path)[:16]
    _opened[digest] = path.absolute()
    return f"{kind}:{re.sub(r'[^A-Za-z0-9_.-]', '_', path.stem)}/{digest}"


def copy_program(architecture: str, folder: Path) -> None:
    """Copy the file of a program below a folder."""
    kind, digest = _parsed(architecture)
    target = folder / _file_name(kind, digest)
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_file(architecture), target)


def load_program(architecture: str) -> nn.Module:
    """The network of a program, with its weights, on the device that is the default."""
    path, (kind, _) = _file(architecture), _parsed(architecture)
    if kind == "torchscript" and torch.get_default_device().type == "meta":
        raise RuntimeError("TorchScript cannot be moved to the meta device: its shapes are unknown")
    # Modes that skip values or choose a device are off; TorchScript announces its successor.
    with torch._C.DisableTorchFunction(), warnings.catch_warnings(action="ignore"):
        program = _from_export(path) if kind == "pt2" else _from_torchscript(path)
    net, device = Program(program, kind), torch.get_default_device()
    return net if device.type == "cpu" else net.to(device)


def input_shape(path: Path) -> tuple[int | None, ...]:
    """(B, C, H, W) of the images that a .pt2 file was exported for; None: any."""
    exported = _exported(path)
    inputs = exported.graph_signature.user_inputs
    nodes = {node.name: node for node in exported.graph.nodes}
    if len(inputs) != 1 or not isinstance(nodes[inputs[0]].meta.get("val"), Tensor):
        remedy = f"takes {len(inputs)} inputs; a classifier takes one tensor of images"
        raise CasemateError("model", path, remedy)
    shape = nodes[inputs[0]].meta["val"].shape
    return tuple(side if isinstance(side, int) else None for side in shape)


def _parsed(architecture: str) -> tuple[str, str]:
    form = _FORM.fullmatch(architecture)
    if form is None:
        remedy = "is not of the form pt2:NAME/DIGEST; name the file of the program as the model"
        raise CasemateError("model.architecture", architecture, remedy)
    return form["kind"], form["digest"]


def _file_name(kind: str, digest: str) -> str:
    return f"casemate_program_{digest}.{'pt2' if kind == 'pt2' else 'pt'}"


def _file(architecture: str) -> Path:
    """The file of a program; its content must be that of the digest."""
    kind, digest = _parsed(architecture)
    path = _opened.get(digest) or file_of_copies(_file_name(kind, digest))
    if path is None or not path.is_file():
        remedy = "has no file on this machine: the model's folder lacks code/"
        raise CasemateError("model.architecture", architecture, remedy)
    if digest_file(path)[:16] != digest:
        remedy = f"has a modified file: {path}; restore it"
        raise CasemateError("model.architecture", architecture, remedy)
    return path


def _from_torchscript(path: Path) -> nn.Module:
    try:
        program: nn.Module = torch.jit.load(  # type: ignore[no-untyped-call]
            str(path), map_location="cpu"
        )
        return program.eval()
    except (RuntimeError, ValueError, OSError) as error:
        remedy = f"cannot be read as TorchScript: {first_line(error)}"
        raise CasemateError("model", path, remedy) from error


def _from_export(path: Path) -> nn.Module:
    exported = _exported(path)
    for node in exported.graph.nodes:
        name = getattr(node.target, "_opname", "")
        flag = _TRAINING_FLAGS.get(name)
        if flag is not None and len(node.args) > flag and node.args[flag] is True:
            remedy = f"was exported in training mode ({name}); call eval() before torch.export"
            raise CasemateError("model", path, remedy)
    program: nn.Module = exported.module()
    return program


def _exported(path: Path) -> Any:
    try:
        pickles = list(_pickles(path))
    except (zipfile.BadZipFile, zlib.error, ValueError, AttributeError, EOFError, OSError) as error:
        remedy = f"is damaged: {first_line(error)}; export or copy it again"
        raise CasemateError("model", path, remedy) from error
    for name, content in pickles:
        _check_plain(path, name, content)
    try:
        return torch.export.load(str(path))
    except Exception as error:
        remedy = f"cannot be read by torch.export of torch {torch.__version__}: {first_line(error)}"
        raise CasemateError("model", path, remedy) from error


def _pickles(path: Path) -> Iterator[tuple[str, bytes | None]]:
    """What torch.export would unpickle: tensors with their bytes, or objects without."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".pt"):
                yield name, archive.read(name)
            if not name.endswith("_config.json"):
                continue
            config = json.loads(archive.read(name)).get("config", {})
            for key, entry in config.items() if isinstance(config, Mapping) else ():
                if entry.get("use_pickle") or not entry.get("tensor_meta"):
                    yield key, None


def _check_plain(path: Path, name: str, content: bytes | None) -> None:
    """Raise an error for a pickle that could run code."""
    if content is not None:
        try:
            torch.load(io.BytesIO(content), weights_only=True)
        except Exception:
            content = None
    if content is None:
        remedy = f"holds a pickled object ({name}), and loading it would run its code"
        raise CasemateError("model", path, f"{remedy}; export the network without it")


def _move_constants(program: nn.Module, device: torch.device) -> None:
    """Let a program create its constants on the device of its weights."""
    for part in program.modules():
        graph = getattr(part, "graph", None)
        nodes = [node for node in graph.nodes if "device" in node.kwargs] if graph else []
        for node in nodes:
            node.kwargs = {**node.kwargs, "device": device}
        if nodes:
            part.recompile()  # type: ignore[operator]
