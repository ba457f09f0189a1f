"""Settings check themselves: types, ranges and rules, at the Python door as in recipes."""

import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, MinLen
from hypothesis import given
from hypothesis import strategies as st

from components.core.settings import (
    Budget,
    ByKind,
    Count,
    Fractional,
    Later,
    PositivePixels,
    Problem,
    SettingError,
    Settings,
    changed_fields,
    default_of,
    plain,
    settings,
)


@settings
class Noise(Settings):
    kind: Literal["noise"] = "noise"
    sigma: PositivePixels = 0.25


@settings
class Blur(Settings):
    kind: Literal["blur"] = "blur"
    radius: Annotated[int, Ge(0)] = 2


@settings
class Example(Settings):
    name: str
    num_steps: Count = 20
    step_size: Budget | None = None
    sizes: Annotated[tuple[Count, ...], MinLen(1)] = (1, 2)
    pair: tuple[float, float] = (0.1, 0.9)
    inner: Annotated[Noise | Blur, ByKind()] = Noise()
    options: dict[str, Any] = None  # type: ignore[assignment]
    flip: bool = False

    def __post_init__(self) -> None:
        if self.options is None:
            object.__setattr__(self, "options", {})
        Settings.__post_init__(self)

    def problems(self) -> Iterator[Problem]:
        if self.flip and self.num_steps > 20:
            yield Problem("num_steps", self.num_steps, "is too many beside flip")
        if self.pair[0] > self.pair[1]:
            yield Problem("pair", self.pair, "must rise")


@pytest.mark.parametrize(
    ("given_values", "said"),
    [
        ({"num_steps": 0}, "num_steps: 0 must be at least 1"),
        ({"num_steps": 2.5}, "num_steps: 2.5 is not a whole number"),
        ({"num_steps": True}, "num_steps: True is not a whole number"),
        ({"step_size": -1}, "step_size: -1 must be above 0"),
        ({"step_size": "1/255"}, "step_size: 1/255 is not a number"),
        ({"sizes": ()}, "sizes: () needs 1 entries or more"),
        ({"sizes": (1, 0)}, "sizes: (1, 0) must be at least 1"),
        ({"pair": (0.1,)}, "pair: (0.1,) needs 2 entries"),
        ({"inner": 3}, "inner: 3 is not Noise"),
        ({"options": []}, "options: [] is not a mapping"),
        ({"name": 3}, "name: 3 is not a string"),
    ],
)
def test_a_wrong_value_is_refused_by_its_field(given_values, said):
    with pytest.raises(SettingError) as caught:
        Example(**{"name": "x", **given_values})
    assert str(caught.value) == said
    assert isinstance(caught.value, ValueError)


def test_pixels_out_of_range_say_what_is_meant():
    with pytest.raises(SettingError, match=r"sigma: 8 is outside \(0, 1\]; pixels are fractions"):
        Noise(sigma=8)
    with pytest.raises(SettingError, match="kind: salt is unknown; choose one of noise"):
        Noise(kind="salt")


def test_rules_are_asked_only_when_every_field_is_in_range():
    with pytest.raises(SettingError) as caught:
        Example(name="x", flip=True, num_steps=21, pair=(0.9, 0.1))
    assert [p.field for p in caught.value.problems] == ["num_steps", "pair"]
    with pytest.raises(SettingError) as caught:
        Example(name="x", flip=True, num_steps=0, pair=(0.9, 0.1))
    assert [p.field for p in caught.value.problems] == ["num_steps"]


def test_one_form_in_headers_whatever_was_written():
    made = Example(name="x", step_size=1, sizes=[3, 4], pair=[0, 1])
    assert type(made.step_size) is float
    assert made.sizes == (3, 4)
    assert made.pair == (0, 1)
    assert made == Example(name="x", step_size=1.0, sizes=(3, 4), pair=(0.0, 1.0))
    assert plain(made)["sizes"] == [3, 4]
    assert plain(made, exclude={"inner", "options"}).keys() == {
        *("name", "num_steps", "step_size", "sizes", "pair", "flip")
    }


def test_settings_are_frozen_and_checked_again_when_replaced():
    made = Example(name="x")
    with pytest.raises(FrozenInstanceError):
        made.num_steps = 3
    with pytest.raises(SettingError):
        replace(made, num_steps=0)
    assert replace(made, num_steps=3).num_steps == 3


def test_errors_and_settings_travel_between_processes():
    made = Example(name="x", inner=Blur(radius=0))
    assert pickle.loads(pickle.dumps(made)) == made
    error = SettingError(Problem("a", 1, "is wrong"), Problem("b", 2, "is, too"))
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems
    assert str(again) == "a: 1 is wrong; b: 2 is, too"


def test_what_differs_from_the_defaults():
    assert changed_fields(Example(name="x")) == {"name", "options"}
    assert changed_fields(Example(name="x", inner=Noise(sigma=0.5), num_steps=20)) == {
        *("name", "options", "inner")
    }
    assert default_of(Noise, "sigma") == 0.25


@given(st.integers(-300, 300), st.integers(1, 300))
def test_fractions_read_as_their_quotient(top, bottom):
    assert Fractional.read(f"{top}/{bottom}") == pytest.approx(top / bottom, rel=1e-15)
    assert Fractional.read(f" {top} / {bottom} ") == Fractional.read(f"{top}/{bottom}")


TOO_LARGE = ["1e99999999", "1e-99999999", "1e400", "1/1e0099999", "9" * 5000, 10**400]


@pytest.mark.parametrize("wrong", ["8/0", "x", "", True, None, [1], "1/2/3", *TOO_LARGE])
def test_other_words_are_not_numbers(wrong):
    with pytest.raises(ValueError, match="is not a number or a fraction such as 8/255"):
        Fractional.read(wrong)


@settings
class Younger(Settings):
    sigma: PositivePixels = 0.25
    tone: Annotated[Literal["low", "high"], Later()] = "low"
    count: Annotated[int | None, Ge(1), Later()] = None


def test_a_later_key_at_its_default_is_no_value():
    from pydantic import TypeAdapter

    from pipelines.recipe.schema import base

    assert base.Section  # gives markers their meaning in recipes
    adapter = TypeAdapter(Younger)
    for own, values in (
        (Younger(), {"sigma": 0.25}),
        (Younger(tone="high"), {"sigma": 0.25, "tone": "high"}),
        (Younger(sigma=0.5, count=3), {"sigma": 0.5, "count": 3}),
    ):
        assert plain(own) == values
        assert adapter.dump_python(own, mode="json") == values
        assert adapter.validate_python(values) == own
    with pytest.raises(ValueError, match="low"):
        adapter.validate_python({"tone": "middle"})
    assert set(adapter.json_schema()["properties"]) == {"sigma", "tone", "count"}
