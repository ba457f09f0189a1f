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
DIM = 0.5  # largest pixel of the made image, so that brighter neighbours can rescale it


def check_logits(logits: Logits, item_ids: Sequence[str] | None = None) -> Logits:
    """`logits`, or an error that names the first item whose logits are not finite.

    argmax of NaN is some class, so the item would count as broken, or vote for that class.
    """
    if (row := first_not_finite(logits)) is not None:
        remedy = "gets logits that are not finite; look for NaN or overflow in the weights"
        raise CasemateError("model", row_name(row, item_ids), remedy)
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

    Compared are the logits of an image and of dim noise in a batch of `NUM_ROWS`, alone, and beside
    black, white and checkered images, which reach `beyond` the range [0, 1]; and those of the same
    batch before and after all this. A network that `may_be_random` passes if equal batches give it
    different logits. The probe leaves random streams and buffers as they were.

    It is a probe, not a proof: it misses dependence that needs larger batches or certain images, or
    is below `SAME_LOGITS` at these ones, and code that recognises the probe. It takes 14 rows.
    """
    rows, others = _probe_rows(images), _other_rows(images, beyond)
    with _random_streams_kept(images.device), _buffers_kept(network):
        together = logits_of(rows)
        moved = [
            where
            for kept in (0, NUM_ROWS - 1)
            for where, found, share in (
                ("beside other images", _beside(logits_of, rows, others, kept), SAME_LOGITS),
                ("alone", logits_of(rows[kept, None])[0], SAME_ALONE),
            )
            if not _agree(found, together[kept], share)
        ]
        constant = _agree(logits_of(rows), together, SAME_LOGITS)
    if not constant and may_be_random:
        return
    if not constant:
        remedy = "gives other logits when it gets the same images again: it is random or keeps a "
        remedy += "state, so its votes are not those of a function; make it deterministic"
        raise CasemateError("model", name, remedy)
    if moved:
        remedy = f"gives an image other logits {moved[0]} than in its batch: batch statistics or "
        remedy += "operations across the batch make predictions depend on other images; "
        remedy += "normalise each image by itself, or by running statistics"
        raise CasemateError("model", name, remedy)


def _beside(
    logits_of: Callable[[Images], Logits], rows: Images, others: Images, kept: int
) -> Logits:
    """Logits of one of the rows in its place among the others."""
    mixed = others.clone()
    mixed[kept] = rows[kept]
    return logits_of(mixed)[kept]


def _probe_rows(images: Images) -> Images:
    """Up to NUM_ROWS - 1 of the images, then dim noise; float32 in [0, 1]."""
    some = images[: NUM_ROWS - 1]
    shape = (NUM_ROWS - len(some), *images.shape[1:])
    noise = DIM * torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return torch.cat([some, noise.to(images)])


def _other_rows(images: Images, beyond: float) -> Images:
    """Black, a checkerboard, white: the first or the last makes room for the row that is kept."""
    height, width = images.shape[-2:]
    device = images.device
    odd = torch.arange(height, device=device)[:, None] + torch.arange(width, device=device)
    levels = torch.stack([torch.zeros_like(odd), odd % 2, torch.ones_like(odd)])[:, None].to(images)
    stretched = levels * (1 + 2 * beyond) - beyond
    return stretched.expand(-1, images.shape[1], -1, -1).clone()


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
