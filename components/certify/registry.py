"""Certificate families by kind."""

from functools import cache
from typing import TYPE_CHECKING

from components.certify.settings import FAMILIES

if TYPE_CHECKING:
    from components.certify.family import AnyFamily

__all__ = ["FAMILIES", "family_of"]


@cache
def family_of(kind: str) -> "AnyFamily":
    """The family of a kind of certificate."""
    family: AnyFamily = FAMILIES[kind].load()()
    return family
