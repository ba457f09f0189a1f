"""Randomness addressed by what it is for, never by who draws it or when.

A draw depends on (run seed, stream, item id, index) alone, so any batch size, worker, order or
retry sees the same values. The method of an l2 certificate is part of the stream. Changing
`NOISE_IMPL` changes every l2 certificate: it is part of their identity.
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

NOISE_IMPL = "certv1-philox-numpy"
PLAIN_METHOD = "fixed"  # its streams have the bare names


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
    run_seed: int, stream: str, item_id: str, *, start: int, stop: int, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """(stop - start, ...) float32: the values of `standard_normal` at the indices start..stop-1.

    One generator is given key after key: making a new one costs as much as a small image's noise.
    """
    bits = np.random.Philox(key=0)
    fresh, generator = bits.state, np.random.Generator(bits)
    rows = np.empty((stop - start, *shape), dtype=np.float32)
    for row, index in zip(rows, range(start, stop), strict=True):
        key = stream_key(run_seed, stream, item_id, index)
        fresh["state"]["key"] = np.array([key % 2**64, key >> 64], dtype=np.uint64)
        bits.state = fresh  # counter 0, empty buffer
        generator.standard_normal(dtype=np.float32, out=row)
    return rows


def noise_impl(method: str) -> str:
    """How the draws of an l2 certificate are addressed, as its votes record it."""
    return NOISE_IMPL if method == PLAIN_METHOD else f"{NOISE_IMPL}-{method}"


def noise_stream(method: str, stream: str) -> str:
    """The stream from which a method draws what the votes call `stream`.

    No two methods share draws: who has seen those of one and would rather have used another must
    draw again, and votes that were drawn for another method show when they are drawn again.
    """
    return stream if method == PLAIN_METHOD else f"{method}-{stream}"


def generator_for(*address: object) -> "torch.Generator":
    """A CPU generator seeded by an address such as (run seed, "shuffle", epoch)."""
    import torch  # not above: reading a recipe needs no torch, and it takes seconds to import

    text = "|".join(["gen1", *map(str, address)])
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
    return torch.Generator().manual_seed(seed)
