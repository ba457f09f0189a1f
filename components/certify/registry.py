"""Certificate families by kind."""

from functools import cache
from typing import TYPE_CHECKING

from components.certify.settings import FAMILIES, CertificateSettings

if TYPE_CHECKING:
    from components.certify.family import AnyFamily

__all__ = ["FAMILIES", "family_of"]


def settings_of(kind: str) -> type[CertificateSettings]:
    """The settings class of a kind of certificate."""
    found: type[CertificateSettings] = FAMILIES[kind].settings
    return found


@cache
def family_of(kind: str) -> "AnyFamily":
    """The family of a kind of certificate."""
    family: AnyFamily = FAMILIES[kind].load()()
    return family
