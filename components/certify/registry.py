"""All certificate families by kind."""

from functools import cache
from typing import TYPE_CHECKING

from components.certify.l2.settings import GaussianClaimSettings, GaussianSettings
from components.certify.patch.settings import (
    AblationClaimSettings,
    AblationSettings,
    DoubleMaskingClaimSettings,
    DoubleMaskingSettings,
)
from components.certify.settings import CertificateSettings, ClaimSettings
from components.core.registry import Registry

if TYPE_CHECKING:
    from components.certify.family import AnyFamily

FAMILIES = Registry("certificate")
FAMILIES.add(AblationSettings, "components.certify.patch.family:AblationFamily")
FAMILIES.add(DoubleMaskingSettings, "components.certify.patch.family:DoubleMaskingFamily")
FAMILIES.add(GaussianSettings, "components.certify.l2.family:GaussianFamily")

CLAIMS: tuple[type[ClaimSettings], ...] = (
    GaussianClaimSettings,
    DoubleMaskingClaimSettings,
    AblationClaimSettings,
)


def settings_of(kind: str) -> type[CertificateSettings]:
    """The settings class of a kind of certificate."""
    found: type[CertificateSettings] = FAMILIES[kind].settings
    return found


@cache
def family_of(kind: str) -> "AnyFamily":
    """The family of a kind of certificate."""
    family: AnyFamily = FAMILIES[kind].load()()
    return family
