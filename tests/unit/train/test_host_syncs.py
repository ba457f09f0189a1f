"""A training step never makes the host wait for the device; figures are read now and then."""

from dataclasses import replace

import pytest
import torch

from components.train.epoch import EpochPlan, _gradients
from components.train.objectives.base_settings import AwpSettings
from components.train.objectives.make import make_objective
from components.train.objectives.settings import (
    FgsmTrainingSettings,
    GaussianTrainingSettings,
    MartSettings,
    PgdTrainingSettings,
    StandardSettings,
    TradesSettings,
)
from components.train.session import initial_model
from components.train.settings import SgdSettings
from components.train.tally import Tally
from tests.unit.host_syncs import DEVICE, HostSyncs
from tests.unit.train.conftest import SETTINGS

OBJECTIVES = {
    "standard": StandardSettings(),
    "gaussian": GaussianTrainingSettings(sigma=0.25),
    "fgsm": FgsmTrainingSettings(eps=0.1, clean_forward="none"),
    "fgsm, statistics": FgsmTrainingSettings(eps=0.1, clean_forward="train_stats"),
    "fgsm, probes": FgsmTrainingSettings(eps=0.1, clean_forward="no_grad_eval", clean_every=1),
    "pgd": PgdTrainingSettings(eps=0.1, num_steps=3),
    "trades": TradesSettings(eps=0.1, num_steps=3),
    "mart": MartSettings(eps=0.1, num_steps=2),
    "awp": TradesSettings(eps=0.1, num_steps=1, awp=AwpSettings(start_epoch=0)),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_step_waits(name, toy_spec, new_batch):
    sgd = name == "mart"  # the step of the optimizer does not depend on the objective
    settings = replace(SETTINGS, optimizer=SgdSettings()) if sgd else SETTINGS
    plan = EpochPlan(settings, seed=5, epochs=2, image_size=8)
    objective = make_objective(OBJECTIVES[name], label_smoothing=0.0)
    batch, tally = new_batch(slice(0, 6)), Tally()
    with HostSyncs() as syncs:
        model = initial_model(toy_spec, seed=0).to(DEVICE).train()
        objective.prepare(model)
        updater = plan.updater(model)
        batch = replace(batch, images=batch.images.to(DEVICE), labels=batch.labels.to(DEVICE))
        for _ in range(2):  # the first step allocates
            syncs.clear()
            tally.merge(_gradients(model, model, objective, updater, batch, 3))
            updater.step(1e-3)
        assert syncs.places == {}
        assert torch.tensor(list(tally.means().values())).isfinite().all()
        assert syncs.count >= 1  # reading does wait
