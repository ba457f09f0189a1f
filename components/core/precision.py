"""Precision of a stage's passes as a policy: what `auto` means, and where a precision is fast.

| precision | products of a network | fast on |
|---|---|---|
| `float32` | float32 | every device |
| `tf32` | float32, factors rounded to 10 bits | GPUs from compute capability 8.0 on |
| `bfloat16` | factors of 8 bits (autocast) | the same, and processors with bfloat16 units |
| `float16` | factors of 11 bits (autocast) | GPUs |

Another precision is another function: results record the one that was used, never `auto`. Recipes
name one by `Precision` of `core/settings.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from components.core.arithmetic import Arithmetic
from components.core.errors import CasemateError

REDUCED = ("bfloat16", "float16")  # by autocast
TENSOR_CORES = (8, 0)  # compute capability of the first GPUs with tf32 and bfloat16


def resolve_precision(asked: str, device: str, *, fastest: Sequence[str]) -> str:
    """`asked`; for `auto` the first of `fastest` that is fast on the device, else float32.

    `fastest` lists what the stage can justify, the fastest first. On a CPU `auto` is float32:
    reduced precision was never measured to be faster on one.
    """
    if asked != "auto":
        return asked
    if device == "cpu":
        return "float32"
    return next((precision for precision in fastest if is_fast(precision, device)), "float32")


def is_fast(precision: str, device: str) -> bool:
    """Whether this process computes in `precision` on `device` without emulation."""
    if precision == "float32":
        return True
    if device == "cpu":
        units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return precision == "bfloat16" and units
    if device != "cuda" or not torch.cuda.is_available():
        return False
    return precision == "float16" or torch.cuda.get_device_capability() >= TENSOR_CORES


def check_precision(precision: str, device: str, *, key: str) -> None:
    """Raise an error for a precision that the device emulates: ten times as slow as float32."""
    if not is_fast(precision, device):
        what = "processor" if device == "cpu" else "GPU"
        raise CasemateError(key, precision, f"is not supported by this {what}; use float32")


def switches_of(precision: str, base: Arithmetic) -> Arithmetic:
    """The switches of float32 arithmetic: `base`, with TF32 on where the precision is tf32."""
    if precision != "tf32":
        return base
    return replace(base, tf32_matmul=True, tf32_conv=True)


@contextmanager
def reduced(precision: str, device: str) -> Iterator[None]:
    """Inside the context networks compute in 16 bits if `precision` says so, else in float32.

    Weights stay float32. TF32 is a switch of the process, see `switches_of`.
    """
    is_reduced = precision in REDUCED
    if not is_reduced and not torch.amp.is_autocast_available(device):
        yield
        return
    dtype = getattr(torch, precision) if is_reduced else torch.bfloat16
    with torch.autocast(device, dtype=dtype, enabled=is_reduced):
        yield
