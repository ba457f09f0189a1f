"""Networks and attacks of the user's own: what they return is checked."""

import pytest
import torch

from components.attacks.interface import Items
from components.attacks.user import user_attack
from components.core.errors import CasemateError
from components.core.user_code import UserEntry, pinned, reading, settings_class
from components.models.zoo import build_network, check_known, is_known

CODE = """
from dataclasses import dataclass
from torch import nn
from components.attacks.interface import Search


def build(*, num_classes, channels, image_size):
    return nn.Linear(image_size, num_classes)


def text(*, num_classes, channels, image_size):
    return "a network"


def fails(*, num_classes, channels, image_size):
    raise RuntimeError("no such layer")


class Shift:
    name = "shift"

    @dataclass(frozen=True)
    class Settings:
        by: float = 0.1

    def __init__(self, settings, *, norm, eps):
        self.by = settings.by

    def __call__(self, logits_of, items):
        search = Search(logits_of, items)
        search.x_adv += self.by
        return search.result()


class Nameless(Shift):
    name = property()
"""


@pytest.fixture
def code(tmp_path):
    (tmp_path / "checked_code.py").write_text(CODE)
    with reading(base=tmp_path, trusted=True):
        yield lambda name: pinned(f"python:checked_code.py:{name}", field="kind")


def test_networks_are_built_and_checked(code):
    sizes = {"image_size": 4, "channels": 1, "num_classes": 3}
    assert build_network(code("build"), options={}, **sizes)(torch.zeros(1, 4)).shape == (1, 3)
    assert is_known(code("build"))
    for name, words in {"text": "returns a str", "fails": "fails to build: RuntimeError"}.items():
        with pytest.raises(CasemateError, match=words):
            build_network(code(name), options={}, **sizes)
    with pytest.raises(CasemateError, match=r"model\.options\.depth: 3 is unknown"):
        check_known(code("build"), {"depth": 3})


def entry(kind: str, **values: float) -> UserEntry:
    return UserEntry(kind=kind, settings=settings_class(kind, field="kind")(**values))


def test_attacks_stay_in_their_budget(code):
    items = Items(torch.full((2, 1, 2, 2), 0.5), torch.zeros(2, dtype=torch.int64), ("a", "b"), 0)

    def logits_of(x):
        return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)

    attack = user_attack(entry(code("Shift")), norm="linf", eps=0.1)
    assert attack.name == "shift"
    assert torch.allclose(attack(logits_of, items).x_adv, items.x + 0.1)
    for by, norm in ((0.11, "linf"), (0.1, "l2"), (float("nan"), "l2")):
        wrong = user_attack(entry(code("Shift"), by=by), norm=norm, eps=0.1)
        with pytest.raises(CasemateError, match="leaves the budget of"):
            wrong(logits_of, items)
    with pytest.raises(CasemateError, match="is not an attack: it lacks name"):
        user_attack(entry(code("Nameless")), norm="linf", eps=0.1)
