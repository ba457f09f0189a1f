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
from components.core.user_code import UserEntry
from components.train.objectives.settings import (
    AdversarialSettings,
    DenoisedTrainingSettings,
    DenoiserTrainingSettings,
    GaussianTrainingSettings,
    ObjectiveSettings,
)
from components.train.settings import TrainSettings
from pipelines.recipe.check import check, denoisers_on_disk, has_droppable_tokens, trained_ablation
from pipelines.recipe.facts import facts_of, is_here, known_side
from pipelines.recipe.schema.recipe import Recipe

ABSENT = "is not on this machine: not checked"
FEWEST_STEPS: dict[type, int] = {
    PgdSettings: 10,
    ApgdSettings: 20,
    GamaSettings: 20,
    AutoAttackSettings: 100,
}


@dataclass(frozen=True, slots=True)
class LintWarning:
    """A key that deserves a second look, and why."""

    key: str
    message: str


def warnings_of(recipe: Recipe) -> list[LintWarning]:
    """All warnings of a recipe; one that cannot work is refused by the gate."""
    check(recipe)
    return [
        *_absent(recipe),
        *_training(recipe),
        *_attacks(recipe),
        *_certificates(recipe),
        *_tuning(recipe),
    ]


def _absent(recipe: Recipe) -> Iterator[LintWarning]:
    """Folders that may exist where the recipe will run, but that cannot be checked here."""
    given = recipe.given_model()
    if given and not given.is_dir():
        yield LintWarning("model.pretrained", f"{recipe.model.pretrained} {ABSENT}")
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
            yield LintWarning(f"{key}.clean_forward", "none: label leaking is not detected")
        average = recipe.train.average
        if average and getattr(average, "start_epoch", 0) >= epochs:
            yield LintWarning(
                "train.average.start_epoch", f"leaves no epoch of model {model} to average"
            )
        if (
            trained_ablation(objective)
            and recipe.model.token_policy == "mask"
            and has_droppable_tokens(recipe.model_of(model), facts_of(recipe))
        ):
            yield LintWarning(
                "model.token_policy",
                f"mask: `drop` trains and certifies model {model} several times faster",
            )
    yield from _rates(recipe.train)


def _adversarial(key: str, objective: AdversarialSettings, epochs: int) -> Iterator[LintWarning]:
    if objective.eps_warmup_epochs >= epochs:
        yield LintWarning(
            f"{key}.eps_warmup_epochs",
            f"{objective.eps_warmup_epochs} of {epochs} epochs: full eps is never reached",
        )
    if objective.awp and objective.awp.start_epoch >= epochs:
        yield LintWarning(
            f"{key}.awp.start_epoch", "weights are never perturbed: training ends before"
        )
    if objective.aas and objective.aas.every >= epochs:
        yield LintWarning(
            f"{key}.aas.every", "attention scales are never searched: training ends before"
        )


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
            yield LintWarning(f"attack.{name}.sanity", "sanity checks are off")
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


def _steps(key: str, entry: AttackSettings | UserEntry, eps: float | None) -> Iterator[LintWarning]:
    """Too few steps, or steps too short to cross the epsilon ball."""
    if isinstance(entry, AasSettings):
        yield from _steps(f"{key}.inner", entry.inner, eps)
    few = FEWEST_STEPS.get(type(entry))
    steps = getattr(entry, "num_steps", None)
    if few and steps and steps < few:
        yield LintWarning(
            f"{key}.num_steps", f"{steps} steps overstate robustness; use {few} or more"
        )
    if isinstance(entry, PgdSettings) and eps:
        step = entry.step_size or eps / 4
        if step * entry.num_steps < 2 * eps:
            yield LintWarning(
                f"{key}.step_size",
                f"{entry.num_steps} steps of {step:g} cannot cross the epsilon ball",
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
    if section.challenge and section.challenge.eps > section.reach:
        yield LintWarning(
            f"{key}.challenge.eps",
            "is above the largest certifiable radius: no certificate is challenged",
        )


def _noise_seen(
    key: str, section: GaussianSettings, objective: ObjectiveSettings
) -> Iterator[LintWarning]:
    """A classifier that gets other images than those it was trained on."""
    name, behind = section.model, section.denoiser is not None
    if not isinstance(objective, GaussianTrainingSettings | DenoisedTrainingSettings):
        if not behind:
            yield LintWarning(
                f"{key}.model",
                f"{name} was not trained on Gaussian noise: expect many abstentions",
            )
    elif isinstance(objective, DenoisedTrainingSettings) and not behind:
        yield LintWarning(f"{key}.denoiser", f"is missing, but {name} was trained behind one")
    elif isinstance(objective, GaussianTrainingSettings) and behind:
        yield LintWarning(f"{key}.denoiser", f"removes the noise that {name} was trained on")
    elif objective.sigma != section.sigma:
        yield LintWarning(
            f"{key}.sigma", f"{section.sigma:g} differs from the training sigma {objective.sigma:g}"
        )


def _levels(
    key: str, section: GaussianSettings, objective: ObjectiveSettings
) -> Iterator[LintWarning]:
    """Noise within the schedule that the denoiser was not trained on."""
    assert isinstance(objective, DenoiserTrainingSettings)
    low, high = objective.range or (0.0, 0.0)
    known = objective.full or section.sigma in objective.sigmas or low <= section.sigma <= high
    if not known:
        yield LintWarning(
            f"{key}.sigma",
            f"{section.sigma:g} is outside the noise that {section.denoiser} was trained on",
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
    """Votes stop between micro-batches: a single one that holds all ablations saves nothing."""
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
                f"saves nothing: micro_batch {section.micro_batch} computes all {count} ablations "
                f"of stride {stride} at once; lower it or leave stop_early out",
            )


def _pairs(
    key: str, section: DoubleMaskingSettings, objective: ObjectiveSettings
) -> Iterator[LintWarning]:
    if trained_ablation(objective):
        yield LintWarning(
            f"{key}.model",
            f"{section.model} was trained on narrow ablations, but these masks hide little",
        )


def _tokens(key: str, section: PatchSettings, trained: str) -> Iterator[LintWarning]:
    if section.token_policy not in ("as_trained", trained):
        message = f"{section.token_policy} differs from the training's {trained}"
        yield LintWarning(f"{key}.token_policy", message)


def _tuning(recipe: Recipe) -> Iterator[LintWarning]:
    from pipelines.recipe.trials import tune_warnings

    for key, message in tune_warnings(recipe):
        yield LintWarning(key, message)
