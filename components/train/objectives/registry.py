"""All training objectives by name. To add one: its settings class, its file, and a line here."""

from typing import TYPE_CHECKING, Any

from components.core.registry import Registry
from components.train.objectives import settings as s

if TYPE_CHECKING:
    from components.train.objectives.base import Objective

OBJECTIVES = Registry("objective")
OBJECTIVES.add(s.StandardSettings, "components.train.objectives.standard:Standard")
OBJECTIVES.add(
    s.FgsmTrainingSettings, "components.train.objectives.adversarial:AdversarialTraining"
)
OBJECTIVES.add(s.PgdTrainingSettings, "components.train.objectives.adversarial:AdversarialTraining")
OBJECTIVES.add(s.TradesSettings, "components.train.objectives.trades:Trades")
OBJECTIVES.add(s.MartSettings, "components.train.objectives.mart:Mart")
OBJECTIVES.add(s.ColumnsTrainingSettings, "components.train.objectives.ablation:AblationTraining")
OBJECTIVES.add(s.AblationTrainingSettings, "components.train.objectives.ablation:AblationTraining")
OBJECTIVES.add(s.GaussianTrainingSettings, "components.train.objectives.noise:GaussianNoise")
OBJECTIVES.add(s.DenoiserTrainingSettings, "components.train.objectives.denoiser:DenoiserTraining")
OBJECTIVES.add(s.DenoisedTrainingSettings, "components.train.objectives.noise:DenoisedFineTuning")


def make_objective(
    settings: s.ObjectiveSettings, *, label_smoothing: float, start: str | None = None
) -> "Objective":
    """The objective of these settings; `start`: denoiser weights that the model starts from."""
    if isinstance(settings, s.UserObjectiveSettings):
        from components.train.objectives.user import user_objective

        return user_objective(settings, smoothing=label_smoothing)
    objective: Objective = implementation(settings).build(
        settings, label_smoothing=label_smoothing, start=start
    )
    return objective


def trained_for(settings: s.ObjectiveSettings, *, start: str | None = None) -> dict[str, Any]:
    """What a saved model tells of its training: settings without places on disk."""
    if isinstance(settings, s.UserObjectiveSettings):
        return settings.plain_fields()
    return implementation(settings).trained_for(settings, start=start)


def implementation(settings: s.ObjectiveSettings) -> "type[Objective]":
    """The class behind the settings."""
    loaded: type[Objective] = OBJECTIVES[settings.kind].load()
    return loaded
