"""Passes of a network, from which times and costs are planned before anything runs.

In units of one forward pass F: a gradient with respect to the pixels costs another F, one with
respect to the weights two (pixels, then weights). So a plain training step costs 3 F, an FGSM step
5/3 of it, PGD-K (2K + 3) / 3 and TRADES-K (2K + 7) / 3.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCounts:
    """Images sent forward through a network, and backward."""

    forward: float = 0.0
    to_pixels: float = 0.0  # backward, weights frozen
    to_weights: float = 0.0  # backward, for the optimiser

    @property
    def cost(self) -> float:
        """In forward passes of one image."""
        return self.forward + self.to_pixels + 2 * self.to_weights

    def __add__(self, other: "PassCounts") -> "PassCounts":
        return PassCounts(
            forward=self.forward + other.forward,
            to_pixels=self.to_pixels + other.to_pixels,
            to_weights=self.to_weights + other.to_weights,
        )

    def __mul__(self, factor: float) -> "PassCounts":
        return PassCounts(
            forward=self.forward * factor,
            to_pixels=self.to_pixels * factor,
            to_weights=self.to_weights * factor,
        )

    __rmul__ = __mul__


NO_PASSES = PassCounts()
CLEAN = PassCounts(forward=1)
TRAINED = PassCounts(forward=1, to_weights=1)


def ascent(num_steps: float) -> PassCounts:
    """Steps along gradients of the pixels."""
    return PassCounts(forward=num_steps, to_pixels=num_steps)
