"""Every objective is built from its settings, and answers what it does not support by default."""

import subprocess
import sys
from dataclasses import fields
from typing import get_args

import pytest

from components.core.settings import SettingError, values_of
from components.models.pixels import PixelModel
from components.train.objectives import settings as s
from components.train.objectives.aas import AasTraining
from components.train.objectives.awp import Awp
from components.train.objectives.base import LossOut, Objective
from components.train.objectives.base_settings import (
    AasTrainingSettings,
    AwpSettings,
    TrainingObjectiveSettings,
)
from components.train.objectives.make import implementation, trained_for
from components.train.objectives.settings import OBJECTIVES
from components.train.objectives.standard import Standard
from components.train.objectives.wrapper import ObjectiveWrapper
from components.train.settings import TrainSettings, VariantSettings

REQUIRED = {
    "eps": 0.1,
    "band": 3,
    "size": 3,
    "sigma": 0.25,
    "full": True,
    "denoiser": "clean",
}


def example(kind: str) -> TrainingObjectiveSettings:
    cls = OBJECTIVES[kind].settings
    names = {field.name for field in fields(cls)}
    return cls(**{key: value for key, value in REQUIRED.items() if key in names})


def test_the_recipe_takes_every_registered_kind_and_the_users_own():
    members = get_args(get_args(s.ObjectiveSettings)[0])
    assert members == (*OBJECTIVES.classes(), s.UserObjectiveSettings)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_every_kind_has_an_objective_and_torch_free_properties(kind):
    settings = example(kind)
    assert isinstance(settings, TrainingObjectiveSettings)
    assert issubclass(implementation(settings), Objective)
    assert trained_for(settings)["kind"] == kind
    assert settings.attack_eps in (None, 0.1)
    assert settings.attack_warmup_epochs == 0
    assert settings.noise_sigma in (None, 0.25)
    assert settings.is_denoiser == (kind == "denoiser")
    assert settings.denoiser_name == ("clean" if kind == "denoised" else None)
    assert not settings.scales_attention
    assert list(settings.training_problems(TrainSettings())) == []
    lengths = {"columns": {"band": 3}, "ablation": {"size": 3}}
    assert dict(settings.lengths()) == lengths.get(kind, {})
    assert settings.trained_ablation() == (("columns", 3) if kind in lengths else None)


def test_reading_settings_loads_no_torch():
    code = "import sys, components.train.settings, components.train.objectives.settings as r;"
    code += "print('torch' in sys.modules, len(list(r.OBJECTIVES)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", str(len(list(OBJECTIVES)))]


class Smallest(Objective):
    """An objective with nothing but a loss."""

    def loss(self, wrapped, bare, batch):
        return LossOut(wrapped(batch.images).square().mean())


@pytest.mark.parametrize("wrapped", [False, True])
def test_hooks_do_nothing_by_default(toy_spec, new_batch, wrapped):
    model, batch = PixelModel(toy_spec), new_batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objective = Smallest(s.StandardSettings(), label_smoothing=0.1)
    if wrapped:
        objective = ObjectiveWrapper(objective, None)
    with objective.perturbed(model, model, batch) as seen:
        assert seen is batch
    assert objective.craft(model, batch) is batch.images
    assert (objective.eps, objective.eps_at(0), objective.leak_detector()) == (None, None, None)
    objective.prepare(model)
    objective.begin_epoch(model, 1, [])
    objective.restore(objective.state())
    objective.finish(model)
    assert objective.state() is None
    assert (objective.has_state, objective.searches(1), objective.trains(1)) == (False, False, True)
    assert objective.not_shardable(model) is None
    assert objective.validation_scores(model, batch).shape == batch.labels.shape
    assert objective.label_smoothing == 0.1
    assert all((value == before[name]).all() for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="has no training attack"):
        objective.without_warmup(0.1)


def test_a_wrapper_passes_every_hook_on():
    hooks = {name for name, value in vars(Objective).items() if callable(value)}
    hooks -= {"__init__"}
    properties = {name for name, value in vars(Objective).items() if isinstance(value, property)}
    assert hooks | properties <= set(vars(ObjectiveWrapper))


def test_wrappers_of_a_recipe_surround_its_objective():
    awp, aas = AwpSettings(gamma=0.01), AasTrainingSettings(every=3)
    settings = s.TradesSettings(eps=0.1, awp=awp, aas=aas)
    built = implementation(settings).build(settings, label_smoothing=0.2, start=None)
    assert isinstance(built, AasTraining)
    assert isinstance(built.inner, Awp)
    assert (built.settings, built.inner.settings) == (aas, awp)
    assert built.inner.inner.settings is settings
    assert built.label_smoothing == 0.2
    assert built.without_warmup(0.05).eps == 0.05  # of the objective inside
    assert values_of(settings)["awp"] is awp


def test_problems_of_the_train_section_are_told_once():
    mart = s.MartSettings(eps=0.1)
    with pytest.raises(SettingError) as error:
        TrainSettings(
            objective=mart, variants={"b": VariantSettings(objective=mart)}, label_smoothing=0.1
        )
    assert [problem.field for problem in error.value.problems] == ["label_smoothing"]


def test_an_objective_is_built_with_its_smoothing():
    standard = implementation(s.StandardSettings()).build(
        s.StandardSettings(), label_smoothing=0.3, start=None
    )
    assert isinstance(standard, Standard)
    assert standard.label_smoothing == 0.3
