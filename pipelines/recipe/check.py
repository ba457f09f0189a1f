"""The one gate: refuses recipes that cannot work, before anything starts.

`run`, `submit`, `lint`, `estimate` and every trial of a search call the same function, first with
the recipe alone and again with the facts known after preparation. Rules between sections have been
checked when the recipe was read (`consistency.py`). Checks come in groups. A group reports
everything it finds; later groups build on earlier ones and are skipped after a problem. The group
of networks is in `check_networks.py`.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from components.core.errors import CasemateError
from components.core.problems import Problems
from components.core.user_code import is_reference, references
from components.data.sources import find_source, open_source
from components.data.sources.info import check_options
from components.denoising.settings import ARCHITECTURES
from components.models.settings import TIMM
from components.train.schedules import peak_rate
from pipelines.recipe import analysis, evaluation
from pipelines.recipe.check_networks import (
    check_attention,
    check_denoisers,
    check_networks,
    check_recomputing,
    check_sharding,
    check_starting_weights,
    check_studies,
    check_user_networks,
    trained_sections,
)
from pipelines.recipe.facts import (
    Facts,
    facts_of,
    facts_of_prepared,
    given_spec,
    source_side,
    spec_on,
    trained_model,
)
from pipelines.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from components.data.prepared import PreparedDataset

Check = Callable[[Recipe, Facts, Problems], None]
MOST_VOTES = 2**31  # in one file
PLAIN_RAND_AUGMENT = re.compile(r"rand(-(m\d+|mstd\d+(\.\d+)?|inc[01]))*")  # always allowed


def check(recipe: Recipe, facts: Facts | None = None) -> None:
    """Raise `RecipeError` if the recipe or one of its trials cannot work.

    `facts` is what is known besides the recipe.
    """
    check_one(recipe, facts)
    if recipe.tune:
        check_trials(recipe, facts)


def check_on_images(recipe: Recipe, dataset: "PreparedDataset") -> None:
    """Run the same checks with the facts of the prepared images."""
    check(recipe, facts_of_prepared(dataset))


def check_trials(recipe: Recipe, facts: Facts | None = None) -> int:
    """The epochs of the longest trial; every trial is a recipe and passes the same checks."""
    from pipelines.recipe import trials  # imports numpy

    return trials.check(recipe, gate=partial(check_one, facts=facts))


def check_one(recipe: Recipe, facts: Facts | None = None) -> None:
    """Raise `RecipeError` if the recipe cannot work; trials are not checked."""
    known = Facts()
    for group in GROUPS:
        problems = Problems()
        for one in group:
            with problems.at(""):
                one(recipe, known, problems)
        problems.refuse(recipe.source)
        if group is REGISTRIES:  # the source exists: use its facts
            known = facts_of(recipe).updated(facts)


# 1. Sections against each other


def _trained_models(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Certificates that the training of their model rules out."""
    for name, section in recipe.certify.items():
        if model := trained_model(recipe, section):
            for p in section.model_problems(model):
                problems.add(f"certify.{name}.{p.field}", p.value, p.remedy)


def _devices(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Certificates and attacks that the devices of the workers cannot compute."""
    for name, section in recipe.certify.items():
        for p in section.device_problems(recipe.cluster.actor_device):
            problems.add(f"certify.{name}.{p.field}", p.value, p.remedy)
    for name, attack in recipe.attack.items():
        if attack.precision == "tf32" and recipe.cluster.actor_device == "cpu":
            remedy = "needs GPUs; set cluster.gpus_per_actor, or use float32"
            problems.add(f"attack.{name}.precision", attack.precision, remedy)


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
    if synthetic and recipe.train.order == "balanced":
        remedy = "cannot be combined with data.synthetic; remove one of them"
        problems.add("train.order", "balanced", remedy)
    if synthetic and augment.copies > 1:
        remedy = "cannot be combined with data.synthetic; set it to 1"
        problems.add("train.augment.copies", augment.copies, remedy)
    if synthetic and synthetic.ratio * size < 1:
        remedy = f"of a batch of {size} is less than one image; raise it"
        problems.add("data.synthetic.ratio", synthetic.ratio, remedy)


def _decoding(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Decoding on GPUs that are not there, or of images that are not JPEG."""
    if recipe.train is None or recipe.train.decode == "host":
        return
    remedy = ""
    if recipe.data.train_format != "jpeg":
        remedy = "needs data.train_format: jpeg"
    elif not recipe.cluster.gpus_per_train_worker:
        remedy = "needs GPUs; set cluster.gpus_per_train_worker, or write host"
    elif recipe.data.synthetic:
        remedy = "cannot be combined with data.synthetic; write host"
    if remedy:
        problems.add("train.decode", recipe.train.decode, remedy)


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
        elif info.test_only and data.train_format != "png":
            remedy = f"does not apply: {data.source} has no training items"
            problems.add("data.train_format", data.train_format, remedy)
    from components.data.fitting import Fitting  # imports numpy

    with problems.at(""):
        fitting = Fitting(data.image_size, data.fit, data.channels, data.resize)
        if data.train_size is not None:
            fitting.enlarged(data.train_size)
    if data.train_format == "jpeg":
        from components.data.encodings import jpeg_decoder

        with problems.at(""):
            jpeg_decoder()


def _architectures(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Names of networks."""
    from components.models.names import is_registered

    for above, section in trained_sections(recipe):
        if not is_registered(section.architecture):
            from components.models.zoo import check_known  # imports timm, to name similar ones

            with problems.at(above.removesuffix(".")):
                check_known(section.architecture, section.options)
        if is_reference(section.architecture) and section.pretrained == TIMM:
            remedy = f"has no weights for {section.architecture}; import some: "
            problems.add(f"{above}model.pretrained", TIMM, f"{remedy}casemate import-weights")


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
    sections = [*recipe.objectives(), *((f"certify.{n}", c) for n, c in recipe.certify.items())]
    for key, section in sections:
        for name, pixels in section.lengths():
            if pixels > facts.side:
                problems.add(f"{key}.{name}", pixels, f"is larger than the image ({facts.side})")


def _inputs(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Normalisation that does not match the channels, and invalid input sizes of networks."""
    for above, section in trained_sections(recipe):
        if section.architecture in ARCHITECTURES:
            continue  # denoisers take the pixels as they are
        complete = True
        for name in ("mean", "std"):
            values = getattr(section, name)
            if facts.channels and values is not None and len(values) != facts.channels:
                remedy = f"needs {facts.channels} entries, one per channel"
                problems.add(f"{above}model.{name}", list(values), remedy)
                complete = False
        if complete and facts.side:
            with problems.at(above.removesuffix(".")):
                spec_on(section, facts)


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
            header = VotesHeader(  # only fields that the number of votes depends on
                kind=section.kind,
                run_id="",
                model_digest="",
                dataset_digest="",
                num_classes=facts.num_classes or 2,
                image=ImageShape(facts.channels or 3, facts.side, facts.side),
                settings=entry.section.recorded(run_seed=recipe.seed),
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


# 5. Data as prepared


def _prepared(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Splits without items, and images that are not squares."""
    for split in ("train", "val") if recipe.train and facts.splits else ():
        if facts.splits and facts.splits.get(split) == 0:
            problems.add("data", f"the {split} split", "is empty: nothing to train on")
    if recipe.train and facts.height != facts.width:
        shape = f"{facts.height}x{facts.width}"
        problems.add("data.image_size", shape, "is not square; set data.image_size")


SECTIONS: list[Check] = [_trained_models, _devices, _batches, _decoding, _rates]
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
    *(check_denoisers, check_user_networks, check_networks, check_recomputing),
    *(check_attention, check_starting_weights, check_sharding, check_studies),
]
PREPARED: list[Check] = [_prepared]
GROUPS = (SECTIONS, REGISTRIES, IMAGES, NETWORKS, PREPARED)
