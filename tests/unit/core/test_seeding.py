"""The noise is part of every l2 certificate: these values may never move."""

import hashlib

import numpy as np
import pytest
import torch

from components.core.noise_streams import NOISE_IMPL, noise_impl, noise_stream
from components.core.seeding import (
    DrawSpan,
    generator_for,
    standard_normal,
    standard_normals,
    stream_key,
)

ITEM = "cifar10-test-000000"
SHAPE = (3, 32, 32)


@pytest.mark.parametrize(
    ("stream", "index", "key", "first", "sha256"),
    [
        (
            "estimate",
            0,
            261138409805527144089350210457518748397,
            [0.18505916, -0.79094273, -0.17255646, 0.63524532],
            "2e5de626503a6d17",
        ),
        (
            "select",
            0,
            276750129216434604290435040649361088705,
            [-0.38232291, -0.20195827, 0.05890113, 1.29201519],
            "d44d1731478be762",
        ),
        ("estimate", 1, None, None, "55ede75c23b4d449"),
    ],
)
def test_noise_has_its_golden_values(stream, index, key, first, sha256):
    noise = standard_normal(0, stream, ITEM, index, SHAPE)
    assert noise.dtype == np.float32
    assert hashlib.sha256(noise.astype("<f4").tobytes()).hexdigest().startswith(sha256)
    if key is not None:
        assert stream_key(0, stream, ITEM, index) == key
        assert noise.ravel()[:4] == pytest.approx(first, abs=5e-9)  # printed with 8 decimals


def test_key_is_the_head_of_the_address_digest():
    digest = hashlib.sha256(f"certv1|0|estimate|{ITEM}|0".encode()).hexdigest()
    assert digest.startswith("ed32ccdff8ececd7f982fb8da56d75c4")
    assert stream_key(0, "estimate", ITEM, 0) == int.from_bytes(
        bytes.fromhex(digest[:32]), "little"
    )


def test_every_part_of_the_address_changes_the_noise():
    addresses = [
        (0, "estimate", "a", 0),
        (1, "estimate", "a", 0),
        (0, "select", "a", 0),
        (0, "estimate", "b", 0),
        (0, "estimate", "a", 1),
    ]
    draws = {standard_normal(*address, (8,)).tobytes() for address in addresses}
    assert len(draws) == len(addresses)


def test_methods_share_no_draws_and_the_fixed_ones_have_the_published_streams():
    names = ("select", "estimate")
    assert tuple(noise_stream("fixed", name) for name in names) == names
    methods = ("fixed", "sequential", "randomized")
    assert len({noise_stream(method, name) for method in methods for name in names}) == 6
    assert noise_impl("fixed") == NOISE_IMPL
    assert len({noise_impl(method) for method in methods}) == 3


def test_generators_repeat_by_address_and_differ_otherwise():
    def draw(*address):
        return torch.rand(8, generator=generator_for(*address))

    assert torch.equal(draw(7, "shuffle", 0), draw(7, "shuffle", 0))
    assert not torch.equal(draw(7, "shuffle", 0), draw(7, "shuffle", 1))
    assert not torch.equal(draw(7, "shuffle", 0), draw(7, "start", 0))


def test_a_rekeyed_generator_gives_the_values_of_fresh_ones():
    shape = (1, 3, 5)  # an odd number of values: a buffer left over would shift the next draw
    rows = standard_normals(DrawSpan(4, "estimate", "item", 7, 12), shape=shape)
    for row, index in zip(rows, range(7, 12), strict=True):
        assert np.array_equal(row, standard_normal(4, "estimate", "item", index, shape))
