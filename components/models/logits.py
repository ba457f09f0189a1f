"""Checks of logits that votes and attacks rely on: finite, and each image's own.

The theorems behind certificates speak of a function of one image. A network whose output for one
image depends on the others of its batch (batch statistics, a maximum over the batch) is not such a
function: a pixel that one vote does not see still reaches it through the other rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from components.core.errors import CasemateError
from components.core.types import Images, Logits

SAME_LOGITS = 2**-14  # of the largest logit, as for votes; in batches of one shape usually 0
SAME_ALONE = 2**-7  # in other batch shapes: some 1e-6, more where a network amplifies rounding
NUM_ROWS = 3  # of the batches that are compared
NOT_FINITE = "gets logits that are not finite; look for NaN or overflow in the weights"
DIM = 0.5  # largest pixel of the made image, so that brighter neighbours can rescale it


def check_logits(logits: Logits, item_ids: Sequence[str] | None = None) -> Logits:
    """`logits`, or an error that names the first item whose logits are not finite.

    argmax of NaN is some class, so the item would count as broken, or vote for that class.
    """
    if (row := first_not_finite(logits)) is not None:
        raise CasemateError("model", row_name(row, item_ids), NOT_FINITE)
    return logits


def first_not_finite(values: Tensor) -> int | None:
    """The first row that holds NaN or infinity, if any."""
    if bool(values.isfinite().all()):
        return None
    return int(values.isfinite().flatten(1).all(dim=1).int().argmin())


def row_name(row: int, item_ids: Sequence[str] | None) -> str:
    """How an error names a row: by its item id where that is known."""
    return f"row {row}" if item_ids is None else f"item {item_ids[row]!r}"


@torch.no_grad()
def check_independent_rows(
    logits_of: Callable[[Images], Logits],
    images: Images,
    *,
    network: nn.Module,
    name: str,
    beyond: float = 0.0,
    may_be_random: bool = False,
) -> None:
    """Reject a network whose logits of an image depend on the other images that it is given.

    Compared are the logits of an image and of dim noise, each beside black images, beside white and
    checkered ones, which reach `beyond` the range [0, 1], and alone; and those of one batch before
    and after all this. A network that `may_be_random` passes if equal batches give it different
    logits. The probe leaves random streams and buffers as they were.

    It is a probe, not a proof: it misses dependence that needs larger batches or certain images, or
    is below `SAME_LOGITS` at these ones, and code that recognises the probe. It takes 20 rows.
    """
    dark, bright = _other_rows(images, beyond)
    image, noise = _probe_rows(images)
    with _random_streams_kept(images.device), _buffers_kept(network):
        first = _beside(logits_of, dark, image, at=0)
        moved = [
            where
            for row, at in ((image, 0), (noise, NUM_ROWS - 1))
            for expected in [_beside(logits_of, dark, row, at=at)]
            for where, found, share in (
                ("beside bright images", _beside(logits_of, bright, row, at=at), SAME_LOGITS),
                ("alone", logits_of(row[None])[0], SAME_ALONE),
            )
            if not _agree(found, expected, share)
        ]
        constant = _agree(_beside(logits_of, dark, image, at=0), first, SAME_LOGITS)
    if not constant and may_be_random:
        return
    if not constant:
        remedy = "gives other logits when it gets the same images again: it is random or keeps a "
        remedy += "state, so its votes are not those of a function; make it deterministic"
        raise CasemateError("model", name, remedy)
    if moved:
        remedy = f"gives an image other logits {moved[0]} than beside black ones: batch statistics "
        remedy += "or operations across the batch make predictions depend on other images; "
        remedy += "normalise each image by itself, or by running statistics"
        raise CasemateError("model", name, remedy)


def _probe_rows(images: Images) -> tuple[Tensor, Tensor]:
    """The first of the images, if there is one, and dim noise; float32 in [0, 1]."""
    shape = (2, *images.shape[1:])
    noise = DIM * torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(images)
    return (images[0] if len(images) else noise[1]), noise[0]


def _other_rows(images: Images, beyond: float) -> tuple[Images, Images]:
    """NUM_ROWS black images, and as many that are checkered, white, checkered."""
    height, width = images.shape[-2:]
    device = images.device
    odd = (torch.arange(height, device=device)[:, None] + torch.arange(width, device=device)) % 2
    levels = torch.stack([odd, torch.ones_like(odd), odd])[:, None].to(images)
    bright = (levels * (1 + 2 * beyond) - beyond).expand(-1, images.shape[1], -1, -1)
    return torch.full_like(bright, -beyond), bright


def _beside(
    logits_of: Callable[[Images], Logits], others: Images, row: Tensor, *, at: int
) -> Logits:
    """Logits of a row that takes the place `at` among the others."""
    batch = others.clone()
    batch[at] = row
    return logits_of(batch)[at]


def _agree(found: Logits, expected: Logits, share: float) -> bool:
    """Equal up to a share of the largest logit; what is not finite is left to `check_logits`."""
    known = expected.isfinite()
    if not torch.equal(known, found.isfinite()):
        return False
    largest = expected[known].abs().max() if bool(known.any()) else 0.0
    return bool(((found - expected)[known].abs() <= share * largest).all())


@contextmanager
def _random_streams_kept(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextmanager
def _buffers_kept(network: nn.Module) -> Iterator[None]:
    """Put back buffers that change inside the context, such as counters of calls."""
    before = [
        (module._buffers, key, value, None if value is None else value.clone())
        for module in network.modules()
        for key, value in module._buffers.items()
    ]
    try:
        yield
    finally:
        for buffers, key, value, copy in before:
            buffers[key] = value
            if value is not None and copy is not None and not torch.equal(value, copy):
                value.copy_(copy)
