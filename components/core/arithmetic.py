"""Float32 arithmetic of this process: TF32 and cuDNN switches, set in one place.

TF32 rounds the inputs of products on recent GPUs to 10 bits, and cuDNN may choose another algorithm
from one start to the next: both change votes. torch has two interfaces to TF32 and raises an error
where they disagree, so both are set. On CPUs these switches change nothing but oneDNN's, which is
always set to full precision.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn

FULL, TF32 = "ieee", "tf32"  # torch's words
IN_CUDNN: tuple[Any, ...] = (cudnn.conv, cudnn.rnn)  # type: ignore[attr-defined]  # set at import
ON_CPU: tuple[Any, ...] = (mkldnn.matmul, mkldnn.conv)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Switches of float32 products on GPUs; a record of votes has the same keys."""

    tf32_matmul: bool
    tf32_conv: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool

    def to_dict(self) -> dict[str, bool]:
        """The switches as JSON values."""
        return asdict(self)

    @classmethod
    def read(cls, values: Any) -> "Arithmetic":
        """The switches of a record; `ValueError` if it is not one of this version."""
        known = cls.__dataclass_fields__
        if not isinstance(values, dict) or set(values) != set(known):
            raise ValueError(f"are not the switches {', '.join(known)}")
        if not all(isinstance(value, bool) for value in values.values()):
            raise ValueError("are neither on nor off")
        return cls(**values)


EXACT = Arithmetic(  # of attacks and votes
    tf32_matmul=False, tf32_conv=False, cudnn_benchmark=False, cudnn_deterministic=True
)
TRAINING = Arithmetic(  # as torch starts
    tf32_matmul=False, tf32_conv=True, cudnn_benchmark=False, cudnn_deterministic=False
)


def use(chosen: Arithmetic) -> None:
    """Set all switches of this process."""
    _set_tf32(matmul=chosen.tf32_matmul, conv=chosen.tf32_conv)
    for part in ON_CPU:
        part.fp32_precision = FULL
    cudnn.benchmark = chosen.cudnn_benchmark
    cudnn.deterministic = chosen.cudnn_deterministic


def in_use() -> Arithmetic:
    """The switches as they are."""
    return Arithmetic(
        tf32_matmul=cuda.matmul.fp32_precision == TF32,
        tf32_conv=IN_CUDNN[0].fp32_precision == TF32,
        cudnn_benchmark=cudnn.benchmark,
        cudnn_deterministic=cudnn.deterministic,
    )


@contextmanager
def using(chosen: Arithmetic) -> Iterator[None]:
    """Set all switches inside the context; the caller's are restored."""
    before, on_cpu, legacy = in_use(), [part.fp32_precision for part in ON_CPU], _legacy_matmul()
    use(chosen)
    try:
        yield
    finally:
        use(before)
        for part, precision in zip(ON_CPU, on_cpu, strict=True):
            part.fp32_precision = precision
        if legacy:
            torch.set_float32_matmul_precision(legacy)


def _legacy_matmul() -> str | None:
    """The older switch of all matrix products; None where the caller has set parts of it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_tf32(*, matmul: bool, conv: bool) -> None:
    """The older interface first: it resets what the newer one has set."""
    cuda.matmul.allow_tf32, cudnn.allow_tf32 = matmul, conv
    cuda.matmul.fp32_precision = TF32 if matmul else FULL
    for part in IN_CUDNN:
        part.fp32_precision = TF32 if conv else FULL


def is_usable(device: str) -> bool:
    """Whether torch can compute on a device, e.g. `cuda`, on this machine."""
    return device == "cpu" or (device == "cuda" and torch.cuda.is_available())
