"""A checkpoint between any two steps loses nothing and doubles nothing, whatever is trained."""

import io
from dataclasses import replace
from functools import partial

import pytest
import torch

from components.train.epoch import EpochPlan
from components.train.objectives import settings as s
from components.train.objectives.aas import AasTraining
from components.train.objectives.base_settings import AasTrainingSettings, AwpSettings
from components.train.objectives.make import make_objective
from components.train.objectives.noise import DenoisedFineTuning
from components.train.session import Session, initial_model
from components.train.settings import EmaSettings, SgdSettings, SwaSettings
from tests.unit.train.conftest import SETTINGS as TOY_SETTINGS

SETTINGS = replace(  # 22 items: three steps per epoch
    TOY_SETTINGS, epochs=2, batch_size=6, val_items=4, val_steps=1
)
ATTACK = {"eps": 0.1, "num_steps": 1, "eps_warmup_epochs": 1, "eps_per": "step"}
AWP, EVERY = (
    AwpSettings(gamma=0.01, start_epoch=1),
    AasTrainingSettings(every=1, mode="augment"),
)
DENOISED = s.DenoisedTrainingSettings(sigma=0.25, denoiser="model:any")


def _draws(noisy, sigma, draws):
    return noisy / 2 + sigma * draws(0)


new_objective = partial(make_objective, label_smoothing=0.0)
OBJECTIVES = {
    "standard": lambda: make_objective(s.StandardSettings(criterion="bce"), label_smoothing=0.1),
    "pgd": lambda: new_objective(s.PgdTrainingSettings(**ATTACK, clean_every=1)),
    "train_stats": lambda: new_objective(
        s.PgdTrainingSettings(**ATTACK, clean_forward="train_stats")
    ),
    "trades": lambda: new_objective(s.TradesSettings(**ATTACK)),
    "mart": lambda: new_objective(s.MartSettings(**ATTACK)),
    "awp": lambda: new_objective(s.TradesSettings(**ATTACK, awp=AWP)),
    "aas": lambda: new_objective(s.PgdTrainingSettings(**ATTACK, aas=EVERY)),
    "aas-replace": lambda: AasTraining(
        new_objective(s.StandardSettings()), AasTrainingSettings(every=1, max_batches=1)
    ),
    "aas-awp": lambda: new_objective(s.MartSettings(**ATTACK, awp=AwpSettings(), aas=EVERY)),
    "ablation": lambda: new_objective(
        s.AblationTrainingSettings(size=3, shape="block", position="image")
    ),
    "gaussian": lambda: new_objective(s.GaussianTrainingSettings(sigma=0.25)),
    "denoised": lambda: DenoisedFineTuning(DENOISED, denoise=_draws, label_smoothing=0.0),
}


@pytest.fixture
def new_session(toy_spec, train_split, val_split):
    spec = replace(toy_spec, options={**toy_spec.options, "depth": 2})

    def make(objective, *, seed: int = 5, checkpoint_steps: int | None = 1, **changes) -> Session:
        model = initial_model(spec, seed=seed)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1  # layers that draw must draw the same again
        return Session(
            model,
            objective,
            train=train_split,
            val=val_split,
            plan=EpochPlan(replace(SETTINGS, **changes), seed=5, epochs=2, image_size=8),
            checkpoint_steps=checkpoint_steps,
        )

    return make


def checkpoints_of(session: Session) -> dict[tuple[int, int], bytes]:
    """Every checkpoint of a whole training, by its position."""
    saved = {}

    def save() -> None:
        file = io.BytesIO()
        torch.save(session.state(), file)
        saved[session.next_epoch, session.num_done] = file.getvalue()

    while not session.finished:
        session.run_epoch(on_checkpoint=save)
        save()
    return saved


def resumed_from(session: Session, checkpoint: bytes) -> Session:
    torch.manual_seed(123)  # whatever the new process did before must not matter
    session.restore(torch.load(io.BytesIO(checkpoint), weights_only=True))
    while not session.finished:
        session.run_epoch()
    return session


def assert_same(found: Session, expected: Session) -> None:
    if expected.leak is not None:
        assert len(expected.leak.state()) > 0
        assert torch.equal(found.leak.state(), expected.leak.state())
    timed = ("seconds", "wait_seconds", "images_per_second")
    for row, other in zip(found.history, expected.history, strict=True):
        assert {k: v for k, v in row.items() if k not in timed} == {
            k: v for k, v in other.items() if k not in timed
        }
    for model, other in (
        (found.model, expected.model),
        (found.final_model(), expected.final_model()),
    ):
        state, wanted = model.state_dict(), other.state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_resumes_inside_an_epoch(new_session, name):
    straight = new_session(OBJECTIVES[name]())
    checkpoints = checkpoints_of(straight)
    inside = (1, 0) if name == "aas-replace" else (1, 2)  # it has no steps in that epoch
    again = resumed_from(new_session(OBJECTIVES[name](), seed=99), checkpoints[inside])
    assert_same(again, straight)


FURTHER = {
    "ema": {"average": EmaSettings(decay=0.9)},
    "swa": {"average": SwaSettings(start_epoch=1)},
    "best": {"select": "best"},
    "best-ema": {"average": EmaSettings(decay=0.9), "select": "best"},
    "patience": {"patience": 1},
    "leak": {"stop_on_leak": True},
    "sgd": {"optimizer": SgdSettings(nesterov=True)},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "micro": {"micro_batch": 4},
    "mixing": {
        "augment": replace(SETTINGS.augment, mixup=0.8, cutmix=1.0),
        "label_smoothing": 0.1,
    },
}


@pytest.mark.parametrize("name", FURTHER)
def test_every_setting_resumes_inside_any_epoch(new_session, name):
    def new(seed: int) -> Session:
        objective = new_objective(s.PgdTrainingSettings(**ATTACK, clean_every=2))
        return new_session(objective, seed=seed, **FURTHER[name])

    straight = new(5)
    checkpoints = checkpoints_of(straight)
    assert checkpoints.keys() == {(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)}
    for place in ((0, 2), (1, 1)):
        assert_same(resumed_from(new(99), checkpoints[place]), straight)


def test_checkpoints_do_not_disturb(new_session):
    objective = new_objective(s.StandardSettings())
    with_them, without = new_session(objective), new_session(objective, checkpoint_steps=None)
    checkpoints_of(with_them)
    assert set(checkpoints_of(without)) == {(1, 0), (2, 0)}
    assert_same(with_them, without)
