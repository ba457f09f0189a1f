"""Evaluations of models in this process: counted where models are called, read to show progress.

A worker computes one unit of work at a time and is busy with it; another thread reads the count.
Results never depend on it.
"""


class Evaluations:
    """Number of images that models have evaluated so far."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0

    def add(self, num_images: int) -> None:
        """Count one pass of this many images."""
        self.total += num_images


EVALUATIONS = Evaluations()
