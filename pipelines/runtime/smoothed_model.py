"""What MLflow runs to serve a certified classifier: loaded from the files beside it, no pickle.

MLflow copies this file and `components/` into the model and executes it when the model is loaded.
"""

import math
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext

from components.certify.l2.deployed import SmoothedClassifier
from components.certify.l2.noise import check_draws_alone
from components.core.arithmetic import EXACT, using
from components.core.errors import CasemateError
from components.core.precision import switches_of
from components.denoising.loading import load_denoised, source_of
from components.models.checkpoint import load_model

FIELDS = ("label", "abstain", "radius", "num_draws")  # of a prediction, in the order of columns
FRESH = -1  # as `seed`: a new one for every image


class SmoothedModel(PythonModel):  # type: ignore[misc]  # MLflow has no types
    """(B, C, H, W) float32 pixels in [0, 1] -> label, abstain, radius and samples of each image.

    Parameters: `seconds_per_image` (0: no limit, all draws), `num_estimate` (0: as certified) and
    `seed` (-1: fresh, as deployment needs it).
    """

    def load_context(self, context: PythonModelContext) -> None:
        """Load the networks that the model brought along."""
        self.settings = dict(context.model_config)
        networks = Path(context.artifacts["networks"])
        sampler, side = self.settings.pop("sampler"), self.settings.pop("image_size")
        self.shape = (self.settings.pop("channels"), side, side)
        if (networks / "denoiser").is_dir():
            self.classify: Any = load_denoised(
                networks / "classifier",
                source_of(networks / "denoiser"),
                sampler=sampler,
                image_size=side,
                sigma=self.settings["sigma"],
            )
        else:
            self.classify = load_model(networks / "classifier")
        check_draws_alone(self.classify, torch.zeros(0, *self.shape), sigma=self.settings["sigma"])

    def predict(
        self,
        context: PythonModelContext,
        model_input: np.ndarray,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """One row per image."""
        asked = {"seconds_per_image": 0.0, "num_estimate": 0, "seed": FRESH, **(params or {})}
        seconds = float(asked["seconds_per_image"])
        if not 0 <= seconds < math.inf:
            remedy = "is not a number of seconds; 0 means no limit"
            raise CasemateError("seconds_per_image", seconds, remedy)
        settings = dict(self.settings)
        if asked["num_estimate"]:
            settings["num_estimate"] = int(asked["num_estimate"])
        smoothed = SmoothedClassifier(
            self.classify, num_classes=self.classify.spec.num_classes, **settings
        )
        images = torch.from_numpy(np.ascontiguousarray(model_input, dtype=np.float32))
        if tuple(images.shape[1:]) != self.shape:
            found = "x".join(map(str, images.shape[1:]))
            remedy = f"(channels x height x width) are not {self.shape}"
            raise CasemateError("images", found, remedy)
        rows = []
        for image in images:
            seed = secrets.randbits(63) if asked["seed"] == FRESH else int(asked["seed"])
            with using(switches_of(smoothed.precision, EXACT)):  # as the votes of its certificate
                if seconds:
                    prediction = smoothed.certify_within(image, seconds=seconds, seed=seed)
                else:
                    prediction = smoothed.certify(image, seed=seed)
            rows.append([getattr(prediction, name) for name in FIELDS])
        return pd.DataFrame(rows, columns=["label", "abstain", "radius", "samples"])


set_model(SmoothedModel())
