"""What estimates of all stages share: a recipe's networks as shapes, speeds, hours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from components.certify.estimate import (
    ACCELERATORS,
    Estimate,
    Rate,
    fits,
    measured_rate,
    nominal_rate,
)
from components.core.errors import CasemateError
from components.models.costs import Costs, costs_of_shapes, network_of_shapes
from pipelines.recipe.facts import known_side
from pipelines.recipe.schema.recipe import Recipe

NUM_CLASSES = 1000  # while the files are not read; the head is a small share of all FLOPs
Row = dict[str, Any]  # of the estimate, as JSON has it


def image_side(recipe: Recipe) -> int:
    """The side of the images; an error if it is not known without the data."""
    side = known_side(recipe.data)
    if side is None:
        raise CasemateError("data.image_size", None, "is open; add --set data.image_size=224")
    return side


@dataclass(frozen=True, slots=True)
class CostedNetwork:
    """A network without weights, and the costs of one image."""

    net: nn.Module
    costs: Costs

    @staticmethod
    def of(
        architecture: str, *, side: int, channels: int, num_classes: int, options: Mapping[str, Any]
    ) -> "CostedNetwork":
        """The network that these settings describe, on images of this side."""
        size = {"image_size": side, "channels": channels}
        try:
            net = network_of_shapes(architecture, num_classes=num_classes, options=options, **size)
        except RuntimeError as error:  # raised by user code on the meta device
            remedy = f"needs values to be built, costs are counted from shapes alone: {error}"
            raise CasemateError("model.architecture", architecture, remedy) from error
        return CostedNetwork(net, costs_of_shapes(net, **size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Workers: on these accelerators, none: all known ones, or with a measured speed."""

    accelerators: Sequence[str]
    dtype: str
    num_workers: int
    passes_per_second: float | None = None

    def rates(self, nets: Sequence[nn.Module], *, flops_per_pass: float) -> dict[str, Rate]:
        """Speed at each place: as measured, or a share of each accelerator's peak."""
        if (speed := self.passes_per_second) is not None:
            if not speed > 0:
                remedy = "is not a speed; write a number above 0"
                raise CasemateError("--passes-per-second", speed, remedy)
            rate = measured_rate(
                flops_per_pass=flops_per_pass, passes_per_second=speed, where="as given"
            )
            return {"measured": rate}
        able = [name for name, known in ACCELERATORS.items() if self.dtype in known.peak_tflops]
        width = min(int(getattr(net, "num_features", 0)) for net in nets)
        # No accelerator has this dtype: the error of the first one lists those it has.
        return {
            name: nominal_rate(name, dtype=self.dtype, width=width)
            for name in self.accelerators or able or list(ACCELERATORS)[:1]
        }


def hours_at(where: str, found: Estimate, *, memory: int, further: float = 0.0) -> Row:
    """Hours at one place, with those of other work, and whether the memory suffices."""
    return {
        "where": where,
        "low": found.hours_low + further,
        "high": found.hours_high + further,
        "rate": found.rate.source,
        "fits": where not in ACCELERATORS or fits(memory, where),
    }
