"""Rules between the sections of a recipe: the first group of the gate. Needs no torch."""

from collections.abc import Iterator

from components.core.hints import did_you_mean
from components.core.settings import Problem
from components.denoising.settings import ARCHITECTURES, is_on_disk
from components.models.settings import ModelSettings
from pipelines.recipe.schema.recipe import MAIN, Recipe

NOT_A_DENOISER = "is neither a variant with objective kind: denoiser nor diffusers:PATH"


def consistency_problems(recipe: Recipe) -> Iterator[Problem]:
    """Contradictions between the sections of a recipe whose sections are each valid."""
    yield from _train_problems(recipe)
    yield from _name_problems(recipe)
    yield from _given_denoiser_problems(recipe)
    if recipe.train:
        for name in recipe.model_names():
            yield from _model_problems(recipe, name)
    for key, name in _classifiers(recipe):
        if name in recipe.denoisers():
            yield Problem(key, name, "is a denoiser, not a classifier")


def _classifiers(recipe: Recipe) -> list[tuple[str, str]]:
    """Every use of a model as a classifier, by its key."""
    used = [(f"attack.{k}.models", m) for k, a in recipe.attack.items() for m in a.models]
    used += [("evaluate.models", m) for m in (recipe.evaluate and recipe.evaluate.models) or ()]
    used += [("analyze.models", m) for m in (recipe.analyze and recipe.analyze.models) or ()]
    if recipe.analyze and recipe.analyze.perturbations:
        judges = recipe.analyze.perturbations.judge_models
        used += [("analyze.perturbations.judge_models", model) for model in judges]
    return used + [(f"certify.{k}.model", c.model) for k, c in recipe.certify.items()]


def _train_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train and MAIN in recipe.train.variants:
        yield Problem("train.variants", MAIN, "is the name of train.objective's model")
    if recipe.tune and not recipe.train:
        yield Problem("tune", "", "needs a train section to vary")
    for key in ("certify", "evaluate", "analyze"):
        if getattr(recipe, key) and not recipe.model_names():
            remedy = "needs a train section that makes models, or model.pretrained: a folder"
            yield Problem(key, "", remedy)
    for key in ("evaluate", "analyze"):
        if getattr(recipe, key) and recipe.model_names() and not recipe.classifiers():
            yield Problem(key, "", "has no classifier: all models of the recipe are denoisers")


def _name_problems(recipe: Recipe) -> Iterator[Problem]:
    known = recipe.model_names()
    surrogates = [(f"attack.{k}.surrogate", a.surrogate) for k, a in recipe.attack.items()]
    for key, model in [*_classifiers(recipe), *surrogates]:
        if model is not None and model not in known:
            yield Problem(key, model, did_you_mean(model, known))
    certificates = [name for k, c in recipe.certify.items() for name in c.entries(k)]
    for name in sorted({name for name in certificates if certificates.count(name) > 1}):
        yield Problem("certify", "", f"two sections make a certificate called {name}; rename one")


def _given_denoiser_problems(recipe: Recipe) -> Iterator[Problem]:
    for key, section in recipe.certify.items():
        behind = recipe.certified_behind(section)
        if behind is not None and behind not in recipe.denoisers():
            yield Problem(f"certify.{key}.denoiser", behind, NOT_A_DENOISER)
    if recipe.train is None and is_on_disk(recipe.model.pretrained or ""):
        remedy = "is a denoiser; a model that is not trained must be a classifier's folder"
        yield Problem("model.pretrained", recipe.model.pretrained, remedy)


def _model_problems(recipe: Recipe, name: str) -> Iterator[Problem]:
    """A network, its weights and its objective: of a denoiser, or of a classifier."""
    key, network = recipe.objective_key(name), recipe.model_key(name)
    section = recipe.model_of(name)
    denoises = name in recipe.denoisers()
    start, architecture = section.pretrained or "", section.architecture
    plain = ModelSettings(
        architecture=architecture, options=section.options, pretrained=section.pretrained
    )
    if denoises and section != plain:
        remedy = "takes only architecture, options and pretrained"
        yield Problem(network, "", f"of a denoiser {remedy}")
    if start and denoises != is_on_disk(start):
        wanted = "diffusers:PATH or model:PATH" if denoises else "timm or a folder"
        kind = "a denoiser" if denoises else "a classifier"
        yield Problem(f"{network}.pretrained", start, f"cannot start {kind}; write {wanted}")
    if denoises != (architecture in ARCHITECTURES):
        kind = "a denoiser" if denoises else "a classifier"
        remedy = f"is not a network for {kind}; denoisers are {', '.join(ARCHITECTURES)}"
        yield Problem(f"{network}.architecture", architecture, remedy)
    behind = recipe.denoiser_of(name)
    if behind is not None and behind not in recipe.denoisers():
        yield Problem(f"{key}.objective.denoiser", behind, NOT_A_DENOISER)
