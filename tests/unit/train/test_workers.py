"""Two workers share every batch: the same training as one, also across a checkpoint.

Threads stand in for processes: a barrier adds their tensors up, as a process group would.
"""

import copy
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from components.train.epoch import EpochPlan
from components.train.feed import Worker
from components.train.objectives.adversarial import AdversarialTraining
from components.train.objectives.settings import FgsmTrainingSettings, TradesSettings
from components.train.objectives.trades import Trades
from components.train.session import Session, TrainingStoppedError, initial_model
from components.train.settings import EmaSettings, SgdSettings, TrainSettings

SETTINGS = TrainSettings(
    batch_size=6,
    learning_rate=5e-3,
    micro_batch=2,
    optimizer=SgdSettings(),  # adam blows float noise up to whole steps
    val_items=6,
    val_eps=0.1,
    val_steps=1,
    stop_on_leak=False,
)
ATTACK = FgsmTrainingSettings(eps=0.1)
TRADES = Trades(TradesSettings(eps=0.1, num_steps=1), label_smoothing=0.0)


def fgsm(**changes) -> AdversarialTraining:
    return AdversarialTraining(replace(ATTACK, **changes), label_smoothing=0.0)


class Meeting:
    """Sums of tensors over threads; everybody must come."""

    def __init__(self, size: int) -> None:
        self.parts: dict[int, torch.Tensor] = {}
        self.barrier = threading.Barrier(size, timeout=120)  # of a busy machine

    def total(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def add(part: torch.Tensor) -> torch.Tensor:
            self.parts[rank] = part.clone()
            self.barrier.wait()
            result = sum(self.parts[r] for r in sorted(self.parts))
            self.barrier.wait()
            return result

        return add


@pytest.fixture
def new_session(toy_spec, train_split, val_split):
    def make(objective, worker=Worker(), **changes) -> Session:  # noqa: B008 - frozen
        return Session(
            initial_model(toy_spec, seed=5),
            copy.deepcopy(objective),  # workers have one each
            train=train_split,
            val=val_split,
            plan=EpochPlan(replace(SETTINGS, **changes), seed=5, epochs=2, image_size=8),
            checkpoint_steps=2,
            worker=worker,
        )

    return make


def together(sessions: list[Session], run: Callable[[Session, Callable], None]) -> None:
    """Run the sessions side by side, with gradients averaged before every step."""
    meeting = Meeting(len(sessions))

    def work(session: Session) -> None:
        total, step = meeting.total(session.worker.rank), session.updater.step

        def averaged(learning_rate: float) -> None:
            weights = list(session.model.parameters())
            mean = total(torch.cat([w.grad.flatten() for w in weights])) / len(sessions)
            for weight, part in zip(weights, mean.split([w.numel() for w in weights]), strict=True):
                weight.grad.copy_(part.view_as(weight))
            step(learning_rate)

        session.updater.step = averaged
        try:
            run(session, total)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(sessions)) as pool:
        list(pool.map(work, sessions))


def close(session: Session, other: Session) -> None:
    for row, expected in zip(session.history, other.history, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert row["train_accuracy"] == expected["train_accuracy"]
    expected = other.model.state_dict()
    for name, value in session.model.state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-5), name


@pytest.mark.parametrize("objective", [TRADES, fgsm(clean_every=1)])
def test_two_workers_train_like_one(new_session, objective):
    def run(session: Session, total) -> None:
        while not session.finished:
            session.run_epoch(total=total)

    alone = new_session(objective)
    run(alone, lambda sums: sums)
    pair = [new_session(objective, Worker(rank, 2)) for rank in (0, 1)]
    together(pair, run)
    close(pair[0], alone)
    for key in ("val_accuracy", "val_robust_accuracy"):  # each validated its share of the batches
        assert pair[0].history[0][key] == pair[1].history[0][key] is not None


def test_a_checkpoint_of_two_workers_goes_on_with_one_or_two(new_session):
    objective = TRADES
    alone, saved = new_session(objective), {}
    while not alone.finished:
        alone.run_epoch()

    def first(session: Session, total) -> None:
        def keep() -> None:
            if session.worker.rank == 0:
                file = io.BytesIO()
                torch.save(session.state(), file)
                saved.setdefault("file", file.getvalue())

        session.run_epoch(total=total, on_checkpoint=keep)

    together([new_session(objective, Worker(rank, 2)) for rank in (0, 1)], first)

    def rest(session: Session, total) -> None:
        session.restore(torch.load(io.BytesIO(saved["file"]), weights_only=True))
        assert session.num_done == 2
        while not session.finished:
            session.run_epoch(total=total)

    single = new_session(objective)
    rest(single, lambda sums: sums)
    close(single, alone)
    pair = [new_session(objective, Worker(rank, 2)) for rank in (0, 1)]
    together(pair, rest)
    close(pair[0], alone)


def test_all_workers_select_and_stop_by_the_first_one(new_session, monkeypatch):
    sessions = [
        new_session(
            fgsm(), Worker(rank, 2), select="best", patience=1, average=EmaSettings(decay=0.5)
        )
        for rank in (0, 1)
    ]
    figures = {"val_accuracy": 0.5, "val_robust_accuracy": 0.25}
    monkeypatch.setattr(sessions[1], "_validate", lambda *_: dict.fromkeys(figures, 0.9))
    monkeypatch.setattr(sessions[0], "_validate", lambda *_: dict(figures))

    def run(session: Session, total) -> None:
        while not session.finished:
            session.run_epoch(total=total)

    together(sessions, run)
    for session in sessions:
        assert session.next_epoch == 2  # the second one was not better
        assert (session.selection.best_value, session.selected_epoch) == (0.25, 0)
        weights = session.final_model().state_dict()
        best = session.selection.best_weights
        assert all(torch.equal(weights[name], best[name]) for name in best)


def test_a_leak_stops_all_workers_at_the_same_step(new_session):
    class Leaking(AdversarialTraining):
        def outer_loss(self, wrapped, bare, batch, x_adv):
            out = AdversarialTraining.outer_loss(self, wrapped, bare, batch, x_adv)
            return type(out)(out.loss, out.logits, out.logits, {"rescued": 1.0, "broken": 0.0})

    sessions = [
        new_session(Leaking(ATTACK, label_smoothing=0.0), Worker(rank, 2), stop_on_leak=True)
        for rank in (0, 1)
    ]

    def train(session: Session, total) -> None:
        while not session.finished:
            session.run_epoch(total=total)

    def run(session: Session, total) -> None:
        with pytest.raises(TrainingStoppedError, match=r"num_steps: 1 leaks labels.*steps: 2"):
            train(session, total)

    together(sessions, run)
    # 6 rescued items per step: 0.5 ** 18 is above one in a million, 0.5 ** 24 below. Counts of
    # steps in a row are looked at together, here before the checkpoint after the second step.
    assert [(s.next_epoch, s.num_done) for s in sessions] == [(1, 2)] * 2
