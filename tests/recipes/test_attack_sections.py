"""Attacks in recipes: every registered kind can be written, and defaults exist in settings only."""

from dataclasses import MISSING, fields

import pytest

from components.attacks.autoattack import AutoAttack
from components.attacks.base_settings import AttackSettings
from components.attacks.interface import Attack
from components.attacks.listing import attack_list
from components.attacks.settings import ATTACKS
from components.core.settings import values_of
from pipelines.recipe.schema.attack import AttackSection

OWN_DEFAULTS = {"label", "norm", "eps"}  # of attacks; not settings of a recipe


def section(*attacks: dict, **changes) -> AttackSection:
    return AttackSection.model_validate({"eps": "8/255", "attacks": list(attacks), **changes})


def listed(*attacks: dict, **changes):
    own = section(*attacks, **changes)
    return attack_list(own.attacks, norm=own.norm, eps=own.eps)


@pytest.mark.parametrize("kind", ATTACKS)
def test_every_entry_loads(kind):
    entry = ATTACKS[kind]
    attack = entry.load()
    assert issubclass(entry.settings, AttackSettings)
    assert callable(attack.__call__)


@pytest.mark.parametrize("kind", ATTACKS)
def test_defaults_exist_in_settings_only(kind):
    """An attack inherits the fields of its settings and gives none of its own a default."""
    entry = ATTACKS[kind]
    attack = entry.load()
    added = set(attack.__annotations__)
    defaults = {f.name for f in fields(attack) if f.default is not MISSING and f.name in added}
    assert defaults <= OWN_DEFAULTS
    if kind != "aas":  # wraps an attack: it has none of the fields of its settings
        assert issubclass(attack, entry.settings)
        assert not added & {f.name for f in fields(entry.settings)}


@pytest.mark.parametrize("kind", [kind for kind in ATTACKS if kind not in ("spatial", "aas")])
def test_an_entry_becomes_its_attack(kind):
    own = section({"kind": kind}, norm="l2", eps=2)
    found = attack_list(own.attacks, norm=own.norm, eps=own.eps)
    for attack in found:
        assert isinstance(attack.attack, Attack)
        assert isinstance(attack.attack, ATTACKS[attack.settings.kind].load())
        assert (attack.attack.norm, attack.attack.eps) == ("l2", 2.0)
        assert values_of(attack.attack).items() >= values_of(attack.settings).items()
        assert attack.name == attack.attack.name
        assert attack.entry == own.attacks[0].name


def test_spatial_has_an_entry_of_its_own():
    (found,) = listed({"kind": "spatial"}, norm="spatial", eps=None, sanity=None)
    assert (found.attack.norm, found.attack.eps) == ("spatial", 1.0)


def test_autoattack_is_its_members_as_published():
    found = listed({"kind": "autoattack", "version": "plus"})
    published = AutoAttack(version="plus", norm="linf", eps=8 / 255).attacks()
    assert tuple(x.attack for x in found) == published
    assert {x.entry for x in found} == {"autoattack-plus"}


def test_a_shorter_autoattack_changes_what_it_says():
    found = listed({"kind": "autoattack", "num_steps": 7, "num_queries": 9})
    steps = [getattr(x.attack, "num_steps", None) for x in found]
    queries = [getattr(x.attack, "num_queries", None) for x in found]
    assert steps == [7, 7, 7, None]
    assert queries == [None, None, None, 9]
