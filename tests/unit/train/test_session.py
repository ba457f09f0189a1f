"""A training is a function of its checkpoint: interrupted or not, the same bits."""

import io
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from components.train.epoch import EpochPlan
from components.train.feed import Feeding
from components.train.objectives import settings as s
from components.train.objectives.base import Objective
from components.train.objectives.make import make_objective
from components.train.session import Session, initial_model
from tests.unit.train.conftest import SETTINGS

new_objective = partial(make_objective, label_smoothing=0.0)
STANDARD = new_objective(s.StandardSettings())


def fgsm(*, warmup_epochs: int) -> Objective:
    return new_objective(s.FgsmTrainingSettings(eps=0.1, eps_warmup_epochs=warmup_epochs))


@pytest.fixture
def new_session(toy_spec, train_split, val_split):
    def make(objective=STANDARD, *, seed: int = 5, settings=SETTINGS, **placement) -> Session:
        return Session(
            initial_model(toy_spec, seed=seed),
            objective,
            train=train_split,
            val=val_split,
            plan=EpochPlan(settings, seed=5, epochs=3, image_size=8),
            **placement,
        )

    return make


def without_seconds(history):
    timed = ("seconds", "wait_seconds", "images_per_second")
    return [{key: row[key] for key in row if key not in timed} for row in history]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "objective",
    [
        STANDARD,
        fgsm(warmup_epochs=2),
        new_objective(s.ColumnsTrainingSettings(band=3)),
        new_objective(s.GaussianTrainingSettings(sigma=0.25)),
    ],
    ids=lambda objective: type(objective).__name__,
)
def test_a_resumed_training_is_bit_equal_to_a_straight_one(new_session, objective):
    straight = new_session(objective)
    for _ in range(3):
        straight.run_epoch()
    first = new_session(objective)
    first.run_epoch()
    state = through_a_file(first.state())
    torch.manual_seed(123)  # whatever the new process did before must not matter
    resumed = new_session(objective, seed=99)  # other weights: all of the state must come back
    resumed.restore(state)
    assert resumed.next_epoch == 1
    for _ in range(2):
        resumed.run_epoch()
    expected = straight.model.state_dict()
    found = resumed.model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert without_seconds(straight.history) == without_seconds(resumed.history)
    assert not torch.equal(  # the later epochs did something
        expected["net.head.weight"], state["model"]["net.head.weight"]
    )


def test_rows_of_the_history(new_session):
    session = new_session(fgsm(warmup_epochs=2))
    rows = [session.run_epoch() for _ in range(3)]
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert [row["eps"] for row in rows] == pytest.approx([0, 0.05, 0.1])
    for row in rows:
        assert 0 <= row["val_robust_accuracy"] <= 1
        assert row["val_accuracy"] * 10 == pytest.approx(round(row["val_accuracy"] * 10))
        assert row["val_robust_accuracy"] * 6 == pytest.approx(
            round(row["val_robust_accuracy"] * 6)
        )  # only `val_items` are attacked
        assert 0 <= row["wait_seconds"] <= row["seconds"]
        assert row["images_per_second"] >= 16 / row["seconds"]  # without the time of validation
    plain = new_session(settings=replace(SETTINGS, val_eps=None)).run_epoch()
    assert plain["eps"] is None
    assert plain["val_robust_accuracy"] is None


def test_sums_of_all_workers_make_the_row(new_session):
    alone = new_session().run_epoch()
    doubled = new_session().run_epoch(total=lambda sums: 2 * sums)
    assert doubled["loss"] == alone["loss"]
    assert doubled["train_accuracy"] == alone["train_accuracy"]
    extra = torch.tensor([0.0, 16.0, 0.0, 16.0], dtype=torch.float64)  # a worker, always wrong
    shared = new_session().run_epoch(total=lambda sums: sums + extra)
    assert shared["train_accuracy"] == pytest.approx(alone["train_accuracy"] / 2)


def test_threads_that_build_batches_change_no_bit(new_session):
    one = new_session(fgsm(warmup_epochs=0))
    many = new_session(fgsm(warmup_epochs=0), feeding=Feeding(num_threads=3, num_ahead=5))
    assert one.run_epoch()["loss"] == many.run_epoch()["loss"]
    found = many.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in one.model.state_dict().items())


def test_initial_weights_follow_the_seed_alone(toy_spec):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = initial_model(toy_spec, seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)  # the caller's stream is untouched
    torch.manual_seed(2)
    again, other = initial_model(toy_spec, seed=0), initial_model(toy_spec, seed=1)
    assert torch.equal(first.net.head.weight, again.net.head.weight)
    assert not torch.equal(first.net.head.weight, other.net.head.weight)


class SplitsOnRequest:
    """A prepared dataset of which every loaded split is noted."""

    classes = ("dark", "bright")
    channels, height, width = 1, 8, 8

    def __init__(self, **splits) -> None:
        self.splits = splits
        self.loaded: list[str] = []

    def open_split(self, split, *, memory_mb, limit=None):
        assert limit is None
        self.loaded.append(split)
        return self.splits[split]


def test_the_test_split_is_never_touched(train_split, val_split):
    from pipelines.recipe.load import loads
    from pipelines.stages.train.session import make_session

    recipe = loads(
        """
        name: toy
        data: {source: digits}
        model: {options: {patch_size: 4, embed_dim: 8, depth: 1, num_heads: 2}}
        train: {objective: {kind: fgsm, eps: 0.1}, epochs: 1, batch_size: 8, val_steps: 1}
        """,
        source="toy",
    )
    dataset = SplitsOnRequest(train=train_split, val=val_split)
    make_session(recipe, "main", dataset).run_epoch()
    assert sorted(dataset.loaded) == ["train", "val"]


@pytest.mark.parametrize(
    ("objective", "eps", "best"),
    [
        (STANDARD, 0.1, 2),
        (STANDARD, None, 2),
        (fgsm(warmup_epochs=2), None, 0),  # also while epsilon is 0
    ],
)
def test_only_models_trained_on_attacks_are_selected_under_attack(
    new_session, objective, eps, best
):
    """An untrained network can have a higher robust accuracy than one trained without attacks."""
    settings = replace(SETTINGS, val_eps=eps, select="best")
    session = new_session(objective, settings=settings)
    for clean, robust in ((0.2, 0.2), (0.6, 0.1), (0.9, 0.0)):
        figures = {"val_accuracy": clean, "val_robust_accuracy": robust}
        with mock.patch.object(session, "_validate", return_value=figures):
            session.run_epoch()
    assert session.selected_epoch == best
    assert session.history[best]["val_robust_accuracy"] is not None
