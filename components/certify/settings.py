"""What the settings of every certificate family share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from components.core.settings import Settings


class ChallengeSettings(Settings):
    """Settings of the attack that challenges a certificate."""

    __slots__ = ()

    num_items: int


@dataclass(frozen=True, slots=True)
class CertificateEntry:
    """One certificate; `finer` names the entry whose votes hold all that it needs."""

    section: "CertificateSettings"
    finer: str | None = None


class CertificateSettings(Settings):
    """Settings of one section of certificates; every family's class derives from it.

    The fields named here are those of all families; each declares them at its own place.
    """

    __slots__ = ()

    kind: str
    model: str
    num_items: int | None
    micro_batch: int
    challenge: "ChallengeSettings | None"

    @property
    def denoiser_name(self) -> str | None:
        """The denoiser in front of the model: a model of the recipe or a folder on disk."""
        return None

    def entries(self, name: str) -> Mapping[str, CertificateEntry]:
        """The certificates of the section called `name`, by their own names."""
        return {name: CertificateEntry(self)}

    def lengths(self) -> Iterator[tuple[str, int]]:
        """(field, pixels) of every length that must fit into the images."""
        return iter(())
