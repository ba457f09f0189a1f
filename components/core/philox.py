"""Philox4x32-10 (Salmon et al. 2011) and normals by the inverse CDF: equal bits on every device.

Each number takes two words, so that tails end at 9 standard deviations, not at 6.3. The inverse CDF
is AS241 (Wichura 1988, PPND16). Only operations that IEEE 754 rounds correctly occur (+, -, *, /,
sqrt; the logarithm is a series), one at a time and in float64: no library function, compiler or
device can change a bit. Words of any part of a row can be made by themselves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
ROUNDS = 10
NUMBERS_AT_ONCE = {"cpu": 2**15, "cuda": 2**22}  # cpu: what the cache holds

CENTRE = 0.425  # |p - 1/2| up to here: the first of three rational functions
CENTRAL = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
     1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
     3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
     5.2264952788528545610e3),
)  # fmt: skip
TAIL = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
     3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1,
     2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
     1.05075007164441684324e-9),
)  # fmt: skip
FAR_TAIL = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
     2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
     2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
     2.04426310338993978564e-15),
)  # fmt: skip

LN2 = 0.6931471805599453
SERIES = tuple(2 / (2 * k + 1) for k in range(12))  # of 2 atanh(s) / s in s * s
ROOT_HALF = 0.7071067811865476
EXPONENT_BITS, MANTISSA = 52, 2**52 - 1
HALF = 0x3FE << EXPONENT_BITS  # exponent bits of numbers in [0.5, 1)


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Four words of every counter of four words under a key of two.

    Words are int64 below 2^32; arguments broadcast. A product of two words wraps modulo 2^64, which
    leaves its bits as they are.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (right >> 32).bitwise_and_(WORD) ^ c1 ^ k0,
            right.bitwise_and_(WORD),
            (left >> 32).bitwise_and_(WORD) ^ c3 ^ k1,
            left.bitwise_and_(WORD),
        )
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def words(keys: Tensor, *, first: int, count: int) -> Tensor:
    """(R, count, 4) words of the blocks first..first+count-1 of rows with (R, 4) words of key.

    Two words of a row's 128 bits are the key of Philox, the others the upper half of its counter.
    """
    if not 0 <= first <= first + count <= 2**32:
        raise ValueError(f"blocks are numbered below 2^32, got {first=}, {count=}")
    k0, k1, c2, c3 = (part[:, None] for part in keys.unbind(1))
    block = torch.arange(first, first + count, device=keys.device)[None]
    counter = (block, torch.zeros_like(block[:, :1]), c2, c3)
    return torch.stack(philox(counter, (k0, k1)), dim=2)


def normals_of(high: Tensor, low: Tensor, *, by_index: bool) -> Tensor:
    """float64 normals of pairs of words: sign from the first bit, tail probability from the others.

    The probability (m + 1/2) / 2^64 of the 63 bits m lies in (0, 1/2]. `by_index` computes tails,
    a seventh of all, where they are needed: faster on a CPU, but a GPU would wait for their number.
    """
    exact = (high & 0x7FFFFFFF).double().mul_(2.0**32)
    prob = low.double().add_(0.5).add_(exact).mul_(2.0**-64)
    from_half = 0.5 - prob
    size = from_half * _ratio(CENTRAL, (from_half * from_half).neg_().add_(CENTRE * CENTRE))
    outer = from_half > CENTRE
    if by_index:
        at = outer.nonzero(as_tuple=True)
        size[at] = _tail(prob[at])
    else:
        size = torch.where(outer, _tail(prob), size)
    return torch.where(high > 0x7FFFFFFF, -size, size)


def _tail(prob: Tensor) -> Tensor:
    """Normals of small tail probabilities."""
    root = log(prob).neg_().sqrt_()
    return torch.where(root > 5, _ratio(FAR_TAIL, root - 5), _ratio(TAIL, root - 1.6))


def _ratio(by: tuple[Sequence[float], Sequence[float]], x: Tensor) -> Tensor:
    above, below = by
    return _polynomial(above, x).div_(_polynomial(below, x))


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Horner's rule, a product and a sum at a time: nothing to fuse into one rounding."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value.mul_(x).add_(coefficient)
    return value


def log(x: Tensor) -> Tensor:
    """Natural logarithm of normal positive float64 numbers, within some units of the last place."""
    bits = x.view(torch.int64)
    exponent = ((bits >> EXPONENT_BITS) - 0x3FE).double()
    mantissa = ((bits & MANTISSA) | HALF).view(torch.float64)  # in [0.5, 1)
    small = mantissa < ROOT_HALF
    mantissa = torch.where(small, mantissa * 2, mantissa)
    exponent.sub_(small.double())
    s = (mantissa - 1).div_(mantissa + 1)
    return s.mul_(_polynomial(SERIES, s * s)).add_(exponent.mul_(LN2))


def fill_normals(rows: Tensor, keys: Tensor) -> None:
    """Write standard normals into (R, N) float32 rows with (R, 4) words of key each.

    How many are made at once is a matter of memory alone.
    """
    count, most = rows.shape[1], NUMBERS_AT_ONCE.get(rows.device.type, 2**22)
    wide = min(count + count % 2, most)  # numbers of a row at a time: even, two to a block
    tall = max(1, most // max(wide, 1))
    for row in range(0, len(rows), tall):
        some = keys[row : row + tall]
        for start in range(0, count, wide):
            stop = min(start + wide, count)
            made = words(some, first=start // 2, count=(stop - start + 1) // 2)
            on_cpu = rows.device.type == "cpu"
            numbers = normals_of(made[..., 0::2], made[..., 1::2], by_index=on_cpu).flatten(1)
            rows[row : row + tall, start:stop] = numbers[:, : stop - start]
