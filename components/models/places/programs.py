"""Saved programs: a .pt2 file of torch.export, or a TorchScript archive."""

from pathlib import Path

from components.core.errors import CasemateError
from components.models.networks.program import architecture_of, input_shape, load_program
from components.models.places.files import kind_of_file
from components.models.places.registry import Loaded, ModelFacts
from components.models.places.wrapping import model_around

DYNAMIC = "dynamic_shapes=({0: torch.export.Dim.AUTO},)"


def load(name: str, given: ModelFacts, suggested: ModelFacts) -> Loaded:
    """The program in a file; a .pt2 file defines the size of its images."""
    path = Path(name)
    kind = kind_of_file(path)
    exported = _exported_facts(path) if kind == "pt2" else ModelFacts()
    for key, value in exported.said().items():
        if getattr(given, key) not in (None, value):
            remedy = f"contradicts {path.name}, which takes {value}; leave it out"
            raise CasemateError(key, getattr(given, key), remedy)
    facts = exported.or_else(given).or_else(suggested.without("num_classes"))
    architecture = architecture_of(path, kind)
    model = model_around(load_program(architecture), architecture, facts, name=str(path))
    return Loaded(model.net, model.spec)


def _exported_facts(path: Path) -> ModelFacts:
    """What a .pt2 file says about its images."""
    shape = input_shape(path)
    if len(shape) != 4:
        raise CasemateError("model", path, f"takes a tensor of {len(shape)} axes, not (B, C, H, W)")
    batch, channels, height, width = shape
    if batch is not None:
        remedy = f"is exported for batches of {batch}; export it for any: torch.export.export(net, "
        raise CasemateError("model", path, f"{remedy}(images,), {DYNAMIC}) with two images")
    if height != width:
        raise CasemateError("model", path, f"takes images of {height}x{width}, not square ones")
    return ModelFacts(image_size=height, channels=channels)
