"""Gradients with respect to pixels, and the model state they need."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from components.attacks.losses import LossFn, cross_entropy
from components.core.errors import CasemateError
from components.core.types import Images, Labels, Logits, LogitsFn
from components.models.logits import NOT_FINITE, check_logits, first_not_finite, row_name

Model = TypeVar("Model", bound=nn.Module)
UNUSABLE = "is not finite; an attack cannot use it"
OUTSIDE = "images must lie in [0, 1]: elsewhere ball and pixel range may not intersect"


@contextmanager
def attack_mode(model: Model) -> Iterator[Model]:
    """Eval mode and frozen weights during an attack; afterwards every flag is restored.

    Eval mode keeps dropout out of the gradient and running statistics unchanged; frozen weights
    save a third of the activations. Both are restored per module and per parameter, also after an
    exception: a partly frozen model must not become trainable.
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval()
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        yield model
    finally:
        for module, training in modes:
            module.training = training
        for parameter, requires_grad in flags:
            parameter.requires_grad_(requires_grad)


@dataclass(frozen=True, slots=True)
class InputGradient:
    """Results of one forward and backward pass."""

    gradient: Images
    losses: Tensor  # (B,)
    logits: Logits


def input_gradient(
    logits_of: LogitsFn,
    x: Images,
    y: Labels,
    *,
    loss_of: LossFn = cross_entropy,
    item_ids: Sequence[str] | None = None,
) -> InputGradient:
    """Gradient of the summed loss with respect to the pixels only; no `.grad` is ever written.

    The sum, not the mean, keeps each item's gradient independent of the batch size. Errors name the
    item if `item_ids` are given.
    """
    seen = unchecked_gradient(logits_of, x, y, loss_of=loss_of)
    check_logits(seen.logits, item_ids)
    check_finite(seen.gradient, item_ids)
    return seen


def unchecked_gradient(
    logits_of: LogitsFn, x: Images, y: Labels, *, loss_of: LossFn = cross_entropy
) -> InputGradient:
    """`input_gradient` for loops on a GPU, which note faults there and check them seldom: to look
    for a NaN the host waits for the device.
    """
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()  # shares the memory of `x`; nothing writes to it
        logits = logits_of(leaf)
        losses = loss_of(logits, y)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return InputGradient(gradient, losses.detach(), logits.detach())


class Faults:
    """Notes on the device what an attack cannot use, for a host that asks seldom."""

    def __init__(self) -> None:
        self._good: dict[str, Tensor] = {}  # scalar bool

    def note_pixels(self, x: Images) -> None:
        """Images must lie in [0, 1]."""
        low, high = x.aminmax()
        self._note("pixels", (low >= 0) & (high <= 1))  # NaN fails this too

    def note_pass(self, seen: InputGradient) -> None:
        """Logits and gradients must be finite."""
        self._note("logits", seen.logits.isfinite().all())
        self._note("gradient", seen.gradient.isfinite().all())

    def check(self) -> None:
        """Raise the error of the first fault; the host waits for the device."""
        flags = torch.stack([*self._good.values()]).tolist() if self._good else []
        bad = [name for name, good in zip(self._good, flags, strict=True) if not good]
        self._good = {}
        if "pixels" in bad:
            raise ValueError(OUTSIDE)
        if "logits" in bad:
            raise CasemateError("model", "some image", NOT_FINITE)
        if "gradient" in bad:
            raise FloatingPointError(f"the model's input gradient at some image {UNUSABLE}")

    def _note(self, name: str, good: Tensor) -> None:
        self._good[name] = good & self._good[name] if name in self._good else good


def check_finite(gradient: Tensor, item_ids: Sequence[str] | None = None) -> Tensor:
    """`gradient`, or an error: a NaN would spread to all later iterates and count as a success."""
    if (row := first_not_finite(gradient)) is not None:
        raise FloatingPointError(
            f"the model's input gradient at {row_name(row, item_ids)} {UNUSABLE}"
        )
    return gradient


def is_zero(gradient: Images) -> Tensor:
    """(B,) bool: items whose gradient is zero everywhere. sign(0) = 0, so they never move."""
    return (gradient == 0).flatten(1).all(dim=1)


def l2_direction(gradient: Images) -> Images:
    """Each item's gradient scaled to l2 norm one; a zero gradient stays zero.

    Dividing by the largest entry first keeps gradients near 1e-30 from underflowing when squared.
    """
    shape = (-1, *[1] * (gradient.dim() - 1))
    largest = gradient.abs().flatten(1).amax(dim=1).view(shape)
    scaled = gradient / torch.where(largest == 0, torch.ones_like(largest), largest)
    norm = scaled.flatten(1).norm(dim=1).view(shape)
    return scaled / torch.where(norm == 0, torch.ones_like(norm), norm)
