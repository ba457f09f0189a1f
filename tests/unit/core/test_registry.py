"""Registries: every name leads to a settings class and to code that exists."""

from typing import Literal

import pytest

from components.attacks.settings import ATTACKS
from components.certify.registry import FAMILIES
from components.core.registry import Registry
from components.core.settings import Settings, settings
from components.train.objectives.settings import OBJECTIVES

ALL = [ATTACKS, OBJECTIVES, FAMILIES]


@pytest.mark.parametrize(
    ("registry", "name"), [(r, n) for r in ALL for n in r], ids=lambda x: getattr(x, "what", x)
)
def test_every_name_loads_its_code(registry, name):
    assert callable(registry[name].load())
    assert issubclass(registry[name].settings, Settings)


def test_a_name_is_registered_once():
    @settings
    class Shake(Settings):
        kind: Literal["shake", "rattle"] = "shake"

    registry = Registry("corruption")
    registry.add(Shake, "some.module:shake")
    assert list(registry) == ["shake", "rattle"]
    assert registry.classes() == (Shake,)
    assert "rattle" in registry
    assert "roll" not in registry
    with pytest.raises(ValueError, match="corruption shake is registered twice"):
        registry.add(Shake, "other.module:shake")
