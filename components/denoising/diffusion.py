"""Schedule and parametrisation of a diffusion network.

Keys are those of diffusers' `scheduler_config.json`, which all its schedulers share, so the same
function reads folders of diffusers and our models.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from components.core.errors import CasemateError
from components.denoising.schedule import NoiseSchedule

KEY = "denoiser.scheduler"
PREDICTIONS = ("epsilon", "sample", "v_prediction")
# Schedule names in recipes -> settings of diffusers, as in the papers.
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},  # Nichol & Dhariwal 2021, eq. 17
    "linear": {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02},  # Ho et al. 2020
    "scaled-linear": {"beta_schedule": "scaled_linear", "beta_start": 8.5e-4, "beta_end": 0.012},
}


@dataclass(frozen=True, eq=False)
class Diffusion:
    """A variance-preserving diffusion model without its network.

    `clip` bounds estimates of clean images in [-1, 1] (None: no clipping); `time_scale` converts
    timesteps to the time input of the network, 1000 / T for improved-diffusion's rescaled time.
    """

    schedule: NoiseSchedule
    prediction: str = "epsilon"
    variance: str = "fixed_small"
    clip: float | None = 1.0
    time_scale: float = 1.0
    config: Mapping[str, Any] = field(default_factory=dict)  # what diffusers needs to rebuild it

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, time_scale: float = 1.0) -> "Diffusion":
        """From a scheduler config of diffusers; settings that would be ignored are errors."""
        from diffusers import DDPMScheduler  # takes a second to import; few recipes need it

        _check_config(config)
        given = {key: value for key, value in config.items() if value is not None}
        settings = {key: value for key, value in given.items() if not key.startswith("_")}
        try:
            scheduler = DDPMScheduler.from_config(settings)
        except (NotImplementedError, TypeError, ValueError, RuntimeError) as error:
            raise CasemateError(KEY, config.get("beta_schedule"), f"is unknown: {error}") from error
        own = scheduler.config
        # diffusers multiplies in float32; here its betas are multiplied in float64
        return cls(
            schedule=NoiseSchedule(scheduler.betas.double().numpy()),
            prediction=own.prediction_type,
            variance=own.variance_type,
            clip=own.clip_sample_range if own.clip_sample else None,
            time_scale=time_scale,
            config={key: value for key, value in dict(own).items() if not key.startswith("_")},
        )

    @classmethod
    def named(cls, schedule: str, num_timesteps: int, **settings: Any) -> "Diffusion":
        """A schedule by its name in recipes; predicts noise by default."""
        if schedule not in SCHEDULES:
            remedy = f"is unknown; choose one of {', '.join(SCHEDULES)}"
            raise CasemateError("denoiser.schedule", schedule, remedy)
        time_scale = settings.pop("time_scale", 1.0)
        config = {"num_train_timesteps": num_timesteps, **SCHEDULES[schedule], **settings}
        return cls.from_config(config, time_scale=time_scale)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for model.json."""
        return {"scheduler": dict(self.config), "time_scale": self.time_scale}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Diffusion":
        """The diffusion from the values of `to_dict`."""
        return cls.from_config(values["scheduler"], time_scale=values["time_scale"])

    def clean(self, output: Tensor, noisy: Tensor, abar: float) -> Tensor:
        """The estimate of u in [-1, 1] from a network's output on noisy = sqrt(abar) u + ... n.

        Ho et al. 2020, eq. 15 (noise); Salimans & Ho 2022, app. D (v). If there are twice as many
        channels, the second half is a variance and is not used.
        """
        output = output[:, : noisy.shape[1]]
        signal, noise = math.sqrt(abar), math.sqrt(1 - abar)
        if self.prediction == "epsilon":
            estimate = (noisy - noise * output).div_(signal)
        elif self.prediction == "v_prediction":
            estimate = signal * noisy - noise * output
        else:
            estimate = output
        return estimate if self.clip is None else estimate.clamp(-self.clip, self.clip)

    def target(self, clean: Tensor, noise: Tensor, abar: Tensor) -> Tensor:
        """Training target of the network; `abar` is (B, 1, 1, 1)."""
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "v_prediction":
            return abar.sqrt() * noise - (1 - abar).sqrt() * clean
        return clean

    def times(self, timesteps: Tensor) -> Tensor:
        """(B,) float32: time input of the network for these timesteps."""
        return (timesteps.double() * self.time_scale).to(torch.float32)


def _check_config(config: Mapping[str, Any]) -> None:
    if "beta_schedule" not in config and "trained_betas" not in config:
        remedy = "has no betas: only variance-preserving schedules are supported"
        raise CasemateError(KEY, config.get("_class_name", "configuration"), remedy)
    if config.get("use_flow_sigmas"):
        raise CasemateError(KEY, "use_flow_sigmas: true", "is not supported: levels need betas")
    if config.get("thresholding"):
        raise CasemateError(KEY, "thresholding: true", "is not supported; set clip_sample instead")
    prediction = config.get("prediction_type", "epsilon")
    if prediction not in PREDICTIONS:
        remedy = f"is unknown; choose one of {', '.join(PREDICTIONS)}"
        raise CasemateError(f"{KEY}.prediction_type", prediction, remedy)
