"""All training objectives by name. To add one: its settings class, its file, and a line here."""

from components.core.registry import Registry
from components.train.objectives import settings as s

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
