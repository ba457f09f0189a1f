"""FAB and Square on a small trained network against torchattacks at equal budgets, 100 items.

FAB has no randomness in its first run, so items are compared one by one. Square is a random search
with other numbers on both sides, so the mean over three seeds is compared; the oracle is given our
inclusive positions, because without them it never touches the last row and column.
"""

import pytest
import torch
import torch.nn.functional as F
import torchattacks
from sklearn.datasets import load_digits
from torch import nn

from components.attacks.fab import Fab, FabTargeted
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.square import Square

NUM_ITEMS = 100
BUDGETS = [("linf", "Linf", 0.1), ("l2", "L2", 0.5)]


@pytest.fixture(scope="module")
def trained():
    """Digits of 8 x 8 pixels under noise, half a hundred steps: about half of the items break."""
    data, generator = load_digits(), torch.Generator().manual_seed(0)
    x = torch.tensor(data.images / 16, dtype=torch.float32)[:, None]
    y = torch.tensor(data.target, dtype=torch.int64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        rows = NUM_ITEMS + torch.randint(len(x) - NUM_ITEMS, (200,), generator=generator)
        noise = 0.3 * (torch.rand(x[rows].shape, generator=generator) - 0.5)
        optimizer.zero_grad()
        F.cross_entropy(model((x[rows] + noise).clamp(0, 1)), y[rows]).backward()
        optimizer.step()
    model.eval()
    with attack_mode(model):
        yield model, x[:NUM_ITEMS], y[:NUM_ITEMS]


def ours(attack, trained, *, run_seed=0):
    """(100,) bool: items right before and after."""
    model, x, y = trained
    ids = tuple(f"digit-{i}" for i in range(len(y)))
    return attack(model, Items(x, y, ids, run_seed)).adversarial_prediction == y


def theirs(attack, trained, *, norm, eps):
    model, x, y = trained
    with torch.random.fork_rng(), torch.enable_grad():
        x_adv = attack(x, y)
    delta = (x_adv - x).flatten(1)
    reach = delta.abs().amax(dim=1) if norm == "linf" else delta.norm(dim=1)
    stands = (model(x_adv).argmax(dim=1) == y) | (reach > eps + 1e-6)
    return stands & (model(x).argmax(dim=1) == y)


@pytest.mark.parametrize("kind", [Fab, FabTargeted])
@pytest.mark.parametrize(("norm", "name", "eps"), BUDGETS)
def test_fab_breaks_the_items_that_the_oracle_breaks(
    trained, kind, norm, name, eps, record_property
):
    oracle = torchattacks.FAB(
        trained[0], norm=name, eps=eps, steps=20, n_classes=10, multi_targeted=kind is FabTargeted
    )
    expected = theirs(oracle, trained, norm=norm, eps=eps)
    found = ours(kind(norm=norm, eps=eps, num_steps=20), trained)
    agree = int((found == expected).sum())
    counts = f"{int(found.sum())} and {int(expected.sum())} of 100 stand, {agree} alike"
    record_property("ours and the oracle", counts)
    assert 10 < expected.sum() < 90, counts
    assert abs(int(found.sum()) - int(expected.sum())) <= 1, counts
    assert agree >= 99, counts


class InclusiveSquare(torchattacks.Square):
    def random_int(self, low=0, high=1, shape=(1,)):
        return super().random_int(low, high + 1, list(shape))


@pytest.mark.parametrize(("norm", "name", "eps"), BUDGETS)
def test_square_is_as_strong_as_the_oracle(trained, norm, name, eps, record_property):
    budget = {"n_queries": 200, "resc_schedule": False}  # the schedule of AutoAttack
    expected, found = torch.zeros(NUM_ITEMS), torch.zeros(NUM_ITEMS)
    for seed in range(3):
        oracle = InclusiveSquare(trained[0], norm=name, eps=eps, seed=seed, **budget)
        expected += theirs(oracle, trained, norm=norm, eps=eps) / 3
        found += ours(Square(norm=norm, eps=eps, num_queries=200), trained, run_seed=seed) / 3
    agree = ((found > 0.5) == (expected > 0.5)).sum()
    counts = f"{found.sum():.1f} and {expected.sum():.1f} of 100 stand, {agree} alike"
    record_property("ours and the oracle", counts)
    assert 10 < expected.sum() < 90, counts
    assert abs(found.sum() - expected.sum()) <= 1, counts
    assert agree >= 92, counts
