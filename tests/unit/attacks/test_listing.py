"""From settings to attacks: the registry, AutoAttack as published, lists of attacks."""

import pickle

import pytest
import torch
from torch import nn

from components.attacks.apgd import Apgd, ApgdTargeted
from components.attacks.autoattack import AutoAttack
from components.attacks.cascade import run_cascade
from components.attacks.fab import Fab, FabTargeted
from components.attacks.gradient import Pgd, in_fixed_batches
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.listing import attack_list, check_class_count, make_attack
from components.attacks.settings import (
    ATTACKS,
    AasSettings,
    ApgdSettings,
    ApgdTargetedSettings,
    AutoAttackSettings,
    FabTargetedSettings,
    FgsmSettings,
    PgdSettings,
    SpatialSettings,
    SquareSettings,
)
from components.attacks.square import Square
from components.core.errors import CasemateError
from components.core.settings import SettingError, values_of

LINF = {"norm": "linf", "eps": 8 / 255}
NORM_BOUNDED = [kind for kind in ATTACKS if kind not in ("spatial", "aas")]


def settings_of(kind, **values):
    return ATTACKS[kind].settings(kind=kind, **values)


def test_versions_are_those_of_the_published_code():
    assert AutoAttack(**LINF).attacks() == (
        Apgd(**LINF, kind="apgd-ce", num_steps=100, num_restarts=1),
        ApgdTargeted(**LINF, num_targets=9, num_steps=100),
        FabTargeted(**LINF, num_targets=9, num_steps=100, num_restarts=1),
        Square(**LINF, num_queries=5000, p_init=0.8),
    )
    assert AutoAttack(norm="l2", eps=0.5, version="plus").attacks() == (
        Apgd(norm="l2", eps=0.5, kind="apgd-ce", num_restarts=5),
        Apgd(norm="l2", eps=0.5, kind="apgd-dlr", num_restarts=5),
        Fab(norm="l2", eps=0.5, num_restarts=5, alpha_max=0.1, eta=1.05, beta=0.9),
        Square(norm="l2", eps=0.5, num_queries=5000),
        ApgdTargeted(norm="l2", eps=0.5, num_targets=9),
        FabTargeted(norm="l2", eps=0.5, num_targets=9, num_restarts=1),
    )
    assert AutoAttack(**LINF, version="rand").attacks() == (
        Apgd(**LINF, kind="apgd-ce", eot_iter=20, num_restarts=1),
        Apgd(**LINF, kind="apgd-dlr", eot_iter=20, num_restarts=1),
    )


@pytest.mark.parametrize("kind", NORM_BOUNDED)
def test_an_attack_is_its_settings_with_a_budget(kind):
    """And reaches workers unchanged."""
    for norm, eps in (("linf", 0.1), ("l2", 0.7)):
        settings = settings_of(kind)
        attack = make_attack(settings, norm=norm, eps=eps)
        assert (attack.norm, attack.eps) == (norm, eps)
        assert isinstance(attack, ATTACKS[kind].settings)
        assert values_of(attack).items() >= values_of(settings).items()
        assert attack.name == settings.name
        assert attack.name.startswith(kind)
        assert pickle.loads(pickle.dumps(attack)) == attack


def test_settings_reach_the_attack():
    assert make_attack(ApgdSettings(num_restarts=5), **LINF) == Apgd(**LINF, num_restarts=5)
    attack = make_attack(PgdSettings(loss="margin", num_steps=7), **LINF)
    assert (attack.loss, attack.num_steps) == ("margin", 7)
    spatial = make_attack(SpatialSettings(num_angles=3), norm="spatial", eps=1.0)
    assert spatial.num_angles == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Pgd(norm="linf", eps=8), "did you mean 8/255"),
        (lambda: Pgd(norm="linf", eps=float("inf")), "eps: inf is not a budget"),
        (lambda: make_attack(PgdSettings(), norm="l1", eps=0.1), "norm: l1 is unknown"),
        (lambda: make_attack(SpatialSettings(), **LINF), "norm: linf is unknown"),
        (lambda: make_attack(SpatialSettings(), norm="spatial", eps=0.1), "eps: 0.1 is not a"),
        (lambda: AutoAttack(**LINF, version="fast"), "version: fast is unknown; choose one of"),
    ],
)
def test_mistakes_are_one_clear_line(call, message):
    with pytest.raises(SettingError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_few_classes_are_refused_before_any_work():
    standard, rand = AutoAttackSettings(), AutoAttackSettings(version="rand")
    assert (standard.min_classes, rand.min_classes) == (4, 3)
    check_class_count(standard.members(), num_classes=4)
    check_class_count(rand.members(), num_classes=3)
    with pytest.raises(CasemateError, match=r"apgd-t: 3 classes are too few: it needs 4"):
        check_class_count(standard.members(), num_classes=3)
    with pytest.raises(CasemateError, match=r"apgd-dlr: 2 classes are too few: it needs 3"):
        check_class_count(rand.members(), num_classes=2)
    scaled = AasSettings(inner=ApgdTargetedSettings())
    with pytest.raises(CasemateError, match=r"apgd-t: 3 classes are too few: it needs 4"):
        check_class_count([scaled], num_classes=3)


@pytest.mark.parametrize(
    "kind", ["fgsm", "pgd", "mim", "gama", "apgd-ce", "fab", "fab-t", "square"]
)
def test_the_least_number_of_classes_is_true(kind):
    """What passes the check also runs."""
    settings = ATTACKS[kind].settings
    short = settings_of(kind, **{settings.count_field: 3})
    assert short.min_classes == 2
    _runs(make_attack(short, **LINF), num_classes=2)


@pytest.mark.parametrize("kind", ["apgd-dlr", "apgd-t"])
def test_one_class_too_few_fails_in_the_attack_too(kind):
    settings = settings_of(kind, num_steps=3)
    attack, needed = make_attack(settings, **LINF), settings.min_classes
    _runs(attack, num_classes=needed)
    with pytest.raises(CasemateError, match=f"{needed - 1} classes"):
        _runs(attack, num_classes=needed - 1)


def test_an_attack_that_is_in_the_list_is_not_run_again():
    """Random numbers belong to items, so an equal attack would find equal points."""
    entries = [ApgdSettings(), AutoAttackSettings(), SquareSettings()]
    listed = attack_list(entries, **LINF)
    assert [x.name for x in listed] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert [x.entry for x in listed] == ["apgd-ce", *["autoattack-standard"] * 3]


def test_names_are_unique_in_a_list():
    entries = [
        ApgdSettings(num_restarts=5),
        AutoAttackSettings(),
        ApgdSettings(num_steps=20),
        AasSettings(inner=ApgdSettings()),
        AasSettings(inner=ApgdSettings(), surrogate="gradient"),
        FgsmSettings(),
        FgsmSettings(num_steps=2),
        FgsmSettings(step_size=0.1),
    ]
    listed = attack_list(entries, **LINF)
    names = [x.name for x in listed]
    assert len(set(names)) == len(names)
    assert names[:2] == ["apgd-ce", "apgd-ce-2"]
    assert names[6:8] == ["aas-apgd-ce", "aas-apgd-ce-2"]
    scaled = listed[6]
    assert scaled.attack == Apgd(**LINF)
    assert scaled.scaling == entries[3]
    assert all(x.scaling is None for x in listed[:6])


def test_weak_settings_are_named():
    def found(settings, eps=0.1):
        return [str(problem) for problem in settings.weaknesses(eps)]

    assert found(PgdSettings()) == found(AutoAttackSettings()) == found(ApgdSettings()) == []
    few = "num_steps: 5 steps overstate robustness; use 10 or more"
    assert few in found(PgdSettings(num_steps=5))
    assert found(AasSettings(inner=PgdSettings(num_steps=9))) == [
        "inner.num_steps: 9 steps overstate robustness; use 10 or more"
    ]
    assert found(PgdSettings(step_size=0.001)) == [
        "step_size: 20 steps of 0.001 cannot cross the ball"
    ]
    assert found(AutoAttackSettings(num_steps=99))


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
    members = [
        ApgdSettings(num_steps=3),
        ApgdTargetedSettings(num_steps=5, num_targets=2),
        FabTargetedSettings(num_steps=5, num_targets=2),
        SquareSettings(num_queries=20),
    ]
    attacks = [make_attack(own, norm="linf", eps=0.05) for own in members]
    assert [a.name for a in attacks] == [a.name for a in AutoAttack(**LINF).attacks()]
    with attack_mode(model):
        whole = run_cascade(attacks, logits_of, items)
        alone = [attack(logits_of, items).adversarial_prediction == items.y for attack in attacks]
        union = torch.stack(alone).all(dim=0)
        for cut in (1, 3):
            begun = run_cascade(attacks[:cut], logits_of, items)
            resumed = run_cascade(attacks, logits_of, items, done=begun)
            assert torch.equal(resumed.x_adv, whole.x_adv)
            assert torch.equal(resumed.state.broken_by, whole.state.broken_by)
            assert torch.equal(resumed.state.num_gradients, whole.state.num_gradients)
        predicted = logits_of(whole.x_adv).argmax(dim=1)
    # rows draw by item id, so a member breaks a robust row exactly when it breaks it alone
    assert torch.equal(whole.state.robust, union)
    assert 0 < int(union.sum()) < len(items) - 1
    assert any(tally.num_broken for tally in whole.state.tallies[1:])
    assert torch.equal(predicted, whole.state.adversarial_prediction)
    assert (whole.x_adv - items.x).abs().max() <= 0.05


def test_autoattack_as_one_attack_is_the_cascade_of_its_members():
    model, items = _problem(5)
    attack = AutoAttack(norm="linf", eps=0.05, num_steps=5, num_queries=20)
    with attack_mode(model):
        result = attack(model, items)
        cascade = run_cascade(attack.attacks(), model, items)
        assert torch.equal(model(result.x_adv).argmax(dim=1), result.adversarial_prediction)
    assert torch.equal(result.x_adv, cascade.x_adv)
    assert torch.equal(result.num_gradients, cascade.state.num_gradients)
