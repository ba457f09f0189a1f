"""The training of a recipe's model as a session, on any worker: needs no Ray."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from components.data.prepared import PreparedDataset, Split
from components.denoising.loading import is_source
from components.denoising.pretrained import load_pretrained_denoiser
from components.models.importing.match import ImportReport
from components.models.pixels import PixelModel
from components.models.pretrained import load_pretrained
from components.train.epoch import EpochPlan
from components.train.feed import Feeding, Worker
from components.train.objectives.base import Objective
from components.train.objectives.make import make_objective
from components.train.session import Session, initial_model
from components.train.settings import TrainSettings
from pipelines.recipe import build, denoisers
from pipelines.recipe.schema.recipe import Recipe


def make_session(
    recipe: Recipe,
    model: str,
    dataset: PreparedDataset,
    *,
    train: Split | None = None,
    fresh: bool = True,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
    wrap: Callable[[PixelModel], nn.Module] = lambda network: network,
    worker: Worker = Worker(),  # noqa: B008 - frozen
    feeding: Feeding = Feeding(),  # noqa: B008 - frozen
) -> Session:
    """The training of one of the recipe's models.

    `train` replaces the training split. Without `fresh`, pretrained weights are not loaded: a
    checkpoint will replace them.
    """
    assert recipe.train is not None
    network = initial_model(build.model_spec(recipe, dataset, model), seed=recipe.seed)
    if (start := recipe.model_of(model).pretrained) and fresh:
        load_start(network, start)
    memory, synthetic = recipe.train.memory_mb, recipe.data.synthetic
    return Session(
        network.to(device),
        objective_of(recipe, model),
        train=train or training_split(recipe.train, dataset, device=device),
        val=dataset.open_split("val", memory_mb=memory),
        synthetic=dataset.open_split("synthetic", memory_mb=memory) if synthetic else None,
        plan=EpochPlan(
            recipe.train,
            seed=recipe.seed,
            epochs=recipe.epochs_of(model),
            image_size=dataset.width,
            synthetic_ratio=synthetic.ratio if synthetic else 0.0,
        ),
        checkpoint_steps=recipe.cluster.checkpoint_steps,
        wrap=wrap,
        worker=worker,
        feeding=feeding,
    )


def training_split(
    train: TrainSettings,
    dataset: PreparedDataset,
    *,
    device: torch.device,
    limit: int | None = None,
) -> Split:
    """The first `limit` items: in memory if they fit, still encoded if the device decodes them."""
    if train.decode == "host":
        return dataset.open_split("train", memory_mb=train.memory_mb, limit=limit)
    return replace(dataset.lazy("train"), limit=limit, decoded_on=device)


def objective_of(recipe: Recipe, model: str) -> Objective:
    """The training objective of one of the recipe's models."""
    assert recipe.train is not None
    return make_objective(
        recipe.objective_of(model),
        label_smoothing=recipe.train.label_smoothing,
        start=denoisers.start_of(recipe, model),
    )


def load_start(network: PixelModel, source: str) -> ImportReport:
    """Load the weights that a model starts from: of a classifier, or of a denoiser on disk."""
    load = load_pretrained_denoiser if is_source(source) else load_pretrained
    return load(network, source)
