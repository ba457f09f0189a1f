"""Counts the passes of a model while it runs, as `components.core.pass_counts` plans them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from components.core.pass_counts import PassCounts


class CountedPasses:
    """Images that a model has seen, forward and backward."""

    def __init__(self) -> None:
        self.forward, self.to_pixels, self.to_weights = 0, 0, 0

    @property
    def counts(self) -> PassCounts:
        return PassCounts(
            forward=self.forward, to_pixels=self.to_pixels, to_weights=self.to_weights
        )

    def _after_forward(self, model: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        count = len(output)
        self.forward += count
        if not output.requires_grad:
            return
        trained = any(parameter.requires_grad for parameter in model.parameters())

        def back(gradient: Tensor) -> None:
            if trained:
                self.to_weights += count
            else:
                self.to_pixels += count

        output.register_hook(back)  # type: ignore[no-untyped-call]


@contextmanager
def counted_passes(model: nn.Module) -> Iterator[CountedPasses]:
    """Count the passes of `model` inside the context; hooks on its parts stay as they are."""
    found = CountedPasses()
    handle = model.register_forward_hook(found._after_forward)
    try:
        yield found
    finally:
        handle.remove()
