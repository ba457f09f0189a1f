"""Tries the user code of a recipe: what it builds must be usable. Part of the gate.

Each thing is constructed as its stage does later; networks also run once, on black images. Imports
torch, so the gate imports this module only for recipes that name user code.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from components.attacks.base_settings import UserAttackSettings
from components.attacks.listing import make_attack
from components.attacks.sanity.model import refuse_probabilities
from components.core.digests import canonical_json
from components.core.errors import CasemateError
from components.core.problems import Problems
from components.core.settings import SettingError
from components.core.user_code import is_reference
from components.data.sources import open_source
from components.models.settings import ModelSettings
from components.models.zoo import build_network
from components.train.objectives.make import make_objective
from components.train.objectives.settings import UserObjectiveSettings
from pipelines.recipe.facts import Facts
from pipelines.recipe.schema.recipe import Recipe

NUM_ROWS = 2  # one row hides mixed up dimensions, and batch normalisation refuses it
GPU_WORDS = ("cuda", "triton", "nvidia", "hip error")  # of errors that only mean: no GPU here


class Trial(NamedTuple):
    """One network on images of one size; `options` are JSON, so that trials can be cached."""

    architecture: str
    options: str
    channels: int
    side: int
    num_classes: int

    @classmethod
    def of(cls, section: ModelSettings, facts: Facts) -> "Trial":
        """The trial of a section's network; unknown sizes are replaced by usual ones."""
        side = section.upsample or facts.side
        assert side is not None
        options = canonical_json(section.options)
        channels, num_classes = facts.channels or 3, facts.num_classes or 2
        return cls(section.architecture, options, channels, side, num_classes)

    def network(self) -> nn.Module:
        """The network with fresh weights; random numbers of this process are left alone."""
        with torch.random.fork_rng(devices=[]):
            return build_network(
                self.architecture,
                image_size=self.side,
                channels=self.channels,
                num_classes=self.num_classes,
                options=json.loads(self.options),
            )


def check_sources(recipe: Recipe, problems: Problems) -> None:
    """Sources that cannot be opened; their files may be on other machines only."""
    data = recipe.data
    for key, section in (("data", data), ("data.synthetic", data.synthetic)):
        if section is None or not is_reference(section.source):
            continue
        if section.path is None or Path(section.path).expanduser().exists():
            with _renamed(problems, "data", key):
                _open(section.source, section.path, canonical_json(section.options))


@cache  # trials of a search share it
def _open(source: str, path: str | None, options: str) -> None:
    found = open_source(source, path=path, options=json.loads(options))
    if not found.classes:
        raise CasemateError("data.source", source, "has no classes: list them in `classes`")


def check_attacks(recipe: Recipe, problems: Problems) -> None:
    """Attacks that cannot be constructed."""
    for name, section in recipe.attack.items():
        for number, entry in enumerate(section.attacks):
            for inner in (member.base_attack for member in entry.members()):
                if isinstance(inner, UserAttackSettings):
                    with _renamed(problems, "attacks", f"attack.{name}.attacks.{number}"):
                        make_attack(inner, norm=section.norm, eps=section.eps or 1.0)


def check_objectives(recipe: Recipe, problems: Problems) -> None:
    """Objectives that cannot be constructed."""
    for name in recipe.model_names() if recipe.train else ():
        assert recipe.train is not None
        settings = recipe.objective_of(name)
        if isinstance(settings, UserObjectiveSettings):
            with _renamed(problems, "train", recipe.objective_key(name)):
                make_objective(settings, label_smoothing=recipe.train.label_smoothing)


def check_networks(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Networks that cannot be built, or that do not return logits of these images."""
    if None in (facts.side, facts.channels, facts.num_classes):
        return  # checked on the prepared images
    for name in recipe.model_names() if recipe.train else ():
        section = recipe.model_of(name)
        if not is_reference(section.architecture):
            continue
        own_loss = isinstance(recipe.objective_of(name), UserObjectiveSettings)
        attacked = any(name in attack.models for attack in recipe.attack.values())
        with _renamed(problems, "model", recipe.model_key(name)):
            _try(Trial.of(section, facts), own_loss=own_loss, attacked=attacked)


@cache
def _try(trial: Trial, *, own_loss: bool, attacked: bool) -> None:
    """Run a network in both modes; an objective of the user's may train on other outputs."""
    net = trial.network()
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise _refusal(trial, "has no parameters to train")
    if not own_loss:
        _check_shape(trial, _outputs(trial, net.train()))
    logits = _outputs(trial, net.eval())
    if logits is None:
        return
    _check_shape(trial, logits)
    if not bool(logits.isfinite().all()):
        raise _refusal(trial, "returns logits that are not finite for black images")
    if attacked:
        try:
            refuse_probabilities(logits, model=trial.architecture)
        except CasemateError as error:
            raise _refusal(trial, error.remedy) from error


def _outputs(trial: Trial, net: nn.Module) -> Tensor | None:
    """What the network returns for black images; None if it needs a GPU that is not here."""
    shape = (NUM_ROWS, trial.channels, trial.side, trial.side)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found: Tensor = net(torch.zeros(shape))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if any(word in text.lower() for word in GPU_WORDS) and not torch.cuda.is_available():
            return None
        size = "x".join(map(str, shape[1:]))
        raise _refusal(trial, f"fails on {NUM_ROWS} images of {size}: {text}") from error
    return found


def _check_shape(trial: Trial, logits: Tensor | None) -> None:
    expected = (NUM_ROWS, trial.num_classes)
    if logits is None or (isinstance(logits, Tensor) and tuple(logits.shape) == expected):
        return
    given = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    remedy = f"returns {given} for {NUM_ROWS} images of {trial.num_classes} classes"
    raise _refusal(trial, f"{remedy}; logits are {expected}")


def _refusal(trial: Trial, remedy: str) -> CasemateError:
    return CasemateError("model.architecture", trial.architecture, " ".join(remedy.split()))


@contextmanager
def _renamed(problems: Problems, part: str, key: str) -> Iterator[None]:
    """Add errors of the block; their keys begin with `key` in place of `part`."""
    try:
        yield
    except SettingError as error:
        for p in error.problems:
            problems.add(f"{key}.{p.field}", p.value, p.remedy)
    except CasemateError as error:
        inner = error.key.removeprefix(f"{part}.").removeprefix(part)
        where = f"{key}.{inner}" if inner else key
        problems.add(where, error.value, " ".join(error.remedy.split()))
