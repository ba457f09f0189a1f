"""Attack lists on the command line are entries of a recipe's list."""

import pytest

from components.attacks.settings import ATTACKS
from components.attacks.short_form import read_attack_list
from components.core.errors import CasemateError
from pipelines.recipe.schema.attack import AttackSection


def listed(text):
    return read_attack_list(text, key="--attacks")


def test_numbers_are_steps_or_queries():
    assert listed("fgsm, pgd-20,apgd-ce-50,square-100") == [
        {"kind": "fgsm"},
        {"kind": "pgd", "num_steps": 20},
        {"kind": "apgd-ce", "num_steps": 50},
        {"kind": "square", "num_queries": 100},
    ]


@pytest.mark.parametrize(
    ("text", "version"),
    [("autoattack", "standard"), ("autoattack-plus", "plus"), ("autoattack-rand", "rand")],
)
def test_versions_of_autoattack(text, version):
    section = AttackSection.model_validate({"eps": 0.1, "attacks": listed(text)})
    assert section.attacks[0].version == version


@pytest.mark.parametrize("kind", [kind for kind in ATTACKS if kind not in ("spatial", "aas")])
def test_every_kind_has_a_short_form(kind):
    section = AttackSection.model_validate({"eps": 0.1, "attacks": listed(kind)})
    assert section.attacks[0].kind == kind


@pytest.mark.parametrize("text", ["pdg-20", "pgd-x", "autoattack-20", "apgd", "aas", "spatial-3"])
def test_what_is_not_an_attack_is_named(text):
    with pytest.raises(
        CasemateError, match=r"is not an attack; write e\.g\. pgd-20\. Known: apgd-ce, "
    ):
        listed(text)


@pytest.mark.parametrize("text", ["", "pgd-20,", ",pgd-20", "pgd-20,,fgsm", "pgd-20, ,fgsm"])
def test_an_empty_entry_is_named(text):
    with pytest.raises(CasemateError) as caught:
        listed(text)
    assert str(caught.value) == (
        f"--attacks: {text!r} has an empty entry; "
        "write names with one comma between, e.g. pgd-20,apgd-ce"
    )
