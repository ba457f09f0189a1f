"""Addresses of the draws of l2 certificates. Light to import: fingerprints depend on it.

Changing a name here changes every l2 certificate: it is part of their identity. Two generators
draw: `numpy` (Philox4x64 and ziggurat, on the host) and `philox` (`core/philox.py`, on the device).
"""

from collections.abc import Mapping
from typing import Literal

NoiseKind = Literal["numpy", "philox"]
NoiseChoice = Literal["auto", "numpy", "philox"]

NOISE_IMPL = "certv1-philox-numpy"
NOISE_IMPLS: Mapping[NoiseKind, str] = {"numpy": NOISE_IMPL, "philox": "certv1-philox4x32-icdf"}
PLAIN_METHOD = "fixed"  # its stream names have no prefix


def noise_impl(method: str, kind: NoiseKind = "numpy") -> str:
    """Address scheme of the draws of an l2 certificate, as recorded with its votes."""
    own = NOISE_IMPLS[kind]
    return own if method == PLAIN_METHOD else f"{own}-{method}"


def noise_kind(recorded: str | None, method: str) -> NoiseKind | None:
    """The generator of a recorded address scheme; None if it is not one of this method."""
    return next((kind for kind in NOISE_IMPLS if noise_impl(method, kind) == recorded), None)


def resolve_noise(asked: NoiseChoice, device: str) -> NoiseKind:
    """`asked`; for `auto` the generator that is fastest for a model on this device."""
    if asked == "auto":
        return "numpy" if device == "cpu" else "philox"
    return asked


def noise_stream(method: str, stream: str) -> str:
    """Stream from which a method draws; the votes record it as `stream`.

    Methods never share draws: choosing another method after seeing votes needs new draws, and a
    re-run detects votes of another method.
    """
    return stream if method == PLAIN_METHOD else f"{method}-{stream}"
