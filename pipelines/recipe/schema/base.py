"""What every section shares: frozen, closed to unknown keys, pixels as fractions of full scale.

Epsilons and sigmas are pixels in [0, 1] and may be written as fractions (`8/255`).
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from components.core.hints import did_you_mean


def as_number(value: object) -> float:
    """Plain numbers and fractions such as `8/255`."""
    if isinstance(value, str):
        try:
            return float(Fraction(value.replace(" ", "")))
        except (ValueError, ZeroDivisionError):
            pass
    elif isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise PydanticCustomError("pixels", "is not a number or a fraction such as 8/255")


def as_pixels(value: object) -> float:
    """A number in [0, 1]; one above 1 is almost always a forgotten /255."""
    pixels = as_number(value)
    if not 0 <= pixels <= 1:
        raise PydanticCustomError(
            "pixels", "is outside [0, 1]; pixels are fractions of full scale, write e.g. 8/255"
        )
    return pixels


Pixels = Annotated[float, BeforeValidator(as_pixels)]
PositivePixels = Annotated[float, BeforeValidator(as_pixels), Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]


class Section(BaseModel):
    """A frozen part of a recipe that refuses unknown keys and says which ones it knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    further_keys: ClassVar[tuple[str, ...]] = ()  # understood before a section is made of the rest

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key in values:
                if key not in cls.model_fields:
                    hint = did_you_mean(str(key), [*cls.model_fields, *cls.further_keys])
                    raise PydanticCustomError(
                        "unknown_key", "{hint}", {"key": str(key), "hint": hint}
                    )
        return values


@cache
def keys_with_off() -> frozenset[str]:
    """Keys whose null switches something off that is on where the key is left out."""

    def below(cls: type[Section]) -> Iterator[type[Section]]:
        for child in cls.__subclasses__():
            yield child
            yield from below(child)

    return frozenset(
        name
        for section in below(Section)
        for name, field in section.model_fields.items()
        if NoneType in get_args(field.annotation) and field.get_default() is not None
    )
