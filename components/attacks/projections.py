"""Projections onto the threat model: a ball around an image, inside the pixel range.

Budgets hold exactly, in the arithmetic that checks them: float32 sums are rounded toward the image
where the nearest value would leave the ball (the projection of Madry et al. 2018, sec. 2.1). First
the ball, then the range: clamping to a range that contains the image only shortens the
perturbation, in either norm.

Symbols: x = `center`, the clean images (B, C, H, W) in [0, 1]; z = the points to project.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from components.attacks.gradients import OUTSIDE, l2_direction
from components.core.types import Images

# A norm summed in float32 is off by a few 1e-7 (measured up to 3 x 224 x 224 pixels); l2 balls
# are shrunk by this share so that the budget holds in whichever precision it is measured.
L2_SLACK = 1e-6
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as wide as the floats
IN_CACHE = 2**17  # pixels that a CPU moves through several operations without going to memory


def linf_bounds(x: Images, *, eps: float) -> tuple[Tensor, Tensor]:
    """Lowest and highest images of {z in [0, 1]: |z - x| <= eps}, exact for the dtype of `x`.

    Clamping between them is the l-inf projection. `eps` is first rounded down to the dtype: then a
    difference that is at most `eps` stays so when the subtraction is rounded, in either precision.
    """
    _check_budget(eps)
    check_pixels(x)
    return bounds_of_pixels(x, eps=eps)


def bounds_of_pixels(x: Images, *, eps: float) -> tuple[Tensor, Tensor]:
    """`linf_bounds` of images that are known to lie in [0, 1]; the host does not wait for them."""
    low, high, radius = torch.empty_like(x), torch.empty_like(x), _round_down(eps, x.dtype)
    rows = max(IN_CACHE // max(x[:1].numel(), 1), 1) if x.device.type == "cpu" else max(len(x), 1)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        _shift(x[part], radius, out=high[part])
        _shift(x[part], -radius, out=low[part])
    return low, high


def _shift(x: Tensor, step: float, *, out: Tensor) -> None:
    """The float nearest to x + step that is not beyond it, clamped to [0, 1].

    Knuth's 2Sum: x + step = out + error exactly, whatever the magnitudes. Where the sum was rounded
    away from x it moves one float back. Floats of one sign are ordered like their bits; where
    x - eps is negative its neighbour does not matter, 0 takes its place.
    """
    torch.add(x, step, out=out)
    added = out - x
    error = (added - out).add_(x).add_(added.neg_().add_(step))
    beyond = error.clamp_(max=0) if step > 0 else error.clamp_(min=0)
    bits = INTEGERS[x.element_size()]
    out.view(bits).add_(beyond.sign_().to(bits))
    out.clamp_(0, 1)


def project_linf(z: Images, *, center: Images, eps: float) -> Images:
    """The point of the l-inf ball and the pixel range nearest to `z`."""
    low, high = linf_bounds(center, eps=eps)
    return z.clamp(low, high)


def project_l2(z: Images, *, center: Images, eps: float) -> Images:
    """`z` scaled back to the l2 ball of each item, then clamped to the pixel range.

    Every pixel is rounded toward `center`, so the float64 norm of the result is at most `eps`.
    """
    _check(center, eps)
    return _project_l2(z, center, eps)


class Ball(Protocol):
    """The allowed points of a batch of items."""

    def take(self, rows: Tensor) -> "Ball":
        """The balls of these int64 rows."""
        ...

    def project(self, z: Images) -> Images:
        """The points of the items' balls and of the pixel range nearest to `z`."""
        ...

    def direction(self, gradient: Images) -> Images:
        """The steepest ascent direction of size one; zero where `gradient` is zero."""
        ...


@dataclass(frozen=True, slots=True)
class LinfBall:
    """{z in [0, 1]: max |z - x| <= eps} around each image; steps follow the sign."""

    low: Images
    high: Images

    def take(self, rows: Tensor) -> "LinfBall":
        return LinfBall(self.low[rows], self.high[rows])

    def project(self, z: Images) -> Images:
        return z.clamp(self.low, self.high)

    def direction(self, gradient: Images) -> Images:
        return gradient.sign()


@dataclass(frozen=True, slots=True)
class L2Ball:
    """{z in [0, 1]: |z - x|_2 <= eps} around each image; steps follow the normalised gradient."""

    x: Images
    eps: float

    def take(self, rows: Tensor) -> "L2Ball":
        return L2Ball(self.x[rows], self.eps)

    def project(self, z: Images) -> Images:
        return _project_l2(z, self.x, self.eps)

    def direction(self, gradient: Images) -> Images:
        return l2_direction(gradient)


def ball_around(x: Images, *, norm: str, eps: float) -> Ball:
    """The ball of `norm`, `linf` or `l2`."""
    if norm == "linf":
        return LinfBall(*linf_bounds(x, eps=eps))
    _check(x, eps)
    return L2Ball(x, eps)


def _project_l2(z: Images, center: Images, eps: float) -> Images:
    wide = center.double()
    delta = z.double() - wide
    norm = delta.flatten(1).norm(dim=1).view(-1, *[1] * (z.dim() - 1))
    radius = eps * (1 - L2_SLACK)
    inside = norm <= radius
    scale = radius / torch.where(inside, torch.ones_like(norm), norm)
    target = torch.where(inside, z.double(), wide + scale * delta).clamp(0, 1)
    result = target.to(center.dtype)
    beyond = (result.double() - wide).abs() > (target - wide).abs()
    return torch.where(beyond, torch.nextafter(result, center), result)


def _round_down(eps: float, dtype: torch.dtype) -> float:
    nearest = torch.tensor(eps, dtype=dtype)
    if nearest.item() > eps:
        nearest = torch.nextafter(nearest, torch.zeros_like(nearest))
    return float(nearest.item())


def _check(x: Images, eps: float) -> None:
    _check_budget(eps)
    check_pixels(x)


def _check_budget(eps: float) -> None:
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be a finite number >= 0, got {eps}")


def check_pixels(x: Images) -> None:
    """Reject images outside of [0, 1]; the host waits for the answer."""
    if x.numel() == 0:
        return
    low, high = x.aminmax()
    if not bool((low >= 0) & (high <= 1)):  # NaN fails this too
        raise ValueError(OUTSIDE)
