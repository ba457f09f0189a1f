"""All certificate families by kind."""

from components.certify.l2.settings import GaussianSettings
from components.certify.patch.settings import AblationSettings, DoubleMaskingSettings
from components.core.registry import Registry

FAMILIES = Registry("certificate")
FAMILIES.add(AblationSettings, "components.certify.patch.family:Ablations")
FAMILIES.add(DoubleMaskingSettings, "components.certify.patch.family:DoubleMasking")
FAMILIES.add(GaussianSettings, "components.certify.l2.family:Gaussian")
