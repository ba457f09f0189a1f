"""How attacks compute the passes of a model: precision, compiled code, rows of a pass.

The model is attacked in the precision that computes it: clean accuracy, attacked accuracy and
gradients belong to that function, and results name it. Sanity checks are in float32: they look for
gradients that round to zero.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from components.attacks.gradients import attack_mode, unchecked_gradient
from components.core.arithmetic import EXACT, Arithmetic, using
from components.core.micro_batch import fastest_micro_batch
from components.core.precision import (
    REDUCED,
    check_precision,
    reduced,
    resolve_precision,
    switches_of,
)
from components.core.settings import FLOAT32
from components.core.types import Images, Logits, LogitsFn
from components.models.compiling import compile_network
from components.models.fast import fast_forward
from components.models.pixels import PixelModel

# What `auto` may choose. Not bfloat16: signs of small gradients change with eight bits, so an
# attack may be weaker; a recipe must name it.
FASTEST = ("tf32",)
SIZES = (35, 70, 140, 280, 560, 1120)  # rows of a pass that are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackPasses:
    """The passes of all attacks of a step; every worker uses the same."""

    micro_batch: int
    compiled: bool
    precision: str = FLOAT32
    why_eager: str | None = None  # why a network that should be compiled is not

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @property
    def arithmetic(self) -> Arithmetic:
        """The switches of float32 products in a worker."""
        return switches_of(self.precision, EXACT)

    def logits_of(self, model: PixelModel) -> LogitsFn:
        """The model in this precision; logits are float32."""
        if self.precision not in REDUCED:
            return model
        device = model.mean.device.type

        def logits(x: Images) -> Logits:
            with reduced(self.precision, device):
                found: Logits = model(x)
            return found.float()

        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPasses:
    """The passes that a recipe asks for."""

    micro_batch: int | Literal["auto"]
    compiled: bool
    precision: str = FLOAT32

    @property
    def is_decided(self) -> bool:
        """Whether no worker must look at its device first."""
        return self.micro_batch != "auto" and self.precision == "float32" and not self.compiled

    @property
    def known(self) -> AttackPasses:
        """The passes as far as they are known without a device."""
        size = SIZES[0] if self.micro_batch == "auto" else self.micro_batch
        return AttackPasses(micro_batch=size, compiled=False)


def decided_passes(asked: AskedPasses, model: PixelModel, x: Images) -> AttackPasses:
    """What `auto` means on the device of the model, and whether the network compiles.

    `x` are some images; the rows of a pass are measured with one input gradient.
    """
    if asked.is_decided:
        return asked.known
    device = model.mean.device.type
    precision = resolve_precision(asked.precision, device, fastest=FASTEST)
    check_precision(precision, device, key="attack.precision")
    found = replace(asked.known, precision=precision)
    with attack_mode(model), fast_forward(model.net), using(found.arithmetic):
        if asked.compiled:
            why = compile_network(model, rows=found.micro_batch)
            found = replace(found, compiled=why is None, why_eager=why)
        if asked.micro_batch == "auto":
            found = replace(found, micro_batch=_fastest(found, model, x))
    return found


def _fastest(passes: AttackPasses, model: PixelModel, x: Images) -> int:
    logits_of = passes.logits_of(model)

    def run(size: int) -> object:
        rows = x[torch.arange(size, device=x.device) % len(x)]
        return unchecked_gradient(logits_of, rows, torch.zeros_like(rows[:, 0, 0, 0]).long())

    return fastest_micro_batch(run, SIZES, device=x.device.type)
