"""Label leaking: measured on paired images, stopped when it is beyond chance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from components.core.errors import CasemateError
from components.train.objectives.adversarial import AdversarialTraining, leak_metrics
from components.train.objectives.leak import LeakDetector
from components.train.objectives.settings import FgsmTrainingSettings


def probe(rescued: int, broken: int, num_items: int) -> dict[str, float]:
    return {"rescued": rescued / num_items, "broken": broken / num_items}


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=12))
def test_leak_is_attacked_minus_clean_accuracy(rows):
    clean, attacked, y = torch.tensor(rows).T
    metrics = leak_metrics(clean, attacked, y)
    before, after = ((p == y).double().mean().item() for p in (clean, attacked))
    assert metrics["clean_accuracy"] == before
    assert metrics["leak"] == pytest.approx(after - before)
    assert metrics["rescued"] == sum(a == t != c for c, a, t in rows) / len(rows)


class ReadsThePerturbation(nn.Module):
    """Answers from the sign of what was added to grey images: a leak as in a real run."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        # at x the loss falls towards the mistake, beyond it the answer turns right
        change = (x - 0.5).mean(dim=(1, 2, 3))
        score = self.scale * torch.sin(40 * change)
        return torch.stack([score, -score], dim=1)


def test_a_model_that_reads_the_perturbation_is_caught(new_batch):
    batch = new_batch()
    batch = type(batch)(
        torch.full_like(batch.images, 0.5), *(getattr(batch, f) for f in batch.__slots__[1:])
    )
    attack = FgsmTrainingSettings(eps=0.12, step_size=0.12, start="normal", clean_every=1)
    objective = AdversarialTraining(attack, label_smoothing=0.0)
    detector = LeakDetector(num_steps=1, window=10)
    model = ReadsThePerturbation()
    for step in range(10):
        detector.update(objective.loss(model, model, new_step(batch, step)).metrics, num_items=22)
    assert detector.leak > 0.3
    with pytest.raises(CasemateError, match=r"num_steps: 1 leaks labels.*use num_steps: 2$"):
        detector.check()


def new_step(batch, step):
    fields = {name: getattr(batch, name) for name in batch.__slots__}
    return type(batch)(**{**fields, "step": step, "epoch": step})


@pytest.mark.parametrize(
    ("rescued", "broken", "num_items", "stops"),
    [
        (0, 30, 100, False),  # an attack that does harm
        (3, 3, 100, False),
        (4, 3, 100, False),  # 20 probes: 80 against 60, chance 0.05
        (8, 3, 1000, False),  # beyond chance, but half a point of accuracy
        (8, 3, 100, True),  # 160 against 60
        (1, 0, 20, False),  # 20 against none would be: chance 2 ** -20 = 9.5e-7
    ],
)
def test_the_training_stops_for_what_is_large_and_beyond_chance(rescued, broken, num_items, stops):
    detector = LeakDetector(num_steps=1)
    for _ in range(19):
        detector.update(probe(rescued, broken, num_items), num_items=num_items)
    if (rescued, broken) != (1, 0):
        detector.update(probe(rescued, broken, num_items), num_items=num_items)
    assert detector.found() == stops
    if not stops:
        detector.check()


def test_twenty_of_twenty_is_beyond_chance():
    detector = LeakDetector(num_steps=2)
    for _ in range(20):
        detector.update(probe(1, 0, 20), num_items=20)
    with pytest.raises(CasemateError, match="more steps or a smaller eps"):
        detector.check()


def test_old_probes_are_forgotten_and_unprobed_steps_ignored():
    detector = LeakDetector(num_steps=1, window=3)
    assert detector.leak == 0
    detector.check()
    for rescued in (90, 0, 0, 0):
        detector.update(probe(rescued, 10, 100), num_items=100)
        detector.update({}, num_items=100)
    assert detector.leak == pytest.approx(-0.1)


def test_the_window_survives_a_checkpoint():
    detector, other = LeakDetector(num_steps=1, window=4), LeakDetector(num_steps=1, window=4)
    other.restore(detector.state())
    assert other.leak == 0
    for rescued in range(6):
        detector.update(probe(rescued, 1, 50), num_items=50)
    other.restore(detector.state())
    for each in (detector, other):
        each.update(probe(9, 0, 50), num_items=50)
    assert torch.equal(detector.state(), other.state())
    assert detector.leak == other.leak
