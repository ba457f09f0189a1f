"""What the settings of every certificate family share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from components.core.settings import Problem, Settings


class ChallengeSettings(Settings):
    """Settings of the attack that challenges a certificate."""

    __slots__ = ()

    num_items: int


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """What the training of a model decides about its certificates."""

    name: str
    trained_for: Mapping[str, Any]  # its objective, as model.json has it
    token_policy: str


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

    def model_problems(self, model: TrainedModel) -> Iterator[Problem]:
        """Settings that this model cannot be certified with."""
        return iter(())

    def max_votes(self, *, side: int) -> int:
        """An upper bound of the stored predictions per item of square images."""
        return 0
