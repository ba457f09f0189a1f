"""Denoisers of a recipe: their noise levels, their places, and what models remember of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.core.errors import CasemateError
from components.denoising.denoiser import Denoiser
from components.denoising.diffusion import Diffusion
from components.denoising.loading import load_denoiser, source_digest
from pipelines import sections as s


def diffusion(section: s.DenoiserObjective) -> Diffusion:
    """The noise levels of a denoiser that a recipe trains."""
    return Diffusion.named(section.schedule, section.num_timesteps)


def denoiser(section: s.DenoisedObjective) -> Denoiser:
    """The denoiser that a classifier is trained behind, once `placed` has named its folder."""
    if not s.is_on_disk(section.denoiser):
        remedy = "is not trained yet; name a denoiser on disk: diffusers:PATH or model:PATH"
        raise CasemateError("train.objective.denoiser", section.denoiser, remedy)
    loaded = load_denoiser(section.denoiser)
    loaded.diffusion.schedule.check(section.sigma)
    return loaded


def placed(name: str, inputs: Mapping[str, Path]) -> str:
    """A denoiser by the absolute path of its folder, if it is on disk or among the inputs."""
    if s.is_on_disk(name):
        kind, _, path = name.partition(":")
        return f"{kind}:{Path(path).expanduser().absolute()}"
    trained = inputs.get(f"train.{name}")
    return f"model:{(trained / 'model').absolute()}" if trained else name


def trained_for(section: s.Objective) -> dict[str, Any]:
    """What a model remembers of its objective: no place on disk, and the levels of a denoiser."""
    values = section.model_dump()
    if isinstance(section, s.DenoiserObjective):
        values["diffusion"] = diffusion(section).to_dict()
    if isinstance(section, s.DenoisedObjective) and s.is_on_disk(section.denoiser):
        values["denoiser"] = source_digest(section.denoiser)
    return values
