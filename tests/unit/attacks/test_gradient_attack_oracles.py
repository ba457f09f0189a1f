"""The gradient attacks on a small robustly trained network: their order, and an independent oracle.

The oracle is torchattacks. It returns its last iterate while ours keeps any success, so its whole
path is watched; random starts differ, so those attacks are compared over several restarts.
"""

import pytest
import torch
import torchattacks
from torch import nn

from components.attacks.gradient import Fgsm, GamaPgd, Mim, Pgd
from components.attacks.gradients import attack_mode
from components.attacks.starts import random_point
from tests.unit.attacks.problems import trained_digits

NUM_ITEMS = 200
EPS, STEP = 0.2, 0.05
LINF = {"norm": "linf", "eps": EPS}


def make_network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GELU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.GELU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained():
    """Digits of 8 x 8 pixels, four epochs of FGSM training at a smaller budget; about a second."""
    return trained_digits(
        make_network, num_items=NUM_ITEMS, num_epochs=4, rate=3e-3, eps=0.15, step_size=0.225
    )


def stands(attack, trained):
    model, items = trained
    with attack_mode(model):
        result = attack(model, items)
    return result.adversarial_prediction == items.y


def percent(standing):
    return 100 * standing.double().mean().item()


def test_ladder_of_strength(trained):
    """Clean > FGSM > PGD-10 >= PGD-100, and the others between them, in percent of 200 items."""
    model, items = trained
    clean = percent(model(items.x).argmax(dim=1) == items.y)
    one_step = percent(stands(Fgsm(**LINF), trained))
    ten, hundred = (percent(stands(Pgd(**LINF, num_steps=n), trained)) for n in (10, 100))
    gama = percent(stands(GamaPgd(**LINF, num_steps=60), trained))
    assert clean > 90
    assert clean - 10 > one_step > ten + 1
    assert ten >= hundred - 1
    assert percent(stands(Pgd(**LINF, num_steps=40, loss="margin"), trained)) < one_step - 1
    assert percent(stands(Mim(**LINF), trained)) < one_step - 1
    assert gama <= hundred + 1
    assert percent(stands(Pgd(**LINF, num_steps=20, num_restarts=3), trained)) <= hundred + 1


@pytest.mark.parametrize("attack", [Pgd(**LINF), Mim(**LINF), Fgsm(**LINF), GamaPgd(**LINF)])
def test_a_larger_budget_breaks_more_until_nothing_stands(attack, trained):
    def at(eps):
        return percent(stands(type(attack)(norm="linf", eps=eps), trained))

    assert at(0.05) > at(0.2) + 20
    assert at(1.0) < 5


class Watched(nn.Module):
    """A network that remembers which rows were right at every point it was asked about."""

    def __init__(self, model, y):
        super().__init__()
        self.model, self.y = model, y
        self.always_right = torch.ones_like(y, dtype=torch.bool)

    def forward(self, x):
        logits = self.model(x)
        self.always_right &= logits.detach().argmax(dim=1) == self.y
        return logits


PATH = {"eps": EPS, "alpha": STEP, "steps": 20}
FIXED = {**LINF, "step_size": STEP, "random_start": False}
ORACLES = {
    "fgsm": (
        Fgsm(**LINF, step_size=EPS, random_start=False),
        lambda model: torchattacks.FGSM(model, eps=EPS),
    ),
    "pgd": (Pgd(**FIXED), lambda model: torchattacks.PGD(model, **PATH, random_start=False)),
    "pgd-random": (
        Pgd(**LINF, step_size=STEP, num_restarts=4),
        lambda model: torchattacks.PGD(model, **PATH),
    ),
    "pgd-l2": (
        Pgd(norm="l2", eps=0.9, step_size=0.2, random_start=False),
        lambda model: torchattacks.PGDL2(model, eps=0.9, alpha=0.2, steps=20, random_start=False),
    ),
    "margin": (
        Pgd(**FIXED, loss="margin"),
        lambda model: torchattacks.UPGD(model, **PATH, loss="margin", decay=0.0),
    ),
    "dlr": (
        Pgd(**FIXED, loss="dlr"),
        lambda model: torchattacks.UPGD(model, **PATH, loss="dlr", decay=0.0),
    ),
    "mim": (
        Mim(**LINF, step_size=STEP, num_steps=20),
        lambda model: torchattacks.MIFGSM(model, **PATH),
    ),
}


@pytest.mark.parametrize("name", ORACLES)
def test_equal_budget_gives_the_robust_accuracy_of_the_oracle(name, trained, record_property):
    attack, make_oracle = ORACLES[name]
    model, items = trained
    watched = Watched(model, items.y)
    with attack_mode(watched), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        watched(items.x)
        for _ in range(getattr(attack, "num_restarts", 1)):
            with torch.enable_grad():
                x_adv = make_oracle(watched)(items.x, items.y)
            watched(x_adv)
    compare(name, stands(attack, trained), watched.always_right, record_property)


def test_divergence_attack_matches_the_oracle_from_the_same_start(
    trained, record_property, monkeypatch
):
    """TRADES starts next to the image, ours anywhere in the ball: the oracle is given our start."""
    model, items = trained
    attack = Pgd(**LINF, loss="kl", step_size=STEP)
    start = random_point(items, norm="linf", eps=EPS, stream="pgd")
    monkeypatch.setattr(torch, "randn_like", lambda x: (start - x) / 0.001)
    watched = Watched(model, items.y)
    with attack_mode(watched):
        watched(torchattacks.TPGD(watched, **PATH)(items.x))
    compare("kl", stands(attack, trained), watched.always_right, record_property)


def compare(name, ours, theirs, record_property):
    agreement = percent(ours == theirs)
    record_property(f"{name}: robust accuracy, ours and theirs", (percent(ours), percent(theirs)))
    record_property(f"{name}: items that agree, percent", agreement)
    assert abs(percent(ours) - percent(theirs)) <= 1
    assert agreement >= 98
