"""Base classes of the settings of certificate families."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

from components.core.registry import Registry
from components.core.settings import (
    Count,
    Problem,
    Settings,
    changed_fields,
    default_of,
    plain,
)
from components.denoising.settings import SamplerBase, is_on_disk
from components.train.objectives.settings import ObjectiveSettings

FAMILIES = Registry("certificate")
MicroBatch = Count | Literal["auto"]

# Keys added after the first version: they enter a fingerprint only if they are used, so that older
# certificates keep their fingerprints and bytes.
LATER_KEYS = (
    *("token_policy", "allow_token_mismatch", "second_rule", "delta_rule", "stop_early"),
    *("precision", "compiled", "sweep", "denoiser", "sampler"),
)


class Warned(NamedTuple):
    """A value that is valid but probably a mistake; `field` is relative to the section."""

    field: str
    message: str


class ClaimSettings(Settings):
    """Settings of a claim from votes; another claim needs no new votes."""

    __slots__ = ()

    help: ClassVar[Mapping[str, str]] = {}  # meaning of each field, for the command line

    def to_dict(self) -> dict[str, object]:
        """The canonical form: default values are left out."""
        values: dict[str, object] = plain(self)
        changed = changed_fields(self)
        return {name: value for name, value in values.items() if name in changed}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of its fields."""
        own: Any = cls
        return tuple(f.name for f in fields(own))


class ChallengeSettings(Settings):
    """Settings of the attack that challenges a certificate."""

    __slots__ = ()

    num_items: int


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Properties of a model's training that matter for its certificates."""

    name: str
    trained_for: Mapping[str, Any]  # its objective, as in model.json
    token_policy: str
    objective: ObjectiveSettings | None = None  # of a model that the recipe trains
    denoiser_objective: ObjectiveSettings | None = None  # of a denoiser that the recipe trains
    image_size: int | None = None  # as written in the recipe
    known_side: int | None = None  # as written, or known from the source

    @property
    def ablation(self) -> tuple[str, int] | None:
        """The kind of certificate and the visible pixels that the model is trained for."""
        match self.trained_for:
            case {"kind": "columns", "band": band}:
                return "columns", int(band)
            case {"kind": "ablation", "shape": shape, "size": size}:
                return f"{shape}s", int(size)
        return None


@dataclass(frozen=True, slots=True)
class CertificateEntry:
    """One certificate; `finer` names the entry whose votes contain all of its votes."""

    section: "CertificateSettings"
    finer: str | None = None


class CertificateSettings(Settings):
    """Settings of one section of certificates; every family's class derives from it.

    The fields here are those of all families; each class declares them in its own order.
    """

    __slots__ = ()

    smoke_caps: ClassVar[Mapping[str, int]] = {}  # by `--smoke`; its challenge included
    pixel_fields: ClassVar[tuple[str, ...]] = ()  # lengths that `--smoke` shrinks with images

    kind: str
    model: str
    num_items: int | None
    micro_batch: MicroBatch
    challenge: "ChallengeSettings | None"

    @property
    def planned_micro_batch(self) -> int:
        """Rows of a forward pass, as far as they are known before `auto` is measured."""
        own = self.micro_batch
        return int(default_of(type(self), "micro_batch") if own == "auto" else own)

    @property
    def denoiser_name(self) -> str | None:
        """The denoiser in front of the model: a model of the recipe or a folder on disk."""
        return None

    @property
    def noise_sigma(self) -> float | None:
        """Standard deviation of the Gaussian noise that is certified."""
        return None

    @property
    def denoising_sampler(self) -> SamplerBase | None:
        """Sampler of the denoiser."""
        return None

    def entries(self, name: str) -> Mapping[str, CertificateEntry]:
        """The certificates of the section called `name`, by their own names."""
        return {name: CertificateEntry(self)}

    def model_problems(self, model: TrainedModel) -> Iterator[Problem]:
        """Problems of these settings for this model."""
        return iter(())

    def device_problems(self, device: str) -> Iterator[Problem]:
        """Problems of these settings on workers with this kind of device, `cpu` or `cuda`."""
        return iter(())

    def max_votes(self, *, side: int) -> int:
        """An upper bound of the stored predictions per item of square images."""
        return 0

    def recorded(self, *, run_seed: int) -> dict[str, object]:
        """What the header of its votes records, as far as the number of votes depends on it."""
        return {**plain(self), "run_seed": run_seed}

    @property
    def denoiser_on_disk(self) -> str | None:
        """The denoiser on disk that the section names, with its format prefix."""
        name = self.denoiser_name
        return name if name is not None and is_on_disk(name) else None

    def identity(self, digest_of: Callable[[str], str]) -> dict[str, object]:
        """The inputs of the fingerprint; denoisers on disk are identified by their content."""
        values, used = plain(self), changed_fields(self)
        if source := self.denoiser_on_disk:
            values["denoiser"] = digest_of(source)
        values |= self._formula()
        return {key: value for key, value in values.items() if key not in LATER_KEYS or key in used}

    def _formula(self) -> dict[str, object]:
        """Versions of formulas that enter the fingerprint besides the settings."""
        return {}

    def warnings(self, trained: TrainedModel) -> Iterator[Warned]:
        """Values that are valid but probably a mistake for this model."""
        return iter(())

    @classmethod
    def keep_valid(cls, values: dict[str, Any]) -> None:
        """Make plain values consistent in place after `--smoke` capped each number."""
