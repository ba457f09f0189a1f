"""ModelSpec: everything needed to rebuild a model around its weights, as plain values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from math import isfinite
from typing import Any, cast

from components.core.errors import CasemateError
from components.core.settings import default_of
from components.models.settings import ModelSettings

TOKEN_POLICIES = ("drop", "mask")
UPSAMPLE_MODES = ("nearest", "bilinear", "bicubic")
MOST = 2**16  # classes, channels, pixels of a side
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
        if not isinstance(values, Mapping):
            raise CasemateError(source, "spec", "is not a mapping; is this a model folder?")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise CasemateError(
                source, unknown[0], f"is not a ModelSpec key; known: {sorted(known)}"
            )
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in {**ABSENT_KEYS, **values}.items()
        }
        for key, (fits, expected) in PLAUSIBLE.items():
            if key in plain and not fits(plain[key]):
                raise CasemateError(f"{source}: {key}", _short(plain[key]), f"is not {expected}")
        try:
            return cls(**plain)
        except (TypeError, ValueError) as error:
            raise CasemateError(source, "spec", f"cannot be read: {error}") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 100 else f"{text[:97]}..."


def _is_count(value: object, *, least: int) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and least <= cast(int, value) <= MOST


def _are_numbers(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(v, int | float) and isfinite(v) for v in value
    )


_SIDE = f"a number of pixels from 1 to {MOST:,}"
# Model folders come from anywhere: absurd values would fill the memory before a tensor is compared.
PLAUSIBLE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "architecture": (lambda value: isinstance(value, str), "a name"),
    "num_classes": (partial(_is_count, least=0), f"a number from 0 to {MOST:,}"),
    "channels": (partial(_is_count, least=1), f"a number from 1 to {MOST:,}"),
    "image_size": (partial(_is_count, least=1), _SIDE),
    "upsample": (lambda value: value is None or _is_count(value, least=1), _SIDE),
    "mean": (_are_numbers, "a list of numbers"),
    "std": (lambda value: _are_numbers(value) and 0 not in value, "a list of numbers above 0"),
    "options": (lambda value: isinstance(value, Mapping), "a mapping"),
    "trained_for": (lambda value: isinstance(value, Mapping), "a mapping"),
}
