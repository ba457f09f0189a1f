"""Addressed randomness: a draw depends on its purpose, not on the worker or the time.

A draw depends on (run seed, stream, item id, index) alone, so any batch size, worker, order or
retry sees the same values. The method of an l2 certificate is part of the stream
(`core/noise_streams.py`).
"""

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class DrawSpan(NamedTuple):
    """Draws `start..stop-1` of one stream of an item."""

    run_seed: int
    stream: str
    item_id: str
    start: int
    stop: int

    def stream_keys(self) -> Iterator[int]:
        """The key of every draw."""
        for index in range(self.start, self.stop):
            yield stream_key(self.run_seed, self.stream, self.item_id, index)

    @property
    def size(self) -> int:
        """Number of draws."""
        return self.stop - self.start


def stream_key(run_seed: int, stream: str, item_id: str, index: int) -> int:
    """128-bit Philox key: the first 16 bytes, little-endian, of SHA-256 over the address."""
    address = f"certv1|{run_seed}|{stream}|{item_id}|{index}"
    return int.from_bytes(hashlib.sha256(address.encode()).digest()[:16], "little")


def standard_normal(
    run_seed: int, stream: str, item_id: str, index: int, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Counter-based float32 normals of one address, in C order."""
    bits = np.random.Philox(key=stream_key(run_seed, stream, item_id, index))
    return np.random.Generator(bits).standard_normal(shape, dtype=np.float32)


def standard_normals(
    draws: DrawSpan, *, shape: tuple[int, ...], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """(N, ...) float32: the values of `standard_normal` at the N indices of these draws.

    One generator is re-keyed: constructing a new one takes as long as the noise of a small image.
    They are written to `out`, contiguous rows, where it is given.
    """
    bits = np.random.Philox(key=0)
    fresh, generator = bits.state, np.random.Generator(bits)
    rows = np.empty((draws.size, *shape), dtype=np.float32) if out is None else out
    for row, key in zip(rows, draws.stream_keys(), strict=True):
        fresh["state"]["key"] = np.array([key % 2**64, key >> 64], dtype=np.uint64)
        bits.state = fresh  # counter 0, empty buffer
        generator.standard_normal(dtype=np.float32, out=row)
    return rows


def device_normals(
    draws: DrawSpan, *, shape: tuple[int, ...], device: "torch.device | str"
) -> "torch.Tensor":
    """(N, ...) float32 normals of `core/philox.py`, made on `device`, the same on all.

    Their keys are those of `standard_normal`; their values are others.
    """
    import torch  # here, as below

    from components.core.philox import fill_normals
    from components.core.transfers import sent

    keys = b"".join(key.to_bytes(16, "little") for key in draws.stream_keys())
    words = torch.from_numpy(np.frombuffer(keys, dtype="<u4").astype(np.int64)).view(-1, 4)
    rows = torch.empty(draws.size, *shape, device=device)
    fill_normals(rows.view(draws.size, -1), sent(words, device))
    return rows


def generator_for(*address: object) -> "torch.Generator":
    """A CPU generator seeded by an address such as (run seed, "shuffle", epoch)."""
    import torch  # here, because torch takes seconds to import and recipes are read without it

    text = "|".join(["gen1", *map(str, address)])
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
    return torch.Generator().manual_seed(seed)
