"""Warnings about recipes that are valid but probably not intended."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from components.core.errors import CasemateError
from components.core.object_stores import is_uri
from components.data.places import RemotePath
from components.train.objectives.settings import ObjectiveSettings
from components.train.settings import TrainSettings
from pipelines.recipe.analysis import analysis_paths
from pipelines.recipe.check import check
from pipelines.recipe.check_networks import denoisers_on_disk, has_droppable_tokens
from pipelines.recipe.evaluation import evaluation_paths
from pipelines.recipe.facts import facts_of, is_here, spec_of, trained_model
from pipelines.recipe.gpus import local_gpus, unused_gpus
from pipelines.recipe.paths import named_paths
from pipelines.recipe.schema.recipe import Recipe

ABSENT = "is not on this machine: not checked"


@dataclass(frozen=True, slots=True)
class LintWarning:
    """A suspicious key, and why."""

    key: str
    message: str


def warnings_of(recipe: Recipe, *, num_gpus: float | None = None) -> list[LintWarning]:
    """All warnings of a recipe; one that cannot work is refused by the gate.

    `num_gpus`: of the cluster it will run on; None: of this machine if it runs here.
    """
    check(recipe)
    return [
        *_gpus(recipe, num_gpus),
        *_absent(recipe),
        *_stores(recipe),
        *_training(recipe),
        *_attacks(recipe),
        *_transfer(recipe),
        *_certificates(recipe),
        *_tuning(recipe),
    ]


def _gpus(recipe: Recipe, num_gpus: float | None) -> Iterator[LintWarning]:
    """GPUs that the recipe does not use."""
    if num_gpus is None:
        num_gpus = 0 if recipe.cluster.address else local_gpus()
    if found := unused_gpus(recipe, num_gpus):
        yield LintWarning(found.key, found.message)


def _absent(recipe: Recipe) -> Iterator[LintWarning]:
    """Folders that may exist where the recipe will run, but that cannot be checked here."""
    given = recipe.given_model()
    if given and not (given / "model.json").parent.is_dir():
        yield LintWarning("model.pretrained", f"{recipe.model.pretrained} {ABSENT}")
    for name, table in recipe.report.compare.items():
        if not Path(table.path).expanduser().is_file():
            yield LintWarning(f"report.compare.{name}.path", f"{table.path} {ABSENT}")
    for key, source in denoisers_on_disk(recipe):
        if not is_here(source):
            yield LintWarning(key, f"{source} {ABSENT}")
    for key, path in (*evaluation_paths(recipe), *analysis_paths(recipe)):
        if not is_uri(path) and not Path(path).expanduser().exists():
            yield LintWarning(key, f"{path} {ABSENT}")


def _stores(recipe: Recipe) -> Iterator[LintWarning]:
    """Objects that the recipe reads and that are not seen from here; a look takes seconds."""
    for named in named_paths(recipe):
        if is_uri(named.path) and not named.made:
            try:
                RemotePath.parse(named.path).check_reachable()
            except CasemateError as error:
                yield LintWarning(named.key, f"{error.value} {error.remedy}")


def _training(recipe: Recipe) -> Iterator[LintWarning]:
    if recipe.train is None:
        return
    for model in recipe.model_names():
        key = "train.objective" if model == "main" else f"train.variants.{model}.objective"
        objective, epochs = recipe.objective_of(model), recipe.epochs_of(model)
        yield from _adversarial(key, objective, epochs)
        if recipe.train.stop_on_leak and getattr(objective, "clean_forward", "") == "none":
            yield LintWarning(f"{key}.clean_forward", "none: label leaking is not detected")
        average = recipe.train.average
        if average and getattr(average, "start_epoch", 0) >= epochs:
            yield LintWarning(
                "train.average.start_epoch", f"leaves no epoch of model {model} to average"
            )
        if (
            objective.trained_ablation()
            and recipe.model.token_policy == recipe.model_of(model).token_policy == "mask"
            and has_droppable_tokens(recipe.model_of(model), facts_of(recipe))
        ):
            yield LintWarning(
                f"{recipe.model_key(model)}.token_policy",
                f"mask: `drop` trains and certifies model {model} several times faster",
            )
    yield from _rates(recipe.train)


def _adversarial(key: str, objective: ObjectiveSettings, epochs: int) -> Iterator[LintWarning]:
    if objective.attack_eps is not None and objective.attack_warmup_epochs >= epochs:
        yield LintWarning(
            f"{key}.eps_warmup_epochs",
            f"{objective.attack_warmup_epochs} of {epochs} epochs: full eps is never reached",
        )
    for field, message in objective.never_used(epochs):
        yield LintWarning(f"{key}.{field}", f"{message}: training ends before")


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
            for field, value, remedy in entry.weaknesses(section.eps):
                yield LintWarning(f"attack.{name}.attacks.{number}.{field}", f"{value} {remedy}")
        if all(entry.weak_alone for entry in section.attacks):
            kinds = " and ".join(sorted({entry.kind for entry in section.attacks}))
            yield LintWarning(
                f"attack.{name}.attacks", f"{kinds} alone overstates robustness; add pgd or apgd-ce"
            )
        if section.sanity is None and section.norm != "spatial":
            yield LintWarning(f"attack.{name}.sanity", "sanity checks are off")
        objectives = map(recipe.objective_of, section.models if recipe.train else [])
        trained = {o.attack_eps for o in objectives if o.attack_eps is not None}
        if section.norm == "linf" and trained and section.eps not in trained:
            yield LintWarning(
                f"attack.{name}.eps",
                f"{section.eps:g} differs from the training eps {sorted(trained)}",
            )


def _transfer(recipe: Recipe) -> Iterator[LintWarning]:
    """Models whose input size is not that of the data: no perturbation fits both."""
    how, facts = recipe.evaluate and recipe.evaluate.transfer, facts_of(recipe)
    for name, folder in how.models.items() if how and facts.side and not how.resample else ():
        spec = spec_of(Path(folder).expanduser()) or {}
        side = spec.get("image_size")
        if side and side != facts.side:
            yield LintWarning(
                f"evaluate.transfer.models.{name}",
                f"takes {side} pixels, the data have {facts.side}: no result between the two; "
                "set evaluate.transfer.resample: bilinear",
            )


def _certificates(recipe: Recipe) -> Iterator[LintWarning]:
    for name, section in recipe.certify.items():
        model = trained_model(recipe, section)
        if recipe.train is None or model is None:  # the folder of a given model has its policy
            continue
        for field, message in section.warnings(model):
            yield LintWarning(f"certify.{name}.{field}", message)


def _tuning(recipe: Recipe) -> Iterator[LintWarning]:
    from pipelines.recipe.trials import tune_warnings

    for key, message in tune_warnings(recipe):
        yield LintWarning(key, message)
