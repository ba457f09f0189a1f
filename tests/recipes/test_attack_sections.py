"""Attack sections and the attacks they become: same settings, same defaults, one list."""

from dataclasses import MISSING, fields
from typing import get_args

import pytest
from components.attacks.suite import KINDS, autoattack

from components.attacks.apgd import Apgd
from components.attacks.settings import AttackSettings
from pipelines.recipe.build import attack_list
from pipelines.recipe.schema.attack import AttackSection

DIAGNOSTIC = {"best_loss"}  # of training; no user's to choose
ENTRIES = {
    kind: entry
    for entry in get_args(get_args(AttackSettings)[0])
    for kind in get_args(entry.model_fields["kind"].annotation)
}


def section(*attacks: dict, **changes) -> AttackSection:
    return AttackSection.model_validate({"eps": "8/255", "attacks": list(attacks), **changes})


def test_every_attack_can_be_written_in_a_recipe():
    assert set(ENTRIES) == {*KINDS, "autoattack", "aas"}


@pytest.mark.parametrize("kind", KINDS)
def test_settings_and_defaults_are_those_of_the_attack(kind):
    """Sections write defaults out, components have their own: they must not drift apart."""
    own = {f.name: f.default for f in fields(KINDS[kind].attack) if f.default is not MISSING}
    told = {k: v for k, v in own.items() if k not in {*KINDS[kind].decided, *DIAGNOSTIC}}
    found = {k: f.default for k, f in ENTRIES[kind].model_fields.items() if k != "kind"}
    assert found == told


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "spatial"])
def test_an_entry_becomes_its_attack(kind):
    (listed,) = attack_list(section({"kind": kind}, norm="l2", eps=2))
    assert isinstance(listed.attack, KINDS[kind].attack)
    assert (listed.attack.norm, listed.attack.eps) == ("l2", 2.0)
    assert listed.name == listed.entry == listed.attack.name


def test_spatial_has_an_entry_of_its_own():
    (listed,) = attack_list(section({"kind": "spatial"}, norm="spatial", eps=None, sanity=None))
    assert listed.attack.norm == "spatial"


def test_autoattack_is_its_members_as_published():
    listed = attack_list(section({"kind": "autoattack", "version": "plus"}))
    assert tuple(x.attack for x in listed) == autoattack("plus", norm="linf", eps=8 / 255)
    assert {x.entry for x in listed} == {"autoattack-plus"}


def test_a_shorter_autoattack_changes_what_it_says():
    listed = attack_list(section({"kind": "autoattack", "num_steps": 7, "num_queries": 9}))
    steps = [getattr(x.attack, "num_steps", None) for x in listed]
    queries = [getattr(x.attack, "num_queries", None) for x in listed]
    assert steps == [7, 7, 7, None]
    assert queries == [None, None, None, 9]


def test_what_ran_before_is_not_run_again():
    """Random numbers belong to items, so an equal attack would find equal points."""
    listed = attack_list(section({"kind": "apgd-ce"}, {"kind": "autoattack"}, {"kind": "square"}))
    assert [x.name for x in listed] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert [x.entry for x in listed] == ["apgd-ce", *["autoattack-standard"] * 3]


def test_names_stay_apart():
    listed = attack_list(
        section(
            {"kind": "apgd-ce", "num_restarts": 5}, {"kind": "autoattack"},
            {"kind": "apgd-ce", "num_steps": 20},
            {"kind": "aas", "inner": {"kind": "apgd-ce"}},
        )
    )  # fmt: skip
    names = [x.name for x in listed]
    assert len(set(names)) == len(names)
    assert names[0] == "apgd-ce"
    assert names[-1] == "aas-apgd-ce"
    assert isinstance(listed[-1].attack, Apgd)
    assert listed[-1].scaling is not None


def test_many_settings_of_one_attack_have_names_of_their_own():
    fgsm = {"kind": "fgsm"}, {"kind": "fgsm", "num_steps": 2}, {"kind": "fgsm", "step_size": 0.1}
    plain = [x.name for x in attack_list(section(*fgsm))]
    assert len(set(plain)) == 3
    scaled = [x.name for x in attack_list(section(*({"kind": "aas", "inner": e} for e in fgsm)))]
    assert len(set(scaled)) == 3
