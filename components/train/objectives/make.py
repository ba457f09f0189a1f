"""From settings to objectives, through the registry or user code."""

from typing import Any

from components.train.objectives.base import Objective
from components.train.objectives.settings import (
    OBJECTIVES,
    ObjectiveSettings,
    UserObjectiveSettings,
)
from components.train.objectives.user import user_objective


def make_objective(
    settings: ObjectiveSettings, *, label_smoothing: float, start: str | None = None
) -> Objective:
    """The objective of these settings; `start`: denoiser weights that the model starts from."""
    if isinstance(settings, UserObjectiveSettings):
        return user_objective(settings, label_smoothing=label_smoothing)
    objective: Objective = implementation(settings).build(
        settings, label_smoothing=label_smoothing, start=start
    )
    return objective


def trained_for(settings: ObjectiveSettings, *, start: str | None = None) -> dict[str, Any]:
    """The record of the training in a saved model: settings without paths."""
    if isinstance(settings, UserObjectiveSettings):
        return settings.plain_fields()
    return implementation(settings).trained_for(settings, start=start)


def implementation(settings: ObjectiveSettings) -> type[Objective]:
    """The class behind the settings."""
    loaded: type[Objective] = OBJECTIVES[settings.kind].load()
    return loaded
