"""A checkpoint between any two steps loses nothing and doubles nothing, whatever is trained."""

import io
from dataclasses import replace
from functools import partial

import pytest
import torch

from components.data.augment import Augmentation, Mixing
from components.train.averaging import AverageSettings
from components.train.epoch import EpochSettings
from components.train.objectives.aas import AasTraining
from components.train.objectives.ablation import AblationTraining
from components.train.objectives.adversarial import AdversarialTraining
from components.train.objectives.awp import Awp
from components.train.objectives.inner import InnerAttack
from components.train.objectives.leak import LeakDetector
from components.train.objectives.mart import Mart
from components.train.objectives.noise import DenoisedFineTuning, GaussianNoise
from components.train.objectives.standard import Standard
from components.train.objectives.trades import Trades
from components.train.optim import OptimizerSettings
from components.train.schedules import epsilon_at
from components.train.selection import Selection
from components.train.session import Session, initial_model
from components.train.validation import ValidationAttack

SETTINGS = EpochSettings(
    seed=5,
    epochs=2,
    batch_size=6,  # 22 items: three steps per epoch
    learning_rate=5e-3,
    warmup_epochs=1,
    clip_norm=1.0,
    augmentation=Augmentation(8, crop="pad", pad=1, flip=True),
)
WARMUP = partial(epsilon_at, final=0.1, warmup_epochs=1)
ATTACK = InnerAttack(eps=0.1, num_steps=1, warmup=WARMUP, warmup_per="step")
OBJECTIVES = {
    "standard": lambda: Standard(0.1, "bce"),
    "pgd": lambda: AdversarialTraining(ATTACK, clean_every=1),
    "train_stats": lambda: AdversarialTraining(ATTACK, clean_forward="train_stats"),
    "trades": lambda: Trades(ATTACK),
    "mart": lambda: Mart(ATTACK),
    "awp": lambda: Awp(Trades(ATTACK), 0.01, 1),
    "aas": lambda: AasTraining(AdversarialTraining(ATTACK), every=1, mode="augment"),
    "aas-replace": lambda: AasTraining(Standard(), every=1, max_batches=1),
    "aas-awp": lambda: AasTraining(Awp(Mart(ATTACK)), every=1, mode="augment"),
    "ablation": lambda: AblationTraining(3, 0.0, "block", "image"),
    "gaussian": lambda: GaussianNoise(0.25),
    "denoised": lambda: DenoisedFineTuning(_draws, 0.25),
}


def _draws(noisy, sigma, draws):
    return noisy / 2 + sigma * draws(0)


@pytest.fixture
def new_session(toy_spec, train_split, val_split):
    spec = replace(toy_spec, options={**toy_spec.options, "depth": 2})

    def make(objective, *, seed: int = 5, **changes) -> Session:
        arguments = {
            "train": train_split,
            "val": val_split,
            "settings": SETTINGS,
            "optimizer": OptimizerSettings(),
            "val_items": 4,
            "val_attack": ValidationAttack(0.1, 1),
            "checkpoint_steps": 1,
        }
        model = initial_model(spec, seed=seed)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1  # layers that draw must draw the same again
        return Session(model, objective, **{**arguments, **changes})

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
    "ema": {"average": AverageSettings("ema", 0.9)},
    "swa": {"average": AverageSettings("swa", start_epoch=1)},
    "best": {"selection": lambda: Selection("best")},
    "best-ema": {"average": AverageSettings("ema", 0.9), "selection": lambda: Selection("best")},
    "patience": {"selection": lambda: Selection("last", patience=1)},
    "leak": {"leak": lambda: LeakDetector(num_steps=2)},
    "sgd": {"optimizer": OptimizerSettings("sgd", nesterov=True)},
    "bf16": {"settings": replace(SETTINGS, precision="bf16")},
    "fp16": {"settings": replace(SETTINGS, precision="fp16")},
    "micro": {"settings": replace(SETTINGS, micro_batch=4)},
    "mixing": {"settings": replace(SETTINGS, mixing=Mixing(), smoothing=0.1)},
}


@pytest.mark.parametrize("name", FURTHER)
def test_every_setting_resumes_inside_any_epoch(new_session, name):
    def new(seed: int) -> Session:
        changes = {k: v() if callable(v) else v for k, v in FURTHER[name].items()}
        return new_session(AdversarialTraining(ATTACK, clean_every=2), seed=seed, **changes)

    straight = new(5)
    checkpoints = checkpoints_of(straight)
    assert checkpoints.keys() == {(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)}
    for place in ((0, 2), (1, 1)):
        assert_same(resumed_from(new(99), checkpoints[place]), straight)


def test_checkpoints_do_not_disturb(new_session):
    with_them, without = new_session(Standard()), new_session(Standard(), checkpoint_steps=None)
    checkpoints_of(with_them)
    assert set(checkpoints_of(without)) == {(1, 0), (2, 0)}
    assert_same(with_them, without)
