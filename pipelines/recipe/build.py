"""Recipe sections to components: the one place where settings become arguments."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from components.core.errors import CasemateError
from components.core.settings import plain
from components.data.augment import Augmentation, Mixing
from components.data.prepared import PreparedDataset
from components.data.settings import AugmentSettings
from components.denoising.samplers import OneShot
from components.denoising.settings import is_on_disk
from components.models.pretrained import TIMM, check_descent, read_parent
from components.models.spec import ModelSpec
from components.train.averaging import AverageSettings
from components.train.epoch import EpochSettings
from components.train.objectives.aas import AasTraining, ScaleAscent
from components.train.objectives.ablation import AblationTraining
from components.train.objectives.adversarial import AdversarialTraining
from components.train.objectives.awp import Awp
from components.train.objectives.base import Objective
from components.train.objectives.denoiser import DenoiserTraining
from components.train.objectives.inner import AdversarialObjective, InnerAttack
from components.train.objectives.leak import LeakDetector
from components.train.objectives.mart import Mart
from components.train.objectives.noise import DenoisedFineTuning, GaussianNoise
from components.train.objectives.settings import (
    AblationTrainingSettings,
    AdversarialSettings,
    ColumnsTrainingSettings,
    DenoisedTrainingSettings,
    DenoiserTrainingSettings,
    FgsmTrainingSettings,
    GaussianTrainingSettings,
    MartSettings,
    PgdTrainingSettings,
    StandardSettings,
    TradesSettings,
)
from components.train.objectives.standard import Standard
from components.train.objectives.trades import Trades
from components.train.optim import OptimizerSettings
from components.train.schedules import RateSchedule, epsilon_at, peak_rate
from components.train.selection import Selection
from components.train.settings import StepSettings, TrainSettings
from components.train.validation import TrainingAttack, ValidationAttack
from pipelines.recipe import denoisers
from pipelines.recipe.load import with_values
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
        denoisers.check_start(start, channels=dataset.channels)
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
        trained_for=denoisers.trained_for(recipe.objective_of(model), start),
    )
    if parent:
        check_descent(spec, parent)
    return spec


def on_this_machine(recipe: Recipe, inputs: Mapping[str, Path] = MappingProxyType({})) -> Recipe:
    """The recipe with absolute paths, since workers start in other folders.

    Denoisers that it trains are named by their folders, as far as `inputs` holds them.
    """
    changes: dict[str, str] = {}
    parts: list[tuple[str, Any]] = [("model", recipe.model)]
    objectives: list[tuple[str, Any]] = []
    if recipe.train:
        variants = recipe.train.variants.items()
        parts += [(f"train.variants.{name}.model", v.model) for name, v in variants if v.model]
        objectives = [("train.objective", recipe.train.objective)]
        objectives += [(f"train.variants.{name}.objective", v.objective) for name, v in variants]
    for key, section in parts:
        if section.pretrained and is_on_disk(section.pretrained):
            changes[f"{key}.pretrained"] = denoisers.placed(section.pretrained, {})
        elif section.pretrained not in (None, TIMM):
            start = Path(section.pretrained).expanduser().absolute()
            changes[f"{key}.pretrained"] = str(start)
    for key, section in objectives:
        if isinstance(section, DenoisedTrainingSettings):
            changes[f"{key}.denoiser"] = denoisers.placed(section.denoiser, inputs)
    return with_values(recipe, changes) if changes else recipe


def objective(recipe: Recipe, model: str) -> Objective:
    """The training objective of one of the recipe's models."""
    assert recipe.train is not None
    smoothing = recipe.train.label_smoothing
    match recipe.objective_of(model):
        case AdversarialSettings() as o:
            return _with_wrappers(adversarial_objective(o, smoothing), o)
        case ColumnsTrainingSettings() as o:
            return AblationTraining(o.band, smoothing)
        case AblationTrainingSettings() as o:
            return AblationTraining(o.size, smoothing, o.shape, o.position)
        case GaussianTrainingSettings() as o:
            return GaussianNoise(o.sigma, smoothing)
        case DenoiserTrainingSettings() as o:
            known = denoisers.diffusion(o, denoisers.start_of(recipe, model))
            return DenoiserTraining(known, tuple(o.sigmas), o.range, o.sampling)
        case DenoisedTrainingSettings() as o:
            return DenoisedFineTuning(OneShot(denoisers.denoiser(o)), o.sigma, smoothing)
        case StandardSettings() as o:
            return Standard(smoothing, o.criterion)


def adversarial_objective(o: AdversarialSettings, smoothing: float) -> AdversarialObjective:
    """An objective with a training attack, without what may be wrapped around it."""
    match o:
        case FgsmTrainingSettings() | PgdTrainingSettings():
            return AdversarialTraining(
                inner_attack(o), smoothing, o.attack_target, o.clean_forward, o.clean_every
            )
        case TradesSettings():
            return Trades(inner_attack(o), o.beta, smoothing, o.passes)
        case MartSettings():
            return Mart(inner_attack(o), o.beta, o.passes)
    raise ValueError(f"no objective is built from {type(o).__name__}")


def inner_attack(section: AdversarialSettings) -> InnerAttack:
    """The training attack of an objective, with its rise of epsilon."""
    return InnerAttack(
        eps=section.eps,
        num_steps=section.num_steps,
        step_size=section.step_size,
        step_rule=section.step_rule,
        start=section.start,
        warmup=partial(
            epsilon_at,
            final=section.eps,
            warmup_epochs=section.eps_warmup_epochs,
            zero_epochs=section.eps_zero_epochs,
            shape=section.eps_shape,
        ),
        warmup_per=section.eps_per,
    )


def _with_wrappers(inner: Objective, section: AdversarialSettings) -> Objective:
    """Perturbed weights next to the objective, attention scales around both."""
    if section.awp:
        inner = Awp(inner, section.awp.gamma, section.awp.start_epoch)
    if section.aas:
        search = ScaleAscent(**plain(section.aas, exclude={"every", "mode", "max_batches"}))
        inner = AasTraining(
            inner, section.aas.every, section.aas.mode, section.aas.max_batches, search
        )
    return inner


def leak_detector(recipe: Recipe, model: str) -> LeakDetector | None:
    """What stops a training on attacked images that are easier than clean ones."""
    assert recipe.train is not None
    own = recipe.objective_of(model)
    if recipe.train.stop_on_leak and isinstance(own, FgsmTrainingSettings | PgdTrainingSettings):
        return LeakDetector(num_steps=own.num_steps)
    return None


def augmentation(section: AugmentSettings, *, size: int) -> Augmentation:
    """Per-item changes of training images that end at the side `size`."""
    return Augmentation(
        size=size,
        crop=section.crop,
        pad=section.pad,
        scale=section.scale,
        ratio=section.ratio,
        interpolation=section.interpolation,
        flip=section.flip,
        rand_augment=section.rand_augment,
        jitter=section.jitter,
        rotation=section.rotation,
        erase_prob=section.erase_prob,
        clean_first=section.clean_copy,
    )


def mixing(section: AugmentSettings) -> Mixing | None:
    """MixUp and CutMix, where one of them is on."""
    if not section.mixup and not section.cutmix:
        return None
    return Mixing(
        mixup_alpha=section.mixup,
        cutmix_alpha=section.cutmix,
        prob=section.mix_prob,
        switch_prob=section.mix_switch,
        mode=section.mix_mode,
    )


def epoch_settings(recipe: Recipe, model: str, dataset: PreparedDataset) -> EpochSettings:
    """Optimisation settings of one of the recipe's models on a prepared dataset."""
    t = recipe.train
    assert t is not None
    synthetic = recipe.data.synthetic
    return EpochSettings(
        seed=recipe.seed,
        epochs=recipe.epochs_of(model),
        batch_size=t.batch_size,
        learning_rate=peak_rate(t.learning_rate, batch_size=t.batch_size, rule=t.rate_rule),
        warmup_epochs=t.warmup_epochs,
        clip_norm=t.clip_norm,
        augmentation=augmentation(t.augment, size=dataset.width),
        mixing=mixing(t.augment),
        smoothing=t.label_smoothing,
        num_copies=t.augment.copies,
        synthetic_ratio=synthetic.ratio if synthetic else 0.0,
        schedule=rate_schedule(t, epochs=recipe.epochs_of(model)),
        micro_batch=t.micro_batch,
        precision=t.precision,
    )


def rate_schedule(section: TrainSettings, *, epochs: int) -> RateSchedule:
    """The shape of the learning rate over the epochs of one model."""
    own = plain(section.schedule, exclude={"every", "milestones"})
    if isinstance(section.schedule, StepSettings):
        every = section.schedule.every
        given = section.schedule.milestones if every is None else range(every, epochs, every)
        own["milestones"] = tuple(given)
    return RateSchedule(warmup_start=section.warmup_start, **own)


def optimizer_settings(section: TrainSettings) -> OptimizerSettings:
    return OptimizerSettings(weight_decay=section.weight_decay, **plain(section.optimizer))


def session_settings(recipe: Recipe, model: str, dataset: PreparedDataset) -> dict[str, Any]:
    """The keyword arguments of a `Session` that a recipe decides, but for data and place."""
    t = recipe.train
    assert t is not None
    return {
        "settings": epoch_settings(recipe, model, dataset),
        "optimizer": optimizer_settings(t),
        "val_items": t.val_items,
        "val_attack": validation_attack(recipe, model),
        "average": AverageSettings(**plain(t.average)) if t.average else None,
        "selection": Selection(t.select, t.patience),
        "leak": leak_detector(recipe, model),
        "checkpoint_steps": recipe.cluster.checkpoint_steps,
    }


def validation_eps(recipe: Recipe, model: str) -> float | None:
    """Epsilon of the validation attack: as written, else the objective's own, else no attack."""
    assert recipe.train is not None
    own = recipe.objective_of(model)
    return recipe.train.val_eps or (own.eps if isinstance(own, AdversarialSettings) else None)


def validation_attack(recipe: Recipe, model: str) -> ValidationAttack | TrainingAttack | None:
    """The attack on validation items after every epoch, if there is one."""
    train = recipe.train
    assert train is not None
    eps = validation_eps(recipe, model)
    if eps is None:
        return None
    if train.val_attack != "train":
        return ValidationAttack(eps, train.val_steps, train.val_attack)
    own = recipe.objective_of(model)
    assert isinstance(own, AdversarialSettings)  # a train section of others is refused
    full: dict[str, Any] = {"eps": eps, "eps_warmup_epochs": 0, "eps_zero_epochs": 0}
    return TrainingAttack(adversarial_objective(replace(own, **full), 0.0))


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
