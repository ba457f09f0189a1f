"""Cost of a certification in advance: passes, FLOPs, hours, memory.

seconds = items * passes * flops / rate / workers / eta + start + one unit as tail. The rate is best
measured on the real device; without one it is a share of the accelerator's peak, taken from
published timings on an A100. Such an estimate is good to about a factor of two.

Symbols: d width, L tokens of a sequence, K bands. One multiply-accumulate is two FLOPs here, as on
hardware sheets: double what `components.models.costs` counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from components.core.errors import CasemateError

EFFICIENCY = 0.95  # eta: share of time that independent units keep workers busy
VOTE_BYTES = 2  # one uint16 per draw or band, always kept
DTYPE_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Dense peaks of the vendor's sheet in TFLOP/s (no sparsity), and memory in GB."""

    memory_gb: float
    peak_tflops: Mapping[str, float]


ACCELERATORS: Mapping[str, Accelerator] = {
    "T4": Accelerator(16, {"fp32": 8.1, "fp16": 65}),
    "V100": Accelerator(32, {"fp32": 15.7, "fp16": 125}),
    "L4": Accelerator(24, {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121}),
    "A10": Accelerator(24, {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125}),
    "A100": Accelerator(80, {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}),
    "H100": Accelerator(80, {"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989}),
}


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a job, independent of the hardware."""

    num_items: int
    passes_per_item: int  # forward passes = votes kept
    flops_per_item: float

    @property
    def passes(self) -> int:
        """Forward passes of the whole job."""
        return self.num_items * self.passes_per_item

    @property
    def flops(self) -> float:
        """FLOPs of the whole job."""
        return self.num_items * self.flops_per_item


class Rate(NamedTuple):
    """Useful FLOPs per second of one worker, and where the number comes from."""

    flops_per_second: float
    source: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated hours as a range: how early items stop is not known in advance."""

    passes: int
    flops: float
    rate: Rate
    num_workers: int
    hours_low: float
    hours_high: float
    votes_bytes: int


def l2_work(
    *,
    num_items: int,
    num_select: int,
    num_estimate: int,
    classifier_flops: float,
    denoiser_flops: float = 0.0,
    denoiser_calls: int = 1,
) -> Work:
    """Randomised smoothing: n0 + n draws per item, each through the denoiser, then the classifier.

    One call of the denoiser is one-shot denoising, 35 the deterministic sampler with 18 levels.
    """
    draws = num_select + num_estimate
    return Work(num_items, draws, draws * (denoiser_calls * denoiser_flops + classifier_flops))


def patch_work(
    *,
    num_items: int,
    bands_of_length: Mapping[int, int],
    width: int,
    depth: int,
    num_classes: int,
    token_inputs: int,
    num_prefix: int = 1,
) -> Work:
    """Votes over ablations by a vision transformer that drops hidden tokens.

    `bands_of_length`: kept tokens without prefix -> number of bands; `token_inputs`: values that
    embed into one token, 3 * 16 * 16 for patches of 16. Kept tokens are embedded once per band.
    """
    tokens = sum(length * bands for length, bands in bands_of_length.items())
    embedding = 2 * token_inputs * width * tokens
    bands = sum(bands_of_length.values())
    blocks = sum(
        number * vit_flops(length + num_prefix, width=width, depth=depth)
        for length, number in bands_of_length.items()
    )
    return Work(num_items, bands, embedding + blocks + 2 * width * num_classes * bands)


def vit_flops(length: int, *, width: int, depth: int) -> int:
    """Blocks of a ViT on one sequence: depth * (24 L d^2 + 4 L^2 d)."""
    return depth * (24 * length * width**2 + 4 * length**2 * width)


def nominal_rate(accelerator: str, *, dtype: str, width: int) -> Rate:
    """Peak times the share that published runs reached: small matrices use a device poorly.

    Shares of the TF32 peak of an A100, from smoothed and plain ViT-T / S / B timings.
    """
    if accelerator not in ACCELERATORS:
        names = ", ".join(ACCELERATORS)
        raise CasemateError("accelerator", accelerator, f"is not one of {names}; or give a rate")
    peaks = ACCELERATORS[accelerator].peak_tflops
    if dtype not in peaks:
        remedy = f"is not computed by {accelerator}, which has {', '.join(peaks)}"
        raise CasemateError("dtype", dtype, remedy)
    share = 0.25 if width >= 768 else 0.15 if width >= 384 else 0.08
    source = f"{share:.0%} of the {dtype} peak of one {accelerator}, not measured"
    return Rate(share * peaks[dtype] * 1e12, source)


def measured_rate(*, flops_per_pass: float, passes_per_second: float, where: str) -> Rate:
    """The rate of timed passes of the real networks on the real device."""
    if not (flops_per_pass > 0 and passes_per_second > 0):
        raise ValueError(f"need positive numbers, got {flops_per_pass=}, {passes_per_second=}")
    return Rate(flops_per_pass * passes_per_second, f"measured: {passes_per_second:g}/s {where}")


def estimate(
    work: Work,
    rate: Rate,
    *,
    num_workers: int = 1,
    least_share: float = 1.0,
    start_seconds: float = 0.0,
    unit_seconds: float = 0.0,
) -> Estimate:
    """Hours of the job; `least_share` is the smallest share of the passes if items stop early.

    `start_seconds`: loading and compiling, once per worker; `unit_seconds`: one unit of work, for
    which the other workers wait at the end.
    """
    if num_workers < 1 or not 0 < least_share <= 1:
        raise ValueError(f"need a worker and a share in (0, 1], got {num_workers=}, {least_share=}")
    busy = work.flops / rate.flops_per_second / num_workers / EFFICIENCY
    idle = start_seconds + unit_seconds
    return Estimate(
        passes=work.passes,
        flops=work.flops,
        rate=rate,
        num_workers=num_workers,
        hours_low=(least_share * busy + idle) / 3600,
        hours_high=(busy + idle) / 3600,
        votes_bytes=VOTE_BYTES * work.passes,
    )


def device_bytes(*, params: int, activation_bytes: int, micro_batch: int, dtype: str) -> int:
    """Memory of one worker: the weights, and at most what autograd would keep of a micro-batch.

    `activation_bytes` is that of one float32 image, as `components.models.costs` counts it; passes
    without gradient stay below it: an upper bound, apart from the libraries' own workspace.
    """
    if dtype not in DTYPE_BYTES:
        raise CasemateError("dtype", dtype, f"is not one of {', '.join(DTYPE_BYTES)}")
    width = DTYPE_BYTES[dtype]
    return params * width + micro_batch * activation_bytes * width // DTYPE_BYTES["fp32"]


def fits(memory_bytes: int, accelerator: str) -> bool:
    """Whether this much memory fits, with a tenth of the device reserved for libraries."""
    if accelerator not in ACCELERATORS:
        names = ", ".join(ACCELERATORS)
        raise CasemateError("accelerator", accelerator, f"is not one of {names}")
    return memory_bytes <= 0.9 * ACCELERATORS[accelerator].memory_gb * 1e9
