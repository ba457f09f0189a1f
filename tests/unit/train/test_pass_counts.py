"""What the planner counts for a training is what a real one passes through its network.

Every registered objective is held to it: one that is added is tested here without a change.
"""

from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from components.core.pass_counts import NO_PASSES, TRAINED, PassCounts
from components.denoising.diffusion import Diffusion
from components.models.counting import counted_passes
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from components.train.epoch import EpochPlan, epoch_batches, train_epoch
from components.train.feed import Feeding, TrainingSet, Worker
from components.train.objectives.base_settings import AasTrainingSettings, AwpSettings
from components.train.objectives.denoiser import DenoiserTraining
from components.train.objectives.make import make_objective
from components.train.objectives.noise import DenoisedFineTuning
from components.train.objectives.settings import OBJECTIVES
from components.train.session import initial_model
from components.train.validation import validation_score
from tests.unit.train.conftest import SETTINGS, SIDE
from tests.unit.train.test_objectives_registry import example

COSINE = Diffusion.named("cosine", 4000)
ADVERSARIAL = [kind for kind in OBJECTIVES if hasattr(OBJECTIVES[kind].settings, "outer_counts")]
ATTACKED = [kind for kind in ADVERSARIAL if hasattr(OBJECTIVES[kind].settings, "clean_every")]
CASES = [
    *((kind, 0, {}) for kind in OBJECTIVES),
    *((kind, 1, {"num_steps": 3}) for kind in ADVERSARIAL),
    *((kind, 0, {"eps_warmup_epochs": 2}) for kind in ADVERSARIAL),
    *((kind, 0, {"eps_warmup_epochs": 2, "eps_per": "step"}) for kind in ADVERSARIAL),
    *((kind, 1, {"awp": AwpSettings(start_epoch=1)}) for kind in ADVERSARIAL),
    *((kind, 0, {"awp": AwpSettings(start_epoch=1)}) for kind in ADVERSARIAL),
    *((kind, 0, {"clean_forward": "none"}) for kind in ATTACKED),
    *((kind, 0, {"clean_forward": "train_stats"}) for kind in ATTACKED),
    *((kind, 0, {"clean_every": 2, "awp": AwpSettings()}) for kind in ATTACKED),
    ("trades", 0, {"passes": "separate"}),
    ("mart", 0, {"passes": "separate"}),
    ("denoiser", 0, {"full": False, "sigmas": (0.25, 0.5)}),
    ("denoiser", 0, {"full": False, "range": (0.0, 0.5)}),
]


def objective_of(settings):
    if settings.kind == "denoiser":
        return DenoiserTraining(settings, diffusion=COSINE)
    if settings.kind == "denoised":
        identity = lambda noisy, sigma, draws: noisy  # noqa: E731
        return DenoisedFineTuning(settings, denoise=identity, label_smoothing=0.0)
    return make_objective(settings, label_smoothing=0.0)


def model_for(settings, spec) -> PixelModel:
    if settings.kind == "denoiser":
        spec = replace(spec, architecture="tiny_unet", token_policy="mask", options={})
    return initial_model(spec, seed=0)


def trained(settings, spec, split):
    """(model, plan, data, objective) of one training."""
    val_eps = None if settings.is_denoiser else SETTINGS.val_eps
    train = replace(SETTINGS, objective=settings, val_eps=val_eps)
    model, objective = model_for(settings, spec), objective_of(settings)
    objective.prepare(model)
    plan = EpochPlan(train, seed=7, epochs=4, image_size=SIDE)
    return model, plan, TrainingSet(split), objective


@pytest.mark.parametrize(("kind", "epoch", "changes"), CASES, ids=str)
def test_steps_and_validation_pass_as_often_as_counted(
    toy_spec, train_split, val_split, kind, epoch, changes
):
    settings = replace(example(kind), **changes)
    model, plan, data, objective = trained(settings, toy_spec, train_split)
    num_steps = plan.batches(data).num_batches
    with counted_passes(model) as seen:
        train_epoch(model, model, data, objective, plan.updater(model), plan=plan, epoch=epoch,
                    worker=Worker())  # fmt: skip
    num_items = num_steps * plan.train.batch_size  # an incomplete last batch is left out
    counted = num_items * settings.epoch_counts(epoch, num_steps=num_steps)
    assert_equal(seen.counts, counted)
    with counted_passes(model) as seen:
        validation_score(model, val_split, objective, seed=7)
    assert_equal(seen.counts, len(val_split) * settings.validation_counts())


def assert_equal(found: PassCounts, counted: PassCounts):
    for name in PassCounts.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(counted, name)), name


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_the_training_attack_passes_as_often_as_counted(toy_spec, new_batch, kind):
    settings = example(kind)
    if hasattr(settings, "eps_warmup_epochs"):
        settings = settings.without_warmup(settings.eps)
    model, objective, batch = model_for(settings, toy_spec), objective_of(settings), new_batch()
    with counted_passes(model) as seen:
        objective.craft(model, batch)
    assert_equal(seen.counts, len(batch.images) * settings.craft_counts())


@pytest.mark.parametrize("max_batches", [None, 2])
@pytest.mark.parametrize("mode", ["replace", "augment"])
def test_searches_of_scales_pass_as_often_as_counted(train_split, mode, max_batches):
    aas = AasTrainingSettings(every=2, mode=mode, objective="ce", batch_size=4, num_steps=3,
                              max_batches=max_batches)  # fmt: skip
    settings = replace(example("pgd"), aas=aas, num_steps=2)
    shape = {"img_size": SIDE, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    net = VisionTransformer(**shape, in_chans=1, num_classes=2)
    spec = ModelSpec("tiny_vit", 2, 1, SIDE, (0.5,), (0.5,))
    model, objective = PixelModel(spec, net=net), objective_of(settings)
    objective.prepare(model)
    plan = EpochPlan(replace(SETTINGS, objective=settings), seed=7, epochs=4, image_size=SIDE)
    data = TrainingSet(train_split)
    num_steps = plan.batches(data).num_batches
    for epoch in (0, 1, 2):
        counted = settings.search_counts(epoch, num_steps=num_steps, batch_size=8)
        assert (counted != NO_PASSES) == objective.searches(epoch) == (epoch == 2)
        trains = settings.epoch_counts(epoch, num_steps=num_steps) != NO_PASSES
        assert trains == objective.trains(epoch)
    batches = epoch_batches(data, model, plan=plan, epoch=2, worker=Worker(), feeding=Feeding())
    with counted_passes(model) as seen, batches:
        objective.begin_epoch(model, 2, batches)
    assert_equal(seen.counts, counted)


@pytest.mark.parametrize(
    ("kind", "steps", "thirds"), [("fgsm", 1, 5), ("pgd", 10, 23), ("trades", 10, 27)]
)
def test_published_units(kind, steps, thirds):
    """FGSM 5/3, PGD-K (2K + 3)/3 and TRADES-K (2K + 7)/3 of a plain step."""
    settings = replace(example(kind), num_steps=steps)
    if kind != "trades":
        settings = replace(settings, clean_forward="none")
    counts = settings.epoch_counts(0, num_steps=5)
    assert counts.cost / TRAINED.cost == pytest.approx(thirds / 3)


def test_frozen_weights_leave_the_gradient_of_the_pixels():
    model, x = torch.nn.Linear(2, 2), torch.ones(2, 2, requires_grad=True)
    with counted_passes(model) as seen:
        model(torch.ones(3, 2)).sum().backward()
        model.requires_grad_(requires_grad=False)
        model(x).sum().backward()
    assert seen.counts == PassCounts(forward=5, to_weights=3, to_pixels=2)
