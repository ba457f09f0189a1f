"""Warnings about recipes that are valid but probably not meant."""

from collections.abc import Iterator
from dataclasses import dataclass

from components.attacks.settings import (
    AasSettings,
    ApgdSettings,
    AttackSettings,
    AutoAttackSettings,
    FgsmSettings,
    GamaSettings,
    PgdSettings,
)
from components.certify.l2.settings import GaussianSettings
from components.certify.patch.settings import AblationSettings, DoubleMaskingSettings, PatchSettings
from components.core.errors import CasemateError
from components.train.objectives.settings import (
    AdversarialSettings,
    DenoisedTrainingSettings,
    DenoiserTrainingSettings,
    GaussianTrainingSettings,
    ObjectiveSettings,
)
from components.train.settings import TrainSettings
from pipelines.recipe.check import check_recipe, denoisers_on_disk, known_side, trained_ablation
from pipelines.recipe.denoisers import is_here
from pipelines.recipe.schema.recipe import Recipe

ABSENT = "is not on this machine: not checked"
FEWEST_STEPS = {PgdSettings: 10, ApgdSettings: 20, GamaSettings: 20, AutoAttackSettings: 100}


@dataclass(frozen=True, slots=True)
class LintWarning:
    """A key that deserves a second look, and why."""

    key: str
    message: str


def warnings_of(recipe: Recipe) -> list[LintWarning]:
    """All warnings of a valid recipe; what is impossible is an error instead."""
    check_recipe(recipe)
    return [
        *_absent(recipe),
        *_training(recipe),
        *_attacks(recipe),
        *_certificates(recipe),
        *_tuning(recipe),
    ]


def _absent(recipe: Recipe) -> Iterator[LintWarning]:
    """Denoisers that may well be where the recipe will run; here nobody could look at them."""
    for key, source in denoisers_on_disk(recipe):
        if not is_here(source):
            yield LintWarning(key, f"{source} {ABSENT}")


def _training(recipe: Recipe) -> Iterator[LintWarning]:
    if recipe.train is None:
        return
    for model in recipe.model_names():
        key = "train.objective" if model == "main" else f"train.variants.{model}.objective"
        objective, epochs = recipe.objective_of(model), recipe.epochs_of(model)
        if isinstance(objective, AdversarialSettings):
            yield from _adversarial(key, objective, epochs)
        if recipe.train.stop_on_leak and getattr(objective, "clean_forward", "") == "none":
            yield LintWarning(f"{key}.clean_forward", "none: nobody watches for label leaking")
        average = recipe.train.average
        if average and getattr(average, "start_epoch", 0) >= epochs:
            yield LintWarning("train.average.start_epoch", f"no epoch of model {model} is averaged")
        if (
            trained_ablation(objective)
            and recipe.model.token_policy == "mask"
            and _can_drop(recipe)
        ):
            yield LintWarning(
                "model.token_policy",
                f"mask: `drop` trains and certifies model {model} several times faster",
            )
    yield from _rates(recipe.train)


def _can_drop(recipe: Recipe) -> bool:
    """Whether the network could leave tokens out; most that are not plain transformers cannot."""
    from components.models.costs import network_of_shapes
    from components.models.tokens import check_droppable

    size = recipe.model.upsample or recipe.data.image_size or 32  # 32: any size will do to ask
    net = network_of_shapes(
        recipe.model.architecture, image_size=size, num_classes=2, options=recipe.model.options
    )
    try:
        check_droppable(net)
    except CasemateError:
        return False
    return True


def _adversarial(key: str, objective: AdversarialSettings, epochs: int) -> Iterator[LintWarning]:
    if objective.eps_warmup_epochs >= epochs:
        yield LintWarning(
            f"{key}.eps_warmup_epochs",
            f"{objective.eps_warmup_epochs} of {epochs} epochs: full eps is never reached",
        )
    if objective.awp and objective.awp.start_epoch >= epochs:
        yield LintWarning(f"{key}.awp.start_epoch", "no epoch is left to perturb weights in")
    if objective.aas and objective.aas.every >= epochs:
        yield LintWarning(f"{key}.aas.every", "the scales of attention are never searched")


def _rates(train: TrainSettings) -> Iterator[LintWarning]:
    from components.train.schedules import SAFE_RATE, peak_rate

    peak = peak_rate(train.learning_rate, batch_size=train.batch_size, rule=train.rate_rule)
    if train.optimizer.kind == "adamw" and peak > SAFE_RATE:
        yield LintWarning(
            "train.learning_rate",
            f"comes to {peak:g} at this batch size; above {SAFE_RATE:g} adamw tends to diverge",
        )
    if train.warmup_epochs >= train.epochs:
        yield LintWarning("train.warmup_epochs", "the learning rate never reaches its peak")


def _attacks(recipe: Recipe) -> Iterator[LintWarning]:
    for name, section in recipe.attack.items():
        for number, entry in enumerate(section.attacks):
            yield from _steps(f"attack.{name}.attacks.{number}", entry, section.eps)
        if all(isinstance(entry, FgsmSettings) for entry in section.attacks):
            yield LintWarning(
                f"attack.{name}.attacks", "FGSM alone overstates robustness; add pgd or apgd-ce"
            )
        if section.sanity is None and section.norm != "spatial":
            yield LintWarning(f"attack.{name}.sanity", "is off: nobody doubts these attacks")
        trained = {
            objective.eps
            for objective in map(recipe.objective_of, section.models if recipe.train else [])
            if isinstance(objective, AdversarialSettings)
        }
        if section.norm == "linf" and trained and section.eps not in trained:
            yield LintWarning(
                f"attack.{name}.eps",
                f"{section.eps:g} differs from the training eps {sorted(trained)}",
            )


def _steps(key: str, entry: AttackSettings, eps: float | None) -> Iterator[LintWarning]:
    """Too few steps, or steps too short to cross the ball."""
    if isinstance(entry, AasSettings):
        yield from _steps(f"{key}.inner", entry.inner, eps)
    few = {PgdSettings: 10, ApgdSettings: 20, GamaSettings: 20, AutoAttackSettings: 100}.get(
        type(entry)
    )
    steps = getattr(entry, "num_steps", None)
    if few and steps and steps < few:
        yield LintWarning(
            f"{key}.num_steps", f"{steps} steps overstate robustness; use {few} or more"
        )
    if isinstance(entry, PgdSettings) and eps:
        step = entry.step_size or eps / 4
        if step * entry.num_steps < 2 * eps:
            yield LintWarning(
                f"{key}.step_size", f"{entry.num_steps} steps of {step:g} cannot cross the ball"
            )


def _certificates(recipe: Recipe) -> Iterator[LintWarning]:
    for name, section in recipe.certify.items():
        key = f"certify.{name}"
        if recipe.train is None:  # a given model: its folder says what it was trained for
            continue
        objective = recipe.objective_of(section.model)
        if isinstance(section, GaussianSettings):
            if behind := recipe.certified_behind(section):
                yield from _levels(key, section, recipe.objective_of(behind))
            yield from _gaussian(key, section, objective)
        elif isinstance(section, AblationSettings):
            yield from _ablations(key, section, objective)
            yield from _strides(key, section, recipe.data.image_size)
            yield from _early_stops(key, section, known_side(recipe.data))
        else:
            yield from _pairs(key, section, objective)
        if isinstance(section, PatchSettings):
            trained = recipe.model_of(section.model).token_policy
            yield from _tokens(key, section, trained)


def _gaussian(
    key: str, section: GaussianSettings, objective: ObjectiveSettings
) -> Iterator[LintWarning]:
    yield from _noise_seen(key, section, objective)
    if section.challenge and section.challenge.eps > section.max_certifiable_radius:
        yield LintWarning(
            f"{key}.challenge.eps", "is above the largest reachable radius: it challenges nothing"
        )


def _noise_seen(
    key: str, section: GaussianSettings, objective: ObjectiveSettings
) -> Iterator[LintWarning]:
    """A classifier that is shown other images than those it was trained on."""
    name, behind = section.model, section.denoiser is not None
    if not isinstance(objective, GaussianTrainingSettings | DenoisedTrainingSettings):
        if not behind:
            yield LintWarning(
                f"{key}.model",
                f"{name} was not trained on Gaussian noise: expect many abstentions",
            )
    elif isinstance(objective, DenoisedTrainingSettings) and not behind:
        yield LintWarning(f"{key}.denoiser", f"is none, but {name} was trained behind one")
    elif isinstance(objective, GaussianTrainingSettings) and behind:
        yield LintWarning(f"{key}.denoiser", f"takes away the noise that {name} was trained on")
    elif objective.sigma != section.sigma:
        yield LintWarning(
            f"{key}.sigma", f"{section.sigma:g} differs from the training sigma {objective.sigma:g}"
        )


def _levels(
    key: str, section: GaussianSettings, objective: ObjectiveSettings
) -> Iterator[LintWarning]:
    """Noise that the schedule knows, but that the denoiser was not trained on."""
    assert isinstance(objective, DenoiserTrainingSettings)
    low, high = objective.range or (0.0, 0.0)
    known = objective.full or section.sigma in objective.sigmas or low <= section.sigma <= high
    if not known:
        yield LintWarning(
            f"{key}.sigma", f"{section.sigma:g} is no noise that {section.denoiser} was trained on"
        )


def _ablations(
    key: str, section: AblationSettings, objective: ObjectiveSettings
) -> Iterator[LintWarning]:
    shape, size = trained_ablation(objective) or (None, None)
    if shape != section.kind:
        bands = "column bands" if section.kind == "columns" else section.kind
        yield LintWarning(
            f"{key}.model",
            f"{section.model} was not trained on {bands}: expect few certificates",
        )
    elif section.band and section.band != size:
        yield LintWarning(f"{key}.band", f"{section.band} differs from the training band {size}")
    if section.delta_rule != "exact":
        yield LintWarning(
            f"{key}.delta_rule",
            "paper_reference reproduces published tables; its certificates are not sound",
        )


def _strides(key: str, section: AblationSettings, width: int | None) -> Iterator[LintWarning]:
    swept = section.sweep.stride if section.sweep else []
    for stride in swept or [section.stride]:
        if width and width % stride:
            yield LintWarning(
                f"{key}.sweep.stride" if swept else f"{key}.stride",
                f"{stride} does not divide {width}: patches at the seam touch one band more",
            )


def _early_stops(key: str, section: AblationSettings, side: int | None) -> Iterator[LintWarning]:
    """Votes stop between micro-batches: one that holds them all has nothing to leave out."""
    from components.data.ablation import Ablations

    if side is None or not section.stop_early:
        return
    strides = (section.sweep.stride if section.sweep else []) or [section.stride]
    for stride in strides:
        size = (side, side)
        count = len(Ablations(kind=section.kind, image_size=size, band=1, stride=stride))
        if section.micro_batch >= count:
            yield LintWarning(
                f"{key}.stop_early",
                f"saves nothing: micro_batch {section.micro_batch} asks all {count} ablations of "
                f"stride {stride} at once; lower it or leave stop_early out",
            )


def _pairs(
    key: str, section: DoubleMaskingSettings, objective: ObjectiveSettings
) -> Iterator[LintWarning]:
    if trained_ablation(objective):
        yield LintWarning(
            f"{key}.model",
            f"{section.model} saw narrow ablations in training, these masks hide little",
        )


def _tokens(key: str, section: PatchSettings, trained: str) -> Iterator[LintWarning]:
    """Refusals come before training, not after it."""
    if section.token_policy in ("as_trained", trained):
        return
    if not section.allow_token_mismatch:
        raise CasemateError(
            f"{key}.token_policy",
            section.token_policy,
            f"is not how model {section.model} is trained ({trained}); add "
            "allow_token_mismatch: true to certify it so all the same",
        )
    yield LintWarning(
        f"{key}.token_policy", f"{section.token_policy} differs from the training's {trained}"
    )


def _tuning(recipe: Recipe) -> Iterator[LintWarning]:
    from pipelines.recipe.trials import tune_warnings

    for key, message in tune_warnings(recipe):
        yield LintWarning(key, message)
