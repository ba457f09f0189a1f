"""Random numbers of one item in one epoch: a pure function of the address, thread-safe.

An address is (run seed, epoch, name, stream). Streams are independent, so switching one kind of
augmentation on leaves the draws of the others as they were.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from components.core.seeding import generator_for
from components.core.types import FloatArray


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of some names (items, or copies of items), row by row."""

    names: tuple[str, ...]
    run_seed: int
    epoch: int

    def words(self) -> Tensor:
        """(B, 3) int64: three independent uniform 32-bit integers per name.

        The first scheme, kept because published figures depend on its crops and flips.
        """
        prefix = hashlib.sha256(f"augment1|{self.run_seed}|{self.epoch}|".encode())
        rows = bytearray()
        for name in self.names:
            state = prefix.copy()
            state.update(name.encode())
            rows += state.digest()[:12]
        table = np.frombuffer(bytes(rows), dtype="<u4").astype(np.int64)
        return torch.from_numpy(table.reshape(-1, 3))

    def uniforms(self, stream: str, count: int) -> FloatArray:
        """(B, count) independent uniforms on the open interval (0, 1), on a grid of 2^-52.

        SHAKE-256 gives any number of bytes per name in about the time of one hash; a seeded
        generator per name costs twenty times as much.
        """
        prefix = hashlib.shake_256(f"augment2|{stream}|{self.run_seed}|{self.epoch}|".encode())
        rows = bytearray()
        for name in self.names:
            state = prefix.copy()
            state.update(name.encode())
            rows += state.digest(8 * count)
        table = np.frombuffer(bytes(rows), dtype="<u8").reshape(-1, count)
        return ((table >> 12).astype(np.float64) + 0.5) * 2.0**-52

    def generator(self, stream: str, row: int) -> torch.Generator:
        """A CPU generator for the name in this row, for draws of image size."""
        return generator_for(self.run_seed, f"augment-{stream}", self.epoch, self.names[row])

    def only(self, rows: Tensor) -> "Draws":
        """The same draws for some of the rows."""
        names = tuple(self.names[row] for row in rows.tolist())
        return Draws(names, self.run_seed, self.epoch)
