"""Recipe sections to components: the one place where settings become arguments."""

import torch

from components.core.errors import CasemateError
from components.data.augment import Augmentation, Mixing
from components.data.prepared import PreparedDataset
from components.models.spec import ModelSpec
from components.train.epoch import EpochSettings
from components.train.objectives.ablation import ColumnAblation
from components.train.objectives.adversarial import FgsmTraining
from components.train.objectives.base import Objective
from components.train.objectives.noise import GaussianNoise
from components.train.objectives.standard import Standard
from pipelines import sections as s
from pipelines.recipe import Recipe


def model_spec(recipe: Recipe, dataset: PreparedDataset, model: str) -> ModelSpec:
    """The spec of one of the recipe's models on a prepared dataset."""
    if dataset.height != dataset.width:
        raise CasemateError(
            "data.image_size",
            f"{dataset.height}x{dataset.width}",
            "is not square; set data.image_size",
        )
    section = recipe.model
    for key, values in (("mean", section.mean), ("std", section.std)):
        if values is not None and len(values) != dataset.channels:
            raise CasemateError(
                f"model.{key}", values, f"needs {dataset.channels} entries, one per channel"
            )
    half = (0.5,) * dataset.channels
    return ModelSpec(
        architecture=section.architecture,
        num_classes=len(dataset.classes),
        channels=dataset.channels,
        image_size=dataset.width,
        upsample=section.upsample,
        upsample_mode=section.upsample_mode,
        token_policy=section.token_policy,
        mean=tuple(section.mean or half),
        std=tuple(section.std or half),
        options=section.options,
        trained_for=recipe.objective_of(model).model_dump(),
    )


def objective(recipe: Recipe, model: str) -> Objective:
    """The training objective of one of the recipe's models."""
    assert recipe.train is not None
    smoothing = recipe.train.label_smoothing
    match recipe.objective_of(model):
        case s.FgsmObjective() as o:
            return FgsmTraining(o.eps, o.num_steps, o.eps_warmup_epochs, smoothing)
        case s.ColumnsObjective() as o:
            return ColumnAblation(o.band, smoothing)
        case s.GaussianObjective() as o:
            return GaussianNoise(o.sigma, smoothing)
        case s.StandardObjective() as o:
            return Standard(smoothing, o.criterion)


def augmentation(section: s.AugmentSection, *, size: int) -> Augmentation:
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


def mixing(section: s.AugmentSection) -> Mixing | None:
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
        learning_rate=t.learning_rate,
        warmup_epochs=t.warmup_epochs,
        clip_norm=t.clip_norm,
        augmentation=augmentation(t.augment, size=dataset.width),
        mixing=mixing(t.augment),
        smoothing=t.label_smoothing,
        num_copies=t.augment.copies,
        synthetic_ratio=synthetic.ratio if synthetic else 0.0,
    )


def validation_eps(recipe: Recipe, model: str) -> float | None:
    """Epsilon of the validation attack: as written, else the objective's own, else no attack."""
    assert recipe.train is not None
    own = recipe.objective_of(model)
    return recipe.train.val_eps or (own.eps if isinstance(own, s.FgsmObjective) else None)


def actor_device(cluster: s.ClusterSection) -> str:
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
