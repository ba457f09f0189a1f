"""Any model by its name: from its place to a model of pixels that can be saved."""

import contextlib
import tempfile
from collections.abc import Iterator

import torch
from torch import nn

from components.core.errors import CasemateError
from components.core.user_code import is_reference
from components.models.checkpoint import load_model
from components.models.pixels import PixelModel
from components.models.places.registry import (
    FOLDER,
    Loaded,
    ModelFacts,
    find_place,
    folder_of,
)

NOTHING = ModelFacts()
SAME = 1e-5  # share of the largest logit by which a network that was built again may differ
NUM_ROWS = 2


def load_any(
    text: str,
    given: ModelFacts = NOTHING,
    suggested: ModelFacts = NOTHING,
    *,
    device: str | torch.device = "cpu",
) -> PixelModel:
    """The model that a text names, in eval mode; `PLACES` of the registry lists the forms.

    `given` is what a user says about it, `suggested` what the data would fit; what a place says
    itself counts more than a suggestion, and may not be given.
    """
    place, name = find_place(text)
    if place is FOLDER:
        place.check(given)
        return load_model(folder_of(name), device=device)
    return _built_again(place.load(name, given, suggested), name=text).to(device)


def _built_again(loaded: Loaded, *, name: str) -> PixelModel:
    """The model as workers will build it: from its spec, in another folder, then its weights."""
    remedy = "cannot be built again from its spec, as workers do"
    with torch.random.fork_rng(devices=[]), _elsewhere():
        try:
            model = PixelModel(loaded.spec).eval()
        except CasemateError as error:
            also = "; give weights by their file (--weights)" if is_reference(name) else ""
            raise CasemateError("model", name, f"{remedy}: {error.remedy}{also}") from error
    try:
        model.net.load_state_dict(loaded.net.state_dict())
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise CasemateError("model", name, f"{remedy}: {text[:300]}") from error
    if not _agree(model, loaded.net):
        also = "built again with the same weights, it returns other logits: it keeps values outside"
        raise CasemateError("model", name, f"{remedy}: {also} its state_dict, or is random")
    return model


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield


@torch.no_grad()
def _agree(model: PixelModel, net: nn.Module) -> bool:
    """Whether both compute the same logits, on noise."""
    spec = model.spec
    shape = (NUM_ROWS, spec.channels, spec.image_size, spec.image_size)
    inputs = model.network_input(torch.rand(shape, generator=torch.Generator().manual_seed(0)))
    found, expected = model.net(inputs), net.eval()(inputs)
    largest = float(expected.abs().max())
    return bool(((found - expected).abs() <= SAME * max(largest, 1e-6)).all())
