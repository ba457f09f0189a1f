"""Normals that every device must make alike: published vectors, an oracle, cuts, their law."""

import hashlib

import numpy as np
import pytest
import torch
from scipy import special, stats

from components.core import philox
from components.core.philox import fill_normals, normals_of, words
from components.core.seeding import DrawSpan, device_normals, standard_normals

ITEM, SHAPE = "cifar10-test-000000", (3, 32, 32)
ONES = 0xFFFFFFFF


def words_of(*values):
    return [torch.tensor([value]) for value in values]


def made(start, stop, shape=SHAPE, stream="estimate"):
    return device_normals(DrawSpan(0, stream, ITEM, start, stop), shape=shape, device="cpu")


def random_words(count, seed=0):
    made = np.random.default_rng(seed).integers(0, 2**32, (2, count))
    return torch.from_numpy(made).unbind()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    found = philox.philox(words_of(*counter), words_of(*key))
    assert [int(word) for word in found] == list(expected)


def test_a_row_is_addressed_by_all_of_its_key():
    """Key, upper counter and lower counter: as the words of one block."""
    keys = torch.tensor([[5, 6, 7, 8]])
    block = words(keys, first=9, count=1)[0, 0]
    alone = philox.philox(words_of(9, 0, 7, 8), words_of(5, 6))
    assert block.tolist() == [int(word) for word in alone]


def test_cuts_give_equal_numbers(monkeypatch):
    keys = torch.from_numpy(np.random.default_rng(1).integers(0, 2**32, (5, 4)))
    whole = torch.empty(5, 101)
    fill_normals(whole, keys)
    for most in (2, 14, 100, 2**12):
        monkeypatch.setattr(philox, "NUMBERS_AT_ONCE", {"cpu": most})
        cut = torch.empty(5, 101)
        fill_normals(cut[:2], keys[:2])
        fill_normals(cut[2:], keys[2:])
        assert torch.equal(cut, whole)
    monkeypatch.undo()
    short = torch.empty(5, 60)
    fill_normals(short, keys)
    assert torch.equal(short, whole[:, :60])
    parts = [words(keys, first=first, count=7) for first in (0, 7)]
    assert torch.equal(torch.cat(parts, 1), words(keys, first=0, count=14))


def test_numbers_are_those_of_the_exact_inverse_cdf():
    high, low = random_words(200_000)
    extreme = torch.tensor([0, 0, 1, 2**31 - 1, 2**31, ONES]), torch.tensor([0, 1, 0, ONES, 0, 0])
    high, low = torch.cat([high, extreme[0]]), torch.cat([low, extreme[1]])
    found = normals_of(high, low, by_index=True).numpy()
    bits = (high.numpy().astype(np.uint64) & 0x7FFFFFFF) << np.uint64(32) | low.numpy().astype(
        np.uint64
    )
    prob = (bits.astype(np.longdouble) + np.longdouble(0.5)) / np.longdouble(2) ** 64
    expected = np.where(high.numpy() >= 2**31, 1, -1) * special.ndtri(prob.astype(np.float64))
    assert np.abs(found - expected).max() < 1e-14
    assert np.array_equal(found.astype(np.float32), expected.astype(np.float32))
    assert np.abs(found).max() > 9  # 32 bits would end at 6.3


def test_tails_are_equal_by_index_and_everywhere():
    high, low = random_words(20_000, seed=3)
    assert torch.equal(normals_of(high, low, by_index=True), normals_of(high, low, by_index=False))
    mirrored = normals_of(high ^ 2**31, low, by_index=True)
    assert torch.equal(mirrored, -normals_of(high, low, by_index=True))


def test_the_logarithm_needs_no_library():
    x = torch.from_numpy(np.random.default_rng(2).uniform(-64, 0, 50_000)).exp2()
    assert ((philox.log(x) - x.log()).abs() / x.log().abs().clamp(min=1)).max() < 1e-15


def test_numbers_follow_the_normal_law():
    rows = made(0, 160).flatten(1).double()  # 491,520 numbers
    flat = rows.flatten()
    count = len(flat)
    assert abs(flat.mean()) < 4 / count**0.5
    assert abs(flat.square().mean() - 1) < 4 * (2 / count) ** 0.5
    assert abs(flat.pow(4).mean() - 3) < 4 * (96 / count) ** 0.5
    assert stats.kstest(flat.numpy(), "norm").pvalue > 1e-4
    between = torch.corrcoef(rows[:40]).fill_diagonal_(0).abs().max()
    assert between < 5.5 / rows.shape[1] ** 0.5  # 780 pairs
    beside = torch.corrcoef(torch.stack([flat[:-1], flat[1:]]))[0, 1]
    assert abs(beside) < 4 / count**0.5


def test_draws_have_their_golden_values():
    """Part of every certificate drawn with them: these values may never move."""
    rows = made(0, 2)
    assert rows.dtype == torch.float32
    digests = [hashlib.sha256(row.numpy().astype("<f4").tobytes()).hexdigest() for row in rows]
    assert [digest[:16] for digest in digests] == ["bf4a3bc590cd241e", "01806bd638b50454"]
    assert torch.equal(made(1, 2)[0], rows[1])


def test_generators_and_streams_share_no_draws():
    ours, other = made(0, 1), made(0, 1, stream="select")
    numpys = torch.from_numpy(standard_normals(DrawSpan(0, "estimate", ITEM, 0, 1), shape=SHAPE))
    for pair in ((ours, other), (ours, numpys)):
        correlation = torch.corrcoef(torch.stack([part.flatten() for part in pair]))[0, 1]
        assert abs(correlation) < 0.08  # 3072 numbers: 4.4 standard errors
