"""ModelSpec: everything needed to rebuild a model around its weights, as plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from components.core.errors import CasemateError
from components.core.settings import default_of
from components.models.settings import ModelSettings

TOKEN_POLICIES = ("drop", "mask")
UPSAMPLE_MODES = ("nearest", "bilinear", "bicubic")
# Values of keys that model.json lacks. Part of the file format, unlike defaults.
ABSENT_KEYS = {"upsample_mode": "nearest", "token_policy": "mask"}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Identity of a classifier of native [0, 1] pixels.

    `token_policy` is the treatment of tokens without a visible pixel: `drop` removes them from the
    sequence, `mask` leaves them black. A model tuned one way and certified the other loses many
    points of certified accuracy, so the policy is stored with the weights.
    """

    architecture: str
    num_classes: int
    channels: int
    image_size: int  # native side, of masks, noise, attacks and certificates
    mean: tuple[float, ...]
    std: tuple[float, ...]
    upsample: int | None = None  # side that the network sees; None = native
    upsample_mode: str = default_of(ModelSettings, "upsample_mode")
    token_policy: str = default_of(ModelSettings, "token_policy")
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
        self._check_upsampling()

    def _check_upsampling(self) -> None:
        mode = self.upsample_mode
        if mode not in UPSAMPLE_MODES:
            raise ValueError(f"upsample_mode must be one of {UPSAMPLE_MODES}, got {mode!r}")
        if mode != "nearest" and self.upsample is None:
            raise CasemateError("model.upsample_mode", mode, "does nothing without model.upsample")
        if mode == "nearest" and self.upsample is not None and self.upsample < self.image_size:
            raise CasemateError(
                "model.upsample",
                self.upsample,
                f"is below the image side {self.image_size}: nearest neighbour would drop pixels; "
                "set model.upsample_mode: bilinear to resize",
            )

    @property
    def network_size(self) -> int:
        """Side of the images that the bare network sees."""
        return self.upsample or self.image_size

    def check_image(self, shape: Sequence[int]) -> None:
        """Raise an error for (C, H, W) images of another shape: nothing is resized silently."""
        expected = (self.channels, self.image_size, self.image_size)
        if tuple(shape) != expected:
            raise CasemateError(
                "image",
                "x".join(map(str, shape)),
                f"(channels x height x width) is not the {'x'.join(map(str, expected))} "
                f"that this {self.architecture} takes",
            )

    def check_classes(self, num_classes: int) -> None:
        """Raise an error for data with another number of classes."""
        if num_classes != self.num_classes:
            raise CasemateError(
                "classes",
                num_classes,
                f"in the data, but this {self.architecture} has {self.num_classes}",
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for model.json; `upsample_mode` only where it is not `nearest`.

        The dictionary is part of the model's digest, and digests of models older than that key
        must not change.
        """
        values = {
            k: list(v) if isinstance(v, tuple) else dict(v) if isinstance(v, Mapping) else v
            for k, v in asdict(self).items()
        }
        if self.upsample_mode == ABSENT_KEYS["upsample_mode"]:
            del values["upsample_mode"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "model.json") -> "ModelSpec":
        """The spec from the values of `to_dict`; errors name unknown or missing keys."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise CasemateError(
                source, unknown[0], f"is not a ModelSpec key; known: {sorted(known)}"
            )
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in {**ABSENT_KEYS, **values}.items()
        }
        try:
            return cls(**plain)
        except (TypeError, ValueError) as error:
            raise CasemateError(source, "spec", f"cannot be read: {error}") from error
