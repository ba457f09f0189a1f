"""The one gate: refuses recipes that cannot work, before anything starts.

`run`, `submit`, `lint`, `estimate` and every trial of a search call the same function, first with
the recipe alone and again with the facts known after preparation. Rules between sections have been
checked when the recipe was read (`consistency.py`). Checks come in groups. A group reports
everything it finds; later groups build on earlier ones and are skipped after a problem.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from components.core.digests import canonical_json
from components.core.errors import CasemateError
from components.core.problems import Problems
from components.core.settings import plain
from components.core.user_code import is_reference, references
from components.data.sources import find_source, open_source
from components.data.sources.registry import check_options
from components.denoising.settings import ARCHITECTURES, is_on_disk
from components.models.known import Known, known_network, starts_from_timm
from components.models.settings import ModelSettings
from components.models.spec import ModelSpec
from components.train.objectives.settings import ObjectiveSettings
from components.train.schedules import peak_rate
from pipelines.recipe import analysis, evaluation
from pipelines.recipe.facts import (
    Facts,
    facts_of,
    facts_of_prepared,
    given_spec,
    is_here,
    source_side,
    trained_model,
)
from pipelines.recipe.schema.recipe import MAIN, Recipe

if TYPE_CHECKING:
    from torch import nn

    from components.data.prepared import PreparedDataset
    from pipelines.recipe.denoisers import BehindDenoiser

Check = Callable[[Recipe, Facts, Problems], None]
MOST_VOTES = 2**31  # in one file
TIMM = "timm"
PLAIN_RAND_AUGMENT = re.compile(r"rand(-(m\d+|mstd\d+(\.\d+)?|inc[01]))*")  # always allowed
ANY_IMAGES = Facts(height=32, width=32)  # a size that most networks accept, to inspect layers


def check(recipe: Recipe, facts: Facts | None = None, *, source: str | None = None) -> None:
    """Raise `RecipeError` if the recipe or one of its trials cannot work.

    `facts` is what is known besides the recipe, `source` the file that errors name.
    """
    check_one(recipe, facts, source=source)
    if recipe.tune:
        check_trials(recipe, facts)


def check_on_images(recipe: Recipe, dataset: "PreparedDataset") -> None:
    """Run the same checks with the facts of the prepared images."""
    check(recipe, facts_of_prepared(dataset))


def check_trials(recipe: Recipe, facts: Facts | None = None) -> int:
    """The epochs of the longest trial; every trial is a recipe and passes the same checks."""
    from pipelines.recipe import trials  # imports numpy

    return trials.check(recipe, gate=partial(check_one, facts=facts))


def check_one(recipe: Recipe, facts: Facts | None = None, *, source: str | None = None) -> None:
    """Raise `RecipeError` if the recipe cannot work; trials are not checked."""
    known = Facts()
    for group in GROUPS:
        problems = Problems()
        for one in group:
            with problems.at(""):
                one(recipe, known, problems)
        problems.refuse(source or recipe.source)
        if group is REGISTRIES:  # the source exists: use its facts
            known = facts_of(recipe).updated(facts)


# 1. Sections against each other


def _trained_models(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Certificates that the training of their model rules out."""
    for name, section in recipe.certify.items():
        if model := trained_model(recipe, section):
            for p in section.model_problems(model):
                problems.add(f"certify.{name}.{p.field}", p.value, p.remedy)


def _batches(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Batches that cannot be divided among workers, copies and generated images."""
    if recipe.train is None:
        return
    size, workers = recipe.train.batch_size, recipe.cluster.train_workers
    augment, synthetic = recipe.train.augment, recipe.data.synthetic
    share, rest = divmod(size, workers)
    if rest:
        remedy = f"is not divisible by cluster.train_workers {workers}"
        problems.add("train.batch_size", size, remedy)
    elif (augment.mixup or augment.cutmix) and share % 2:
        remedy = f"leaves a worker {share} images; mixing needs pairs"
        problems.add("train.batch_size", size, remedy)
    if synthetic and augment.copies > 1:
        remedy = "cannot be combined with data.synthetic; set it to 1"
        problems.add("train.augment.copies", augment.copies, remedy)
    if synthetic and synthetic.ratio * size < 1:
        remedy = f"of a batch of {size} is less than one image; raise it"
        problems.add("data.synthetic.ratio", synthetic.ratio, remedy)


def _rates(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """A cosine schedule whose floor is above its peak."""
    if recipe.train is None:
        return
    train = recipe.train
    floor = getattr(train.schedule, "floor", None) or 0.0
    peak = peak_rate(train.learning_rate, batch_size=train.batch_size, rule=train.rate_rule)
    if floor > peak:
        remedy = f"is above the learning rate, which comes to {peak:g}: the rate would rise"
        problems.add("train.schedule.floor", floor, remedy)


# 2. Registries and files


def _data(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Data sources, their options, and the fitting of images."""
    data = recipe.data
    with problems.at(""):
        info = find_source(data.source)
        check_options(info, data.options)
        if info.is_cheap:
            open_source(data.source, path=data.path, options=data.options)
        if info.test_only and recipe.train:
            problems.add("data.source", data.source, "has test items only: it cannot be trained on")
    from components.data.fitting import Fitting  # imports numpy

    with problems.at(""):
        fitting = Fitting(data.image_size, data.fit, data.channels, data.resize)
        if data.train_size is not None:
            fitting.enlarged(data.train_size)


def _architectures(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Names of networks."""
    from components.models.names import is_registered

    for above, section in _model_sections(recipe):
        if not is_registered(section.architecture):
            from components.models.zoo import check_known  # imports timm, to name similar ones

            with problems.at(above):
                check_known(section.architecture, section.options)
        if is_reference(section.architecture) and section.pretrained == TIMM:
            remedy = f"has no weights for {section.architecture}; import some: "
            key = _joined(above, "model.pretrained")
            problems.add(key, TIMM, f"{remedy}casemate import-weights")


def _user_code(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Sources, attacks and objectives of the user's that cannot be constructed."""
    if references(recipe.resolved()):
        from pipelines.recipe import user_code  # imports torch

        user_code.check_sources(recipe, problems)
        user_code.check_attacks(recipe, problems)
        user_code.check_objectives(recipe, problems)


def _augmentation(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """RandAugment policies in timm's notation; the settings check all other values."""
    policy = recipe.train.augment.rand_augment if recipe.train else None
    if recipe.train and policy and not PLAIN_RAND_AUGMENT.fullmatch(policy):
        from components.data.augment import Augmentation

        Augmentation.of(recipe.train.augment, size=recipe.data.image_size or 1)


# 3. Images


def _source_images(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Images that padding would have to shrink."""
    data, stored = recipe.data, source_side(recipe.data)
    if data.fit == "pad" and data.image_size and stored and data.image_size < stored:
        remedy = f"is smaller than the images ({stored}), and padding cannot shrink; set data.fit"
        problems.add("data.image_size", data.image_size, f"{remedy}: resize")


def _limits(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Fewer training items than classes: preparation refuses a class without any."""
    limit, least = recipe.data.limits.get("train"), facts.num_classes
    if limit and least and limit < least and not find_source(recipe.data.source).test_only:
        remedy = f"is below the number of classes ({least}): each needs a training item"
        problems.add("data.limits.train", limit, remedy)


def _lengths(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Lengths in pixels that do not fit into the images."""
    if facts.side is None:
        return
    sections = [*_objectives(recipe), *((f"certify.{n}", c) for n, c in recipe.certify.items())]
    for key, section in sections:
        for name, pixels in section.lengths():
            if pixels > facts.side:
                problems.add(f"{key}.{name}", pixels, f"is larger than the image ({facts.side})")


def _inputs(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Normalisation that does not match the channels, and invalid input sizes of networks."""
    for above, section in _model_sections(recipe):
        if section.architecture in ARCHITECTURES:
            continue  # denoisers take the pixels as they are
        complete = True
        for name in ("mean", "std"):
            values = getattr(section, name)
            if facts.channels and values is not None and len(values) != facts.channels:
                remedy = f"needs {facts.channels} entries, one per channel"
                problems.add(_joined(above, f"model.{name}"), list(values), remedy)
                complete = False
        if complete and facts.side:
            with problems.at(above):
                _spec(section, facts)


def _spec(section: ModelSettings, facts: Facts) -> ModelSpec:
    """The spec of a section's network on these images; its constructor checks it."""
    assert facts.side is not None
    channels = facts.channels or len(section.mean or section.std or (0, 0, 0))
    return ModelSpec(
        architecture=section.architecture,
        num_classes=facts.num_classes or 2,
        channels=channels,
        image_size=facts.side,
        upsample=section.upsample,
        upsample_mode=section.upsample_mode,
        token_policy=section.token_policy,
        mean=tuple(section.mean or (0.5,) * channels),
        std=tuple(section.std or (0.5,) * channels),
        options=section.options,
    )


def _classes(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Attacks that rank more logits than there are classes."""
    if facts.num_classes is None or facts.num_classes >= 4:
        return  # no attack needs more
    from components.attacks.listing import check_class_count

    for name, section in recipe.attack.items():
        with problems.at(f"attack.{name}.attacks"):
            members = [member for entry in section.attacks for member in entry.members()]
            check_class_count(members, num_classes=facts.num_classes)


def _votes(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """More predictions than a votes file can hold."""
    if facts.side is None or facts.splits is None:
        return
    test = facts.splits.get("test", 0)
    for name, section in recipe.certify.items():
        num_items = min(section.num_items or test, test)
        if num_items * section.max_votes(side=facts.side) < MOST_VOTES:
            continue
        from components.certify.header import ImageShape, VotesHeader
        from components.certify.votes import check_can_store

        for entry in section.entries(name).values():
            later = {"band": getattr(entry.section, "band", 0) or 1, "run_seed": recipe.seed}
            header = VotesHeader(  # only fields that the number of votes depends on
                kind=section.kind,
                run_id="",
                model_digest="",
                dataset_digest="",
                num_classes=facts.num_classes or 2,
                image=ImageShape(facts.channels or 3, facts.side, facts.side),
                settings={**plain(entry.section), **later},
                noise_impl=None,
                num_items=num_items,
                software={},
            )
            try:
                check_can_store(header)
            except CasemateError as error:
                problems.add(f"certify.{name}.num_items", error.value, error.remedy)


def _given_model(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """A given model whose images or classes do not match the data."""
    spec = given_spec(recipe)
    if spec is None:
        return
    wanted = {
        "channels": (spec.get("channels"), facts.channels, "data.channels"),
        "pixels per side": (spec.get("image_size"), facts.side, "data.image_size"),
        "classes": (spec.get("num_classes"), facts.num_classes, "data.source"),
    }
    denoised = any(c.denoiser_name for c in recipe.certify.values())
    for what, (theirs, ours, key) in wanted.items():
        if theirs and ours and theirs != ours and not (denoised and what == "pixels per side"):
            remedy = f"{what} in the data, but {recipe.model.pretrained} takes {theirs}"
            problems.add(key, ours, remedy)


# 4. Networks as shapes: torch and timm are imported only for recipes that need them


def _denoisers(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Denoisers that do not fit their use in training or certification."""
    images = {"channels": facts.channels, "side": facts.side}
    for key, objective in _objectives(recipe):
        if objective.denoiser_name and not _certainly_suits(recipe, objective, facts):
            from pipelines.recipe import denoisers

            with problems.at(""):
                denoisers.check_use(recipe, key, objective, **images)
    for name, section in recipe.certify.items():
        if section.denoiser_name and not _certainly_suits(recipe, section, facts):
            from pipelines.recipe import denoisers

            with problems.at(""):
                denoisers.check_certificate(recipe, f"certify.{name}", section, **images)
    for name in recipe.denoisers() if recipe.train else ():
        levels, most = (
            recipe.objective_of(name).certain_levels(),
            recipe.objective_of(name).max_sigma(),
        )
        if most and not (levels and most <= levels[1]):
            from pipelines.recipe import denoisers

            with problems.at(""):
                denoisers.check_training(recipe, f"{recipe.objective_key(name)}.objective", name)
    for key, start in denoisers_on_disk(recipe):
        if key.endswith(".pretrained") and is_here(start):
            from pipelines.recipe import denoisers

            with problems.at(""):
                denoisers.check_start(key, start, channels=facts.channels)


def _certainly_suits(recipe: Recipe, section: "BehindDenoiser", facts: Facts) -> bool:
    """Whether a denoiser is not on this machine, or is trained here and certainly fits."""
    name, sigma = section.denoiser_name, section.noise_sigma
    assert name is not None
    if is_on_disk(name):
        return not is_here(name)
    model = recipe.model_of(name)
    levels = recipe.objective_of(name).certain_levels()
    return (
        model.pretrained is None
        and "learn_variance" not in model.options
        and recipe.data.channels in (None, facts.channels)
        and levels is not None
        and sigma is not None
        and levels[0] <= sigma <= levels[1]
    )


def denoisers_on_disk(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Every folder of a denoiser that a recipe names, by its key."""
    for above, model in _model_sections(recipe):
        if model.pretrained and is_on_disk(model.pretrained):
            yield _joined(above, "model.pretrained"), model.pretrained
    for key, objective in _objectives(recipe):
        if objective.denoiser_name and is_on_disk(objective.denoiser_name):
            yield f"{key}.denoiser", objective.denoiser_name
    for name, section in recipe.certify.items():
        if section.denoiser_on_disk:
            yield f"certify.{name}.denoiser", section.denoiser_on_disk


def _networks(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Networks that cannot be built for these images, halve them or drop tokens."""
    if facts.side is None:
        return
    for above, section in _model_sections(recipe):
        drops = section.token_policy == "drop"
        own = is_reference(section.architecture)
        if not (drops or (section.options and not own) or section.architecture in ARCHITECTURES):
            continue
        known = _known(section, facts)
        if known is None or (drops and not known.drops_tokens):
            with problems.at(above):
                _check_network(section, facts)


def _user_networks(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Networks of the user's that do not work on these images."""
    if any(is_reference(section.architecture) for _, section in _model_sections(recipe)):
        from pipelines.recipe import user_code

        user_code.check_networks(recipe, facts, problems)


def _known(section: ModelSettings, facts: Facts) -> Known | None:
    """Properties of a section's network that are known without building it."""
    side = section.upsample or facts.side
    if side is None or (section.pretrained and section.architecture in ARCHITECTURES):
        return None  # options may be those of the weights
    return known_network(section.architecture, section.options, image_size=side)


def _check_network(section: ModelSettings, facts: Facts) -> None:
    from components.models.tokens import check_droppable
    from pipelines.recipe import denoisers

    assert facts.side is not None
    start = section.pretrained if section.architecture in ARCHITECTURES else None
    if start and not is_here(start):
        return
    if start and not section.options:
        with denoisers.by_key("model.pretrained", start):
            network = _network(section, facts)
        denoisers.check_side("model.pretrained", start, network, side=facts.side)
    else:
        network = _network(section, facts)
        denoisers.check_side("model.options", section.options, network, side=facts.side)
    if section.token_policy == "drop":
        check_droppable(network)


def has_droppable_tokens(section: ModelSettings, facts: Facts) -> bool:
    """Whether a network can drop tokens; mostly plain vision transformers can."""
    seen = facts.updated(None if facts.side else ANY_IMAGES)
    if known := _known(section, seen):
        return known.drops_tokens
    from components.models.tokens import check_droppable

    try:
        check_droppable(_network(section, seen))
    except CasemateError:
        return False
    return True


def _network(model: ModelSettings, facts: Facts) -> "nn.Module":
    """The network of a section on the meta device, to inspect its layers; user code as it is."""
    assert facts.side is not None
    if is_reference(model.architecture):
        from pipelines.recipe.user_code import Trial

        return Trial.of(model, facts).network()
    from pipelines.recipe import denoisers

    architecture, options = denoisers.network_of(model)
    channels = facts.channels or 3  # any number works here
    return _shapes(architecture, canonical_json(options), channels, model.upsample or facts.side)


@cache  # trials of a search differ in other keys, mostly
def _shapes(architecture: str, options: str, channels: int, side: int) -> "nn.Module":
    from components.models.costs import network_of_shapes

    return network_of_shapes(
        architecture,
        image_size=side,
        channels=channels,
        num_classes=2,
        options=json.loads(options),
    )


def _attention(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Networks without accessible attention whose attention the recipe scales."""
    if facts.side is None:
        return
    for key, model in _scaled_models(recipe):
        section = recipe.model_of(model)
        known = _known(section, facts)
        if known and known.scales_attention:
            continue
        from components.models.attention.discover import attention_of

        try:
            attention_of(_network(section, facts))
        except CasemateError as error:
            problems.add(key, section.architecture, error.remedy)


def _studies(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Networks that a study of the analyze section does not work for."""
    if recipe.analyze is None or facts.side is None:
        return
    for name in recipe.analyzed_models():
        if folder := recipe.given_model():
            if (network := analysis.given_network(folder)) is None:
                continue  # on another machine
        elif recipe.denoiser_of(name):
            continue
        else:
            network = _network(recipe.model_of(name), facts)
        analysis.check_network(recipe.analyze, network, problems, seed=recipe.seed)


def _scaled_models(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key, model) of every place where a recipe scales the attention of a trained model."""
    if recipe.train is None:
        return
    for name in recipe.model_names():
        if recipe.objective_of(name).scales_attention:
            yield f"{recipe.objective_key(name)}.objective.aas", name
    for name, section in recipe.attack.items():
        for number, entry in enumerate(section.attacks):
            if entry.scaling:
                yield from ((f"attack.{name}.attacks.{number}", model) for model in section.models)


def _starting_weights(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Initial weights of another network or for other images."""
    if None in (facts.side, facts.channels, facts.num_classes) or recipe.train is None:
        return
    for name in recipe.model_names():
        start = recipe.model_of(name).pretrained
        if start is None or is_on_disk(start) or _certainly_starts(recipe, name, facts):
            continue  # random weights, and denoisers, which are checked above
        if start == TIMM or Path(start).expanduser().is_dir():
            from pipelines.recipe import build

            with problems.at("" if name == MAIN else f"train.variants.{name}"):
                build.model_spec(recipe, _as_prepared(facts), name)


def _certainly_starts(recipe: Recipe, name: str, facts: Facts) -> bool:
    """Whether timm certainly has weights for this model and these images."""
    section, behind = recipe.model_of(name), recipe.objective_of(name).denoiser_name
    return (
        section.pretrained == TIMM
        and starts_from_timm(section.architecture, section.options)
        and (section.mean, section.std, behind) == (None, None, None)
        and facts.channels == 3
        and facts.height == facts.width
    )


def _as_prepared(facts: Facts) -> Any:
    """The facts of a prepared dataset that the spec of a model needs."""
    return SimpleNamespace(
        height=facts.height,
        width=facts.width,
        channels=facts.channels,
        classes=range(facts.num_classes or 0),
    )


def _sharding(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Networks and objectives that fsdp cannot train."""
    if recipe.train is None or recipe.cluster.strategy != "fsdp" or facts.side is None:
        return
    import torch

    from components.models.pixels import PixelModel
    from components.train.objectives.make import make_objective
    from components.train.sharding import check_shardable

    for name in recipe.model_names():
        if name in recipe.denoisers() or recipe.denoiser_of(name):
            continue  # their folders may not exist yet
        try:
            with torch.device("meta"):  # layers are inspected, not weights
                network = PixelModel(_spec(recipe.model_of(name), facts))
        except RuntimeError:
            continue  # computes with values while it is built
        with problems.at(""):
            objective = make_objective(
                recipe.objective_of(name), label_smoothing=recipe.train.label_smoothing
            )
            check_shardable(network, objective)


# 5. Data as prepared


def _prepared(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Splits without items, and images that are not squares."""
    for split in ("train", "val") if recipe.train and facts.splits else ():
        if facts.splits and facts.splits.get(split) == 0:
            problems.add("data", f"the {split} split", "is empty: nothing to train on")
    if recipe.train and facts.height != facts.width:
        shape = f"{facts.height}x{facts.width}"
        problems.add("data.image_size", shape, "is not square; set data.image_size")


SECTIONS: list[Check] = [_trained_models, _batches, _rates]
REGISTRIES: list[Check] = [
    *(_data, _architectures, _augmentation, _user_code),
    evaluation.check_files,
]
IMAGES: list[Check] = [
    *(_source_images, _limits, _lengths, _inputs),
    *(_classes, _votes, _given_model),
    *(evaluation.check_images, analysis.check_images),
]
NETWORKS: list[Check] = [
    *(_denoisers, _user_networks, _networks),
    *(_attention, _starting_weights, _sharding, _studies),
]
PREPARED: list[Check] = [_prepared]
GROUPS = (SECTIONS, REGISTRIES, IMAGES, NETWORKS, PREPARED)


def _objectives(recipe: Recipe) -> list[tuple[str, ObjectiveSettings]]:
    """The objectives of all models by their keys, `main` first."""
    names = recipe.model_names() if recipe.train else []
    return [
        (f"{recipe.objective_key(name)}.objective", recipe.objective_of(name)) for name in names
    ]


def _model_sections(recipe: Recipe) -> list[tuple[str, ModelSettings]]:
    """The key prefix of each `model` section of a trained network, and the section."""
    if recipe.train is None:
        return []
    variants = recipe.train.variants.items()
    own = [(f"train.variants.{name}", part.model) for name, part in variants if part.model]
    return [("", recipe.model), *own]


def _joined(above: str, key: str) -> str:
    return ".".join(filter(None, [above, key]))
