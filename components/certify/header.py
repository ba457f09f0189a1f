"""The header of a votes file: which model voted on which data under which settings.

It is read once into `VotesHeader`; `to_dict` returns the same keys and values.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

FieldTypes = Mapping[str, type | tuple[type, ...]]

HEADER_TYPES: FieldTypes = {
    "kind": str,
    "run_id": str,
    "model_digest": str,
    "dataset_digest": str,
    "num_classes": int,
    "image": dict,
    "settings": dict,
    "noise_impl": (str, type(None)),  # patch votes are not random: None there
    "num_items": int,
    "software": dict,
}
RECORDED_PACKAGES = ("casemate", "torch", "timm", "numpy", "scipy")  # keys of `software`
IMAGE_TYPES: FieldTypes = {"channels": int, "height": int, "width": int}


@dataclass(frozen=True, slots=True)
class ImageShape:
    """Shape of the images that were voted on."""

    channels: int
    height: int
    width: int

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)"""
        return self.height, self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class VotesHeader:
    """Identity of votes; `settings` is a record that only the family interprets."""

    kind: str
    run_id: str
    model_digest: str
    dataset_digest: str
    num_classes: int
    image: ImageShape
    settings: Mapping[str, Any]
    noise_impl: str | None
    num_items: int
    software: Mapping[str, str]
    others: Mapping[str, object] = field(
        default_factory=dict
    )  # keys of other versions, kept as read

    @classmethod
    def from_dict(cls, values: Any) -> "VotesHeader":
        """Read a header; `ValueError` names a field that is missing or of another type."""
        check_fields(values, HEADER_TYPES)
        check_fields(values["image"], IMAGE_TYPES, prefix="image.")
        if unknown := sorted(values["image"].keys() - IMAGE_TYPES.keys()):
            raise ValueError(f"has unknown fields in its header: image.{unknown[0]}")
        known = {name: values[name] for name in HEADER_TYPES if name != "image"}
        others = {name: value for name, value in values.items() if name not in HEADER_TYPES}
        return cls(image=ImageShape(**values["image"]), others=others, **known)

    def to_dict(self) -> dict[str, object]:
        """The header as JSON values."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "others"}
        return {**own, "image": asdict(self.image), **self.others}


def check_fields(values: object, types: FieldTypes, *, prefix: str = "") -> None:
    """Raise `ValueError` for a missing field, or one of another type; a bool is not a number."""
    for name, kind in types.items():
        if not isinstance(values, dict) or name not in values:
            raise ValueError(f"lacks the header field {prefix}{name}")
        fits = isinstance(values[name], kind) and not isinstance(values[name], bool)
        if not fits:
            raise ValueError(f"has {prefix}{name} = {values[name]!r} in its header")
