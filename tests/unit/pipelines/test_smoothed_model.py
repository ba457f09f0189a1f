"""The smoothed classifier behind a denoiser, logged to MLflow and loaded again."""

import mlflow
import numpy as np
import pytest
import torch

from components.certify.l2.deployed import SmoothedClassifier
from components.core.errors import CasemateError
from components.denoising.diffusion import Diffusion
from components.denoising.importing import denoiser_spec
from components.denoising.loading import load_denoised
from components.models.checkpoint import save_model
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from pipelines.recipe.schema.place import TrackingSection
from pipelines.runtime.storage import Storage
from pipelines.runtime.tracking import Tracker

SETTINGS = {
    "sigma": 0.25, "num_select": 20, "num_estimate": 200, "failure_prob": 0.01, "micro_batch": 20,
}  # fmt: skip
SAMPLER = {"kind": "ancestral", "num_steps": 2, "start": "exact"}


@pytest.fixture
def folders(tmp_path):
    torch.manual_seed(0)
    options = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}
    spec = ModelSpec("tiny_vit", 3, 1, 8, (0.5,), (0.5,), options=options)
    cleaner = denoiser_spec(
        architecture="tiny_unet", channels=1, image_size=8,
        options={"widths": [4, 8], "norm_groups": 2, "head_width": 4},
        diffusion=Diffusion.named("linear", 1000),
    )  # fmt: skip
    for name, own in (("classifier", spec), ("denoiser", cleaner)):
        save_model(tmp_path / name / "model", PixelModel(own).eval(), recipe_digest="")
    return {name: tmp_path / name / "model" for name in ("classifier", "denoiser")}


def test_what_is_served_answers_as_the_certified_function(tmp_path, folders, capfd):
    before = mlflow.get_tracking_uri()
    tracker = Tracker(TrackingSection(), storage=Storage.at(tmp_path))
    run = tracker.flow_run("x", "x", outbox=tmp_path / "outbox")
    shape = {"sampler": SAMPLER, "channels": 1, "image_size": 8}
    arguments = {"name": "x-smoothed", "alias": "candidate", **folders, "metadata": {"digest": "d"}}
    try:
        for settings in ({**SETTINGS, **shape}, {}):  # once, also resumed
            run.register_smoothed(settings=settings, **arguments)
        (only,) = tracker.client.search_model_versions("name = 'x-smoothed'")
        assert str(only.version) == "1"
        version = tracker.client.get_model_version_by_alias("x-smoothed", "candidate")
        served = mlflow.pyfunc.load_model(version.source)
    finally:
        mlflow.set_tracking_uri(before)
    assert "input example" not in capfd.readouterr().err
    ours = SmoothedClassifier(
        load_denoised(folders["classifier"], f"model:{folders['denoiser']}", sampler=SAMPLER,
                      image_size=8, sigma=0.25),
        num_classes=3, **SETTINGS,
    )  # fmt: skip
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    rows = served.predict(images.numpy(), params={"seed": 3})
    wanted = [ours.certify(image, seed=3) for image in images]
    assert rows["label"].tolist() == [answer.label for answer in wanted]
    assert rows["radius"].tolist() == [answer.radius for answer in wanted]
    assert rows["samples"].tolist() == [220, 220]
    hurried = served.predict(images.numpy()[:1], params={"seconds_per_image": 1e-9})
    assert hurried[["abstain", "samples"]].values.tolist() == [[True, 0]]
    for none in (-1.0, float("nan"), float("inf")):
        with pytest.raises(
            CasemateError, match=r"seconds_per_image: .* is not a number of seconds"
        ):
            served.predict(images.numpy()[:1], params={"seconds_per_image": none})
    with pytest.raises(mlflow.exceptions.MlflowException, match="enforce schema"):
        served.predict(np.zeros((1, 1, 4, 8), np.float32))
