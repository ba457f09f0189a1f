"""Attacks on a stand-in for a GPU: the host waits at the looks that are allowed, nowhere else.

Waits are counted between forward passes. `ActiveRows.leave` looks at who is broken every ten steps,
FAB's `_level` asks every four Newton steps, and Square every ten passes.
"""

import pytest
import torch

from components.attacks.apgd import Apgd, ApgdTargeted
from components.attacks.fab import Fab, FabTargeted
from components.attacks.gradient import Fgsm, GamaPgd, Mim, Pgd
from components.attacks.interface import STEPS_BETWEEN_LOOKS, Items
from components.core.errors import CasemateError
from components.models.fast import fast_forward
from components.models.pixels import PixelModel
from tests.unit.host_syncs import DEVICE, HostSyncs
from tests.unit.networks import SMALL_SPEC, scattered

BUDGET = {"norm": "linf", "eps": 0.004}
NUM_STEPS = 40
ATTACKS = {
    "fgsm": (Fgsm(**BUDGET, num_steps=NUM_STEPS), 1),
    "pgd": (Pgd(**BUDGET, num_steps=NUM_STEPS), 1),
    "pgd l2": (Pgd(norm="l2", eps=0.1, num_steps=NUM_STEPS), 1),
    "pgd kl": (Pgd(**BUDGET, num_steps=NUM_STEPS, loss="kl"), 1),
    "mim": (Mim(**BUDGET, num_steps=NUM_STEPS), 1),
    "gama": (GamaPgd(**BUDGET, num_steps=NUM_STEPS), 1),
    "apgd-ce": (Apgd(**BUDGET, num_steps=NUM_STEPS), 1),
    "apgd-ce, eot": (Apgd(**BUDGET, num_steps=NUM_STEPS, eot_iter=2), 2),
    "apgd-dlr l2": (Apgd(norm="l2", eps=0.1, kind="apgd-dlr", num_steps=NUM_STEPS), 1),
    "apgd-t": (ApgdTargeted(**BUDGET, num_steps=NUM_STEPS), 1),
    "fab": (Fab(**BUDGET, num_steps=NUM_STEPS), 2),
    "fab-t": (FabTargeted(**BUDGET, num_steps=NUM_STEPS), 2),
    "fab-t l2": (FabTargeted(norm="l2", eps=0.1, num_steps=NUM_STEPS), 2),
}


def problem():
    model = scattered(lambda: PixelModel(SMALL_SPEC), by=0.3)
    model.requires_grad_(False)
    x = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model, x, model(x).argmax(dim=1), tuple(f"item-{i}" for i in range(6))


class Waits:
    """A model that notes where the host has waited since its last pass."""

    def __init__(self, model, syncs):
        self.model, self.syncs, self.between = model, syncs, []

    def __call__(self, x):
        self.between.append(set(self.syncs.places))
        self.syncs.clear()
        return self.model(x)


@pytest.mark.parametrize("name", ATTACKS)
def test_loops_do_not_wait_for_the_device(name):
    attack, passes_per_step = ATTACKS[name]
    model, x, y, ids = problem()
    expected = attack(model, Items(x, y, ids, run_seed=0))
    with HostSyncs() as syncs, fast_forward(model.net):
        items = Items(x.to(DEVICE), y.to(DEVICE), ids, run_seed=0)
        model = model.to(DEVICE)
        logits_of = Waits(model, syncs)
        result = attack(logits_of, items)
        broken = (result.adversarial_prediction != items.y).cpu()
    assert torch.equal(broken, expected.adversarial_prediction != y)
    newton = {place for waits in logits_of.between for place in waits if "fab.py" in place}
    loops = [waits - newton for waits in logits_of.between]
    allowed = len(loops) / passes_per_step / STEPS_BETWEEN_LOOKS
    runs = len(loops) / (NUM_STEPS * passes_per_step)
    assert len(loops) > NUM_STEPS
    assert sum(map(bool, loops)) <= allowed + 3 * (runs + 1)
    assert len(newton) <= 1  # `_level`


def test_counts_and_points_are_those_of_a_cpu_that_looks_at_every_step():
    model, x, y, ids = problem()
    attack = Pgd(norm="linf", eps=0.02, num_steps=25)
    expected = attack(model, Items(x, y, ids, run_seed=0))
    with HostSyncs():
        items = Items(x.to(DEVICE), y.to(DEVICE), ids, run_seed=0)
        result = attack(model.to(DEVICE), items)
        for name in ("num_evaluations", "num_gradients", "adversarial_prediction"):
            assert torch.equal(getattr(result, name).cpu(), getattr(expected, name))
    assert len(set(expected.num_evaluations.tolist())) > 2  # they break at several steps


def test_faults_on_a_device_name_their_item_at_the_next_look():
    model, x, y, ids = problem()
    passes = []

    def breaks_later(z):
        passes.append(len(z))
        logits = model(z)
        if len(passes) == 4:
            logits = logits + torch.tensor([0, 0, 0, float("nan"), 0, 0], device=DEVICE)[:, None]
        return logits

    with HostSyncs():
        items = Items(x.to(DEVICE), y.to(DEVICE), ids, run_seed=0)
        model = model.to(DEVICE)
        with pytest.raises(CasemateError, match="item-3"):
            Apgd(norm="linf", eps=1e-5)(breaks_later, items)
    assert len(passes) == 1 + STEPS_BETWEEN_LOOKS
