"""The registry of attacks, and AutoAttack as published."""

import pytest
import torch
from torch import nn

from components.attacks.apgd import Apgd, ApgdTargeted
from components.attacks.cascade import run_cascade
from components.attacks.fab import Fab, FabTargeted
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.pgd import in_fixed_batches
from components.attacks.square import Square
from components.attacks.suite import (
    KINDS,
    autoattack,
    check_class_count,
    make_attack,
    min_classes,
)
from components.core.errors import CasemateError

LINF = {"norm": "linf", "eps": 8 / 255}


def test_versions_are_those_of_the_published_code():
    assert autoattack("standard", **LINF) == (
        Apgd(**LINF, loss="ce", num_steps=100, num_restarts=1),
        ApgdTargeted(**LINF, num_targets=9, num_steps=100),
        FabTargeted(**LINF, num_targets=9, num_steps=100, num_restarts=1),
        Square(**LINF, num_queries=5000, p_init=0.8),
    )
    assert autoattack("plus", norm="l2", eps=0.5) == (
        Apgd(norm="l2", eps=0.5, loss="ce", num_restarts=5),
        Apgd(norm="l2", eps=0.5, loss="dlr", num_restarts=5),
        Fab(norm="l2", eps=0.5, num_restarts=5, alpha_max=0.1, eta=1.05, beta=0.9),
        Square(norm="l2", eps=0.5, num_queries=5000),
        ApgdTargeted(norm="l2", eps=0.5, num_targets=9),
        FabTargeted(norm="l2", eps=0.5, num_targets=9, num_restarts=1),
    )
    assert autoattack("rand", **LINF) == (
        Apgd(**LINF, loss="ce", eot_iter=20, num_restarts=1),
        Apgd(**LINF, loss="dlr", eot_iter=20, num_restarts=1),
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "spatial"])
def test_every_kind_keeps_its_budget_and_its_name(kind):
    for norm, eps in (("linf", 0.1), ("l2", 0.7)):
        attack = make_attack(kind, norm=norm, eps=eps)
        assert (attack.norm, attack.eps) == (norm, eps)
        assert attack.name.startswith(kind)


def test_settings_reach_the_attack():
    assert make_attack("apgd-ce", **LINF, num_restarts=5) == Apgd(**LINF, num_restarts=5)
    attack = make_attack("pgd", **LINF, loss="margin", num_steps=7)
    assert (attack.loss, attack.num_steps) == ("margin", 7)
    assert make_attack("spatial", norm="spatial", eps=1.0, num_angles=3).num_angles == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_attack("pdg", **LINF), "attack.kind: pdg is unknown; choose one of fgsm,"),
        (lambda: make_attack("square", **LINF, steps=3), "square.steps: is no setting; there are"),
        # the name of the kind decides the loss: a second opinion would be ignored
        (lambda: make_attack("apgd-ce", **LINF, loss="dlr"), "apgd-ce.loss: is no setting"),
        (lambda: make_attack("pgd", norm="linf", eps=8), "did you mean 8/255"),
        (lambda: make_attack("pgd", norm="l1", eps=0.1), "pgd.norm: l1 is unknown"),
        (lambda: make_attack("spatial", **LINF), "write norm: spatial, eps: 1"),
        (lambda: autoattack("fast", **LINF), "fast is unknown; choose one of standard, plus, rand"),
    ],
)
def test_mistakes_are_one_clear_line(call, message):
    with pytest.raises(CasemateError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_few_classes_are_refused_before_any_work():
    standard, rand = autoattack("standard", **LINF), autoattack("rand", **LINF)
    check_class_count(standard, num_classes=4)
    check_class_count(rand, num_classes=3)
    with pytest.raises(CasemateError, match=r"apgd-t: 3 classes are too few, it needs 4"):
        check_class_count(standard, num_classes=3)
    with pytest.raises(CasemateError, match=r"apgd-dlr: 2 classes are too few, it needs 3"):
        check_class_count(rand, num_classes=2)


@pytest.mark.parametrize(
    "kind", ["fgsm", "pgd", "mim", "gama", "apgd-ce", "fab", "fab-t", "square"]
)
def test_the_least_number_of_classes_is_true(kind):
    """What passes the check also runs."""
    steps = {"num_queries": 3} if kind == "square" else {"num_steps": 3}
    _runs(make_attack(kind, **LINF, **steps), num_classes=2)


@pytest.mark.parametrize("kind", ["apgd-dlr", "apgd-t"])
def test_one_class_too_few_fails_in_the_attack_too(kind):
    attack = make_attack(kind, **LINF, num_steps=3)
    needed = min_classes(attack)
    _runs(attack, num_classes=needed)
    with pytest.raises(CasemateError, match=f"{needed - 1} classes"):
        _runs(attack, num_classes=needed - 1)


def _problem(num_classes, *, num_items=24):
    torch.manual_seed(num_classes)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, num_classes))
    x = torch.rand(num_items, 1, 4, 4)
    y = model(x).argmax(dim=1)
    y[0] = (y[0] + 1) % num_classes
    return model, Items(x, y, tuple(f"item-{i}" for i in range(num_items)), run_seed=3)


def _runs(attack, *, num_classes):
    model, items = _problem(num_classes)
    with attack_mode(model):
        attack(model, items)


def test_autoattack_is_the_union_of_its_members_and_resumes_exactly():
    """Small budgets of the real attacks: per row at most each member alone, in any cut."""
    model, items = _problem(5)
    logits_of = in_fixed_batches(model, size=8)
    settings = {
        "apgd-ce": {"num_steps": 3},
        "apgd-t": {"num_steps": 5, "num_targets": 2},
        "fab-t": {"num_steps": 5, "num_targets": 2},
        "square": {"num_queries": 20},
    }
    attacks = [make_attack(k, norm="linf", eps=0.05, **s) for k, s in settings.items()]
    assert [a.name for a in attacks] == [a.name for a in autoattack("standard", **LINF)]
    with attack_mode(model):
        whole = run_cascade(attacks, logits_of, items)
        alone = [attack(logits_of, items).adversarial_prediction == items.y for attack in attacks]
        union = torch.stack(alone).all(dim=0)
        for cut in (1, 3):
            begun = run_cascade(attacks[:cut], logits_of, items)
            resumed = run_cascade(attacks, logits_of, items, done=begun)
            assert torch.equal(resumed.x_adv, whole.x_adv)
            assert torch.equal(resumed.standing.broken_by, whole.standing.broken_by)
            assert torch.equal(resumed.standing.num_gradients, whole.standing.num_gradients)
        predicted = logits_of(whole.x_adv).argmax(dim=1)
    # rows draw by item id, so a member breaks a survivor exactly when it breaks it alone
    assert torch.equal(whole.standing.correct, union)
    assert 0 < int(union.sum()) < len(items) - 1
    assert any(tally.num_broken for tally in whole.standing.tallies[1:])
    assert torch.equal(predicted, whole.standing.adversarial_prediction)
    assert (whole.x_adv - items.x).abs().max() <= 0.05
