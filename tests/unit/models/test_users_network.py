"""Networks and attacks of the user's own: what they return is checked."""

import pytest
import torch

from components.attacks.interface import Items
from components.attacks.user import user_attack
from components.core.errors import CasemateError
from components.core.user_code import UserEntry, pinned, reading, settings_class
from components.models.zoo import build_network, check_known, is_known

CODE = """
from dataclasses import dataclass, replace
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


class Odd(Shift):
    @dataclass(frozen=True)
    class Settings:
        mode: str
        by: float = 0.0

    def __init__(self, settings, *, norm, eps):
        super().__init__(settings, norm=norm, eps=eps)
        self.mode = settings.mode

    def __call__(self, logits_of, items):
        if self.mode == "raises":
            raise RuntimeError("boom")
        if self.mode == "in place":
            items.x.zero_()
            items.y.fill_(1)
        result = super().__call__(logits_of, items)
        changes = {
            "says broken": {"adversarial_prediction": items.y + 1},
            "says robust": {"adversarial_prediction": items.y, "clean_prediction": items.y},
            "no class": {"adversarial_prediction": items.y - 1},
            "floats": {"adversarial_prediction": None},
            "one point": {"x_adv": result.x_adv[:1]},
            "other shape": {"x_adv": result.x_adv[..., :1]},
            "double": {"x_adv": result.x_adv.double()},
            "one count": {"num_evaluations": result.num_evaluations[:1]},
            "no count": {"num_gradients": None},
            "negative": {"num_zero_gradients": result.num_zero_gradients - 1},
        }
        return replace(result, **changes.get(self.mode, {})) if self.mode != "none" else None
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


def odd_attack(code, **values):
    return user_attack(entry(code("Odd"), **values), norm="linf", eps=0.1)


def dark_and_light():
    """Two rows whose mean decides the class, above 0.55 it is 1, and their labels."""

    def logits_of(x):
        mean = x.flatten(1).mean(dim=1)
        return torch.stack([0.55 - mean, mean - 0.55], dim=1)

    return logits_of, Items(torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 0]), ("a", "b"), 0)


@pytest.mark.parametrize("mode", ["says broken", "says robust", "no class", "floats"])
def test_only_the_points_of_an_attack_are_believed(code, mode):
    logits_of, items = dark_and_light()
    for by, expected in ((0.0, 0), (0.1, 1)):
        result = odd_attack(code, mode=mode, by=by)(logits_of, items)
        assert result.adversarial_prediction.tolist() == [expected, expected]
        assert result.clean_prediction.tolist() == [0, 0]


def test_an_attack_cannot_move_the_items_that_its_budget_is_measured_from(code):
    logits_of, items = dark_and_light()
    with pytest.raises(CasemateError, match=r"leaves the budget of 0\.1 .* on item a"):
        odd_attack(code, mode="in place")(logits_of, items)
    assert items.x.unique().tolist() == [0.5]
    assert items.y.tolist() == [0, 0]


def test_results_of_another_form_name_the_attack(code):
    logits_of, items = dark_and_light()
    for mode, words in {
        "raises": "fails on items a to b: RuntimeError: boom",
        "none": "returns a NoneType, not an AttackResult",
        "one point": r"returns x_adv as float32 \(1, 1, 2, 2\)",
        "other shape": r"returns x_adv as float32 \(2, 1, 2, 1\)",
        "double": "returns x_adv as float64",
        "one count": r"returns num_evaluations as int64 \(1,\)",
        "no count": "returns num_gradients as NoneType, not as int64",
        "negative": "returns num_zero_gradients below 0",
    }.items():
        reference = r"^attacks\.kind: python:checked_code\.py@[0-9a-f]{16}:Odd "
        with pytest.raises(CasemateError, match=reference + words):
            odd_attack(code, mode=mode)(logits_of, items)
