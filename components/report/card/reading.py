"""Reads the model that a card is about from its folder; its weights are not loaded."""

from collections.abc import Sequence
from math import prod

from safetensors import SafetensorError, safe_open

from components.core.errors import CasemateError
from components.core.folders import Folder
from components.models.checkpoint import read_header
from components.report import results
from components.report.card.evidence import Subject
from components.report.content import Fact


def read_subject(
    name: str,
    folder: Folder,
    *,
    facts: Sequence[Fact] = (),
    classes: Sequence[str] = (),
    origin: str = "",
    trained_by: tuple[str, Folder] | None = None,
) -> Subject:
    """The model in a folder; `trained_by`: step and folder of its training, if it is there."""
    header = read_header(folder)
    return Subject(
        name,
        str(header["digest"]),
        header["spec"],
        tuple(facts),
        results.read_train(*trained_by) if trained_by else None,
        num_weights(folder),
        tuple(classes),
        origin,
    )


def is_denoiser(folder: Folder) -> bool:
    """Whether a model estimates images instead of classifying them."""
    spec = read_header(folder)["spec"]
    return bool(spec.get("trained_for") and "diffusion" in spec["trained_for"])


def num_weights(folder: Folder) -> int | None:
    """The floating-point numbers in model.safetensors, if it is there; none of them is loaded."""
    path = folder / "model.safetensors"
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118 (not a dict)
            return int(sum(prod(t.get_shape()) for t in tensors if "F" in t.get_dtype()))
    except (OSError, SafetensorError) as error:
        raise CasemateError("model", path, f"cannot be read ({error})") from error
