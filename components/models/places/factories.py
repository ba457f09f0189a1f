"""Networks that code of the user's builds: `python:FILE.py:FACTORY`.

The factory returns the network with its weights, or without them if their file is given. Workers
call it again, elsewhere, and load the weights of the model's folder: it must not need files.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from components.core import user_code
from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.models.importing.match import load_matching
from components.models.importing.read import read_checkpoint
from components.models.places.registry import Loaded, ModelFacts
from components.models.places.wrapping import check_sizes, model_around
from components.models.zoo import Sizes, build_network, sizes_taken

WRAPPERS = ("module.", "_orig_mod.")  # of DataParallel and torch.compile


def load(name: str, given: ModelFacts, suggested: ModelFacts) -> Loaded:
    """The network of a factory, which may take num_classes, channels and image_size."""
    reference = f"{user_code.PREFIX}{name}"
    try:
        pinned = user_code.pinned(reference, field="model")
        taken = sizes_taken(pinned)
    except SettingError as error:
        first = error.problems[0]
        raise CasemateError("model", reference, first.remedy) from error
    wanted = suggested if "num_classes" in taken else suggested.without("num_classes")
    facts = given.or_else(wanted)
    if "num_classes" in taken and facts.num_classes is None:
        raise CasemateError("num_classes", "", f"is missing: {reference} takes it")
    check_sizes(facts.image_size, facts.channels or 3)
    net = _built(pinned, facts, name=reference)
    if given.weights:
        _fill(net, Path(given.weights).expanduser(), reference)
    model = model_around(net, pinned, facts, name=reference)  # wrong logits are told first
    again = None if given.weights else _built(pinned, facts, name=reference)
    if again is not None and not _same(model.net.state_dict(), again.state_dict()):
        remedy = "returns other weights at each call, so it has none of its own; give their file "
        raise CasemateError("model", reference, f"{remedy}(--weights, or weights= in Python)")
    return Loaded(model.net, model.spec)


def _built(pinned: str, facts: ModelFacts, *, name: str) -> nn.Module:
    """The factory's network; errors call the factory by its name, as it was typed."""
    assert facts.image_size is not None
    try:
        return build_network(
            pinned,
            image_size=facts.image_size,
            channels=facts.channels or 3,
            num_classes=facts.num_classes or 1,
            options={},
        )
    except CasemateError as error:
        raise CasemateError("model", name, _without_section(error)) from error


def _without_section(error: CasemateError) -> str:
    """The remedy of an error that refers to the model section of a recipe, which is not here."""
    argument = error.key.removeprefix("model.options.")
    if argument == error.key:
        return error.remedy
    passed = ", ".join(Sizes._fields)
    return f"needs an argument {argument} without a default, and gets only {passed}; give it one"


def _same(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)


def _fill(net: nn.Module, path: Path, reference: str) -> None:
    """Load a state dict into the network; nothing is resampled or left out."""
    state = read_checkpoint(path).tensors
    for wrapper in WRAPPERS:
        own = any(name.startswith(wrapper) for name in net.state_dict())
        if not own and all(name.startswith(wrapper) for name in state):
            state = {name.removeprefix(wrapper): value for name, value in state.items()}
    remedy = f"check that {reference} builds the network of this file"
    report = load_matching(net, state, origin=("weights", str(path)), remedy=remedy)
    for name, (theirs, ours) in report.resampled.items():
        raise CasemateError("weights", path, f"has {name} {theirs} for {ours}; {remedy}")
