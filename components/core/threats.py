"""Threat models with their unit: every figure about robustness names one of them."""

from dataclasses import asdict, dataclass
from typing import ClassVar

UNIT = "pixels in [0, 1] at native size, before normalisation"


@dataclass(frozen=True, slots=True)
class LinfThreat:
    """Every pixel may move by at most `eps`."""

    kind: ClassVar[str] = "linf"
    eps: float


@dataclass(frozen=True, slots=True)
class L2Threat:
    """The image may move by a per-item l2 radius; `sigma` is the smoothing noise."""

    kind: ClassVar[str] = "l2"
    sigma: float


@dataclass(frozen=True, slots=True)
class PatchThreat:
    """Any square of m x m pixels, anywhere inside the image (never wrapping), any values."""

    kind: ClassVar[str] = "patch"
    patch_sizes: tuple[int, ...]


Threat = LinfThreat | L2Threat | PatchThreat


def describe(threat: Threat) -> dict[str, object]:
    """Plain values for JSON files and reports."""
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(threat).items()}
    return {"kind": threat.kind, "unit": UNIT, **fields}
