"""Recipe sections to components: the one place where settings become arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from components.attacks.aas import ScaledAttack
from components.attacks.interface import Attack, Items
from components.attacks.scales import Scales, ScaleSearch, global_scales
from components.attacks.settings import AasSettings, AttackSettings, AutoAttackSettings
from components.attacks.suite import autoattack, make_attack
from components.attacks.user import user_attack
from components.core.errors import CasemateError
from components.core.settings import plain
from components.core.user_code import UserEntry
from components.data.prepared import PreparedDataset
from components.denoising.settings import is_on_disk
from components.models.pretrained import TIMM, check_descent, read_parent
from components.models.settings import ModelSettings
from components.models.spec import ModelSpec
from components.train.objectives.registry import trained_for
from pipelines.recipe import denoisers
from pipelines.recipe.consistency import objective_key
from pipelines.recipe.load import with_values
from pipelines.recipe.schema.attack import AttackSection
from pipelines.recipe.schema.place import ClusterSection
from pipelines.recipe.schema.recipe import Recipe


def model_spec(recipe: Recipe, dataset: PreparedDataset, model: str) -> ModelSpec:
    """The spec of one of the recipe's models on a prepared dataset."""
    if dataset.height != dataset.width:
        raise CasemateError(
            "data.image_size",
            f"{dataset.height}x{dataset.width}",
            "is not square; set data.image_size",
        )
    section = recipe.model_of(model)
    for key, values in (("mean", section.mean), ("std", section.std)):
        if values is not None and len(values) != dataset.channels:
            raise CasemateError(
                f"model.{key}", values, f"needs {dataset.channels} entries, one per channel"
            )
    parent, usual = None, {"mean": (0.5,) * dataset.channels, "std": (0.5,) * dataset.channels}
    start = denoisers.start_of(recipe, model)
    architecture, options = denoisers.network_of(section)
    if start:
        denoisers.check_start("model.pretrained", start, channels=dataset.channels)
    elif section.pretrained:
        parent = read_parent(section.pretrained, architecture=section.architecture)
        usual = {"mean": parent.mean, "std": parent.std}
        if len(parent.mean) != dataset.channels:
            raise CasemateError(
                "data.channels",
                dataset.channels,
                f"do not suit {section.pretrained}: set data.channels: {len(parent.mean)}",
            )
    spec = ModelSpec(
        architecture=architecture,
        num_classes=len(dataset.classes),
        channels=dataset.channels,
        image_size=dataset.width,
        upsample=section.upsample,
        upsample_mode=section.upsample_mode,
        token_policy=section.token_policy,
        mean=tuple(section.mean or usual["mean"]),
        std=tuple(section.std or usual["std"]),
        options=options,
        trained_for=trained_for(recipe.objective_of(model), start=start),
    )
    if parent:
        check_descent(spec, parent)
    return spec


def with_absolute_paths(
    recipe: Recipe, inputs: Mapping[str, Path] = MappingProxyType({})
) -> Recipe:
    """The recipe with absolute paths, since workers start in other folders.

    Denoisers that the recipe trains are named by their folders, as far as `inputs` has them.
    """
    changes: dict[str, str] = {}
    for model in recipe.model_names() if recipe.train else []:
        key = objective_key(model)
        if behind := recipe.objective_of(model).denoiser_name:
            changes[f"{key}.objective.denoiser"] = denoisers.placed(behind, inputs)
    for key, section in model_sections(recipe):
        if section.pretrained and is_on_disk(section.pretrained):
            changes[f"{key}.pretrained"] = denoisers.placed(section.pretrained, {})
        elif section.pretrained not in (None, TIMM):
            start = Path(section.pretrained).expanduser().absolute()
            changes[f"{key}.pretrained"] = str(start)
    return with_values(recipe, changes) if changes else recipe


def model_sections(recipe: Recipe) -> list[tuple[str, ModelSettings]]:
    """Every model section that a recipe writes, by its key."""
    variants = recipe.train.variants.items() if recipe.train else ()
    own = [(f"train.variants.{name}.model", part.model) for name, part in variants if part.model]
    return [("model", recipe.model), *own]


@dataclass(frozen=True, slots=True)
class ListedAttack:
    """One attack of a recipe's list; `entry` is the line it comes from, `name` is its own."""

    name: str
    entry: str
    attack: Attack  # where attention is scaled: the attack inside
    scaling: AasSettings | None = None


def attack_list(section: AttackSection) -> list[ListedAttack]:
    """The attacks of a section in their order, ensembles as their members.

    What ran before is left out: with the same random numbers it finds the same points again.
    """
    listed: list[ListedAttack] = []
    for entry in section.attacks:
        for item in _listed(entry, section):
            if any((item.attack, item.scaling) == (x.attack, x.scaling) for x in listed):
                continue
            taken = {x.name for x in listed}  # by other settings of the same family
            free = (f"{item.name}-{number}" for number in count(2))
            name = next(n for n in chain([item.name], free) if n not in taken)
            listed.append(replace(item, name=name))
    return listed


def _listed(entry: AttackSettings | UserEntry, section: AttackSection) -> list[ListedAttack]:
    if isinstance(entry, UserEntry):
        own = user_attack(entry, norm=section.norm, eps=section.eps or 0.0)
        return [ListedAttack(own.name, own.name, own)]
    if isinstance(entry, AutoAttackSettings):
        label = f"autoattack-{entry.version}"
        members = _ensemble(entry, section)
        return [ListedAttack(attack.name, label, attack) for attack in members]
    if isinstance(entry, AasSettings):
        inner = _plain(entry.inner, section)
        return [ListedAttack(f"aas-{inner.name}", f"aas-{inner.name}", inner, entry)]
    attack = _plain(entry, section)
    return [ListedAttack(attack.name, attack.name, attack)]


def _plain(entry: AttackSettings, section: AttackSection) -> Attack:
    settings = plain(entry)
    eps = 1.0 if section.eps is None else section.eps  # spatial: any pixel may take any value
    return make_attack(settings.pop("kind"), norm=section.norm, eps=eps, **settings)


def _ensemble(entry: AutoAttackSettings, section: AttackSection) -> list[Attack]:
    """AutoAttack as published, or with the numbers of steps and queries that the recipe sets."""
    assert section.eps is not None
    changes = {"num_steps": entry.num_steps, "num_queries": entry.num_queries}
    members: list[Any] = list(autoattack(entry.version, norm=section.norm, eps=section.eps))
    return [
        replace(attack, **{k: v for k, v in changes.items() if v and k in _settings(attack)})
        for attack in members
    ]


def _settings(attack: Any) -> set[str]:
    return {field.name for field in fields(attack)}


def attention_scales(
    entry: AasSettings, model: nn.Module, net: nn.Module, reference: Items
) -> list[Scales]:
    """The candidates of a scaled attack. Hold `attack_mode(model)` around the call."""
    found = [global_scales(net, scale) for scale in entry.scales]
    if entry.search:
        settings = plain(entry.search, exclude={"num_items"})
        found += ScaleSearch(**settings)(model, net, reference)
    return found


def scaled_attack(listed: ListedAttack, net: nn.Module, scales: tuple[Scales, ...]) -> ScaledAttack:
    """The attack of an `aas` entry on a loaded network."""
    assert listed.scaling is not None
    return ScaledAttack(
        net=net, inner=listed.attack, scales=scales, surrogate=listed.scaling.surrogate
    )


def model_folder(inputs: Mapping[str, Path], model: str) -> Path:
    """Where a model of the recipe is: trained by it, or given to it."""
    given = inputs.get(f"model.{model}")
    return given or inputs[f"train.{model}"] / "model"


def actor_device(cluster: ClusterSection) -> str:
    """Where a worker computes: the GPU it was given, else the CPU."""
    if not cluster.gpus_per_worker:
        return "cpu"
    if not torch.cuda.is_available():
        raise CasemateError(
            "cluster.gpus_per_worker",
            cluster.gpus_per_worker,
            "was asked for, but torch sees no GPU",
        )
    return "cuda"
