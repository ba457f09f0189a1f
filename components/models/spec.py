"""ModelSpec: everything needed to rebuild a model around its weights, as plain values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from components.core.errors import CasemateError

TOKEN_POLICIES = ("drop", "mask")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Identity of a classifier of native [0, 1] pixels.

    `token_policy` says what happens to tokens without a visible pixel: `drop` removes them from the
    sequence, `mask` leaves them black. A model tuned one way and certified the other loses many
    points of certified accuracy, so the policy travels with the weights.
    """

    architecture: str
    num_classes: int
    channels: int
    image_size: int  # native side; masks, noise, attacks and certificates live here
    mean: tuple[float, ...]
    std: tuple[float, ...]
    upsample: int | None = None  # side that the network sees; None = native
    token_policy: str = "mask"
    options: Mapping[str, Any] = field(default_factory=dict)  # passed to the architecture
    trained_for: Mapping[str, Any] = field(
        default_factory=dict
    )  # objective, e.g. ablation and width

    def __post_init__(self) -> None:
        if self.token_policy not in TOKEN_POLICIES:
            raise ValueError(
                f"token_policy must be one of {TOKEN_POLICIES}, got {self.token_policy!r}"
            )
        if not len(self.mean) == len(self.std) == self.channels:
            raise ValueError(f"mean and std need {self.channels} entries, one per channel")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for model.json."""
        return {
            k: list(v) if isinstance(v, tuple) else dict(v) if isinstance(v, Mapping) else v
            for k, v in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "model.json") -> "ModelSpec":
        """The spec that `to_dict` wrote; unknown or missing keys are named."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise CasemateError(
                source, unknown[0], f"is not a ModelSpec key; known: {sorted(known)}"
            )
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        try:
            return cls(**plain)
        except (TypeError, ValueError) as error:
            raise CasemateError(source, "spec", f"cannot be read: {error}") from error
