"""Denoisers that start from weights on disk: `model.pretrained: diffusers:PATH`."""

from dataclasses import replace

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DModel

from components.core.errors import CasemateError
from components.data.prepared import PreparedDataset
from components.denoising.loading import load_denoiser
from components.models.checkpoint import save_model
from components.models.networks.unet import TimedUNet
from components.train.objectives.denoiser import diffusion_of
from components.train.objectives.settings import DenoiserTrainingSettings
from pipelines.recipe import build
from pipelines.recipe.load import parse
from pipelines.stages.train.session import make_session
from pipelines.stages.train.steps import model_identity

UNET = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As diffusers saves a pipeline: v prediction, a linear schedule."""
    path = tmp_path_factory.mktemp("denoiser")
    torch.manual_seed(3)
    UNet2DModel(sample_size=8, in_channels=1, out_channels=1, **UNET).save_pretrained(path / "unet")
    scheduler = DDPMScheduler(num_train_timesteps=1000, prediction_type="v_prediction")
    scheduler.save_pretrained(path / "scheduler")
    return path


def recipe_of(start, *, objective=None, **model):
    section = {"architecture": "unet", "pretrained": start, **model}
    levels = {"kind": "denoiser", "range": [0, 0.5], "schedule": "linear", "num_timesteps": 1000}
    variant = {"objective": {**levels, **(objective or {})}, "model": section}
    return parse(
        {"name": "x", "data": {"source": "digits"}, "train": {"variants": {"cleaner": variant}}},
        source="x",
    )


def test_training_starts_from_the_weights_of_the_folder(folder, prepared):
    dataset = PreparedDataset.open(prepared)
    recipe = build.with_absolute_paths(recipe_of(f"diffusers:{folder}"))
    session = make_session(recipe, "cleaner", dataset)
    assert isinstance(session.model.net, TimedUNet)
    theirs = UNet2DModel.from_pretrained(folder / "unet").state_dict()
    ours = session.model.net.unet.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert session.objective.diffusion.prediction == "v_prediction"
    trained_for = session.model.spec.trained_for
    assert trained_for["diffusion"]["scheduler"]["prediction_type"] == "v_prediction"


SCHEDULERS = {
    "other-betas": {"beta_schedule": "linear", "beta_end": 0.03},
    "scaled": {"beta_schedule": "scaled_linear", "beta_start": 8.5e-4, "beta_end": 0.012},
    "trained": {"trained_betas": [0.001 * 1.1**t for t in range(50)], "num_train_timesteps": 50},
}


def start_with(folder, place, scheduler):
    (place / "unet").symlink_to(folder / "unet")
    DDPMScheduler(**SCHEDULERS[scheduler]).save_pretrained(place / "scheduler")
    return f"diffusers:{place}"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_training_can_take_the_schedule_of_the_folder(scheduler, folder, prepared, tmp_path):
    recipe = recipe_of(
        start_with(folder, tmp_path, scheduler),
        objective={"schedule": "pretrained", "num_timesteps": 4000, "range": [0.05, 0.1]},
    )
    session = make_session(
        build.with_absolute_paths(recipe), "cleaner", PreparedDataset.open(prepared)
    )
    betas = DDPMScheduler(**SCHEDULERS[scheduler]).betas.double().numpy()
    assert (session.objective.diffusion.schedule.betas == betas).all()
    save_model(tmp_path / "model", session.model, recipe_digest="none")
    kept = load_denoiser(f"model:{tmp_path / 'model'}")  # what certificates and verify read
    assert (kept.diffusion.schedule.betas == betas).all()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_another_schedule_is_refused_by_what_differs(scheduler, folder, prepared, tmp_path):
    recipe = recipe_of(start_with(folder, tmp_path, scheduler))
    words = {
        "other-betas": "linear, 1000 timesteps, betas 0.0001 to 0.03;",
        "scaled": "scaled_linear, 1000 timesteps, betas 0.00085 to 0.012;",
        "trained": "trained_betas, 50 timesteps, betas 0.001 to 0.1067;",
    }
    with pytest.raises(CasemateError, match="schedule: pretrained trains with that one") as told:
        build.model_spec(recipe, PreparedDataset.open(prepared), "cleaner")
    line = str(told.value)
    assert "schedule: linear, 1000 timesteps, betas 0.0001 to 0.02 is not" in line
    assert words[scheduler] in line


def test_the_schedule_of_weights_needs_weights_and_their_number(folder):
    usual = DenoiserTrainingSettings(kind="denoiser", full=True)
    assert (usual.schedule, usual.num_timesteps) == ("cosine", 4000)  # fingerprints hold them
    theirs = replace(usual, schedule="pretrained")
    with pytest.raises(CasemateError, match=r"schedule: pretrained needs model\.pretrained"):
        diffusion_of(theirs, None)
    assert len(diffusion_of(theirs, f"diffusers:{folder}").schedule) == 1000
    other = replace(theirs, num_timesteps=500)
    with pytest.raises(CasemateError, match=r"num_timesteps: 500 is not the number of .*, 1000"):
        diffusion_of(other, f"diffusers:{folder}")


def test_the_fingerprint_follows_the_weights_not_their_place(folder, tmp_path):
    moved = tmp_path / "moved"
    moved.symlink_to(folder)
    here, there = (
        model_identity(recipe_of(f"diffusers:{path}").model_of("cleaner"))
        for path in (folder, moved)
    )
    assert here == there
    assert str(folder) not in str(here)


def test_starts_that_do_not_fit_are_refused(folder, prepared, tmp_path):
    dataset = PreparedDataset.open(prepared)
    other = recipe_of(f"diffusers:{folder}", objective={"schedule": "cosine"})
    with pytest.raises(CasemateError, match="is not the schedule of"):
        build.model_spec(other, dataset, "cleaner")
    with pytest.raises(CasemateError, match="is not a folder"):
        build.model_spec(recipe_of(f"diffusers:{tmp_path / 'none'}"), dataset, "cleaner")
    wide = recipe_of(f"diffusers:{folder}", options={**UNET, "block_out_channels": [16, 16]})
    with pytest.raises(CasemateError, match=r"leave out model\.options"):
        make_session(wide, "cleaner", dataset)
    with pytest.raises(CasemateError, match="cannot start a denoiser; write diffusers:PATH"):
        recipe_of("timm")
    values = {"name": "x", "data": {"source": "digits"}, "train": {}}
    with pytest.raises(CasemateError, match="cannot start a classifier"):
        parse({**values, "model": {"pretrained": f"diffusers:{folder}"}}, source="x")
