"""Certified robustness: ablation sets, noise blocks, bounds, certificates, verification.

Importing this package registers the families, in the order of reports: patch, then l2.
"""

from components.certify.patch.settings import AblationClaimSettings, DoubleMaskingClaimSettings

from components.certify.l2.settings import (  # isort: skip
    GaussianClaimSettings,
    PublishedRadiiSettings as PublishedSettings,
)

CLAIMS = (GaussianClaimSettings, DoubleMaskingClaimSettings, AblationClaimSettings)
"""Settings of all claims, in the order of the flags of `casemate recertify`."""

__all__ = ["CLAIMS", "PublishedSettings"]
