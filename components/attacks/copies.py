"""Several runs of an attack on the same rows in one batch, with the result of one after the other.

A run of its own for each target class leaves a small batch to the device: few rows are robust when
it begins. Here a row takes part once for each run. Each copy has the random numbers and the state
that it would have alone; of the runs that break a row the first counts, as if the later ones had
not been made: their passes are not part of its counts. Points and counts are those of runs one
after the other, but for the rounding of the model's own products, which follows a batch's shape.
"""

import torch
from torch import Tensor

from components.attacks.interface import COUNTS, POINTS, Items, Search

PIXELS = 2**24  # of all copies together: a loop keeps some ten tensors of that size


def copies_at_once(num_rows: int, shape: torch.Size, *, most: int) -> int:
    """How many runs of so many images of this shape fit in memory, at least 1."""
    return max(min(PIXELS // max(num_rows * shape.numel(), 1), most), 1)


def copied(search: Search, rows: Tensor, count: int) -> Search:
    """A search on `count` copies of these rows, run by run; the clean pass is that of `search`."""
    x, items = search.items.x[rows], search.items
    copies = Items(
        x.repeat(count, *[1] * (x.dim() - 1)),
        items.y[rows].repeat(count),
        items.ids(rows) * count,
        items.run_seed,
    )
    logits = search.clean_logits[rows].repeat(count, 1)
    return Search(lambda images: logits, copies, clean_logits=logits)


def join(search: Search, rows: Tensor, copies: Search) -> None:
    """Take over what the copies of these rows, robust before, have found.

    Scores of different runs must compare: the best point of a robust row is that of all runs.
    """
    count, every = len(copies.items) // len(rows), torch.arange(len(rows), device=rows.device)
    broken = (copies.prediction != copies.items.y).view(count, -1)
    is_broken, first = broken.any(dim=0), broken.int().argmax(dim=0)
    scores = copies.scores.view(count, -1)
    chosen = torch.where(is_broken, first, scores.argmax(dim=0))  # of equal ones the first
    better = is_broken | (scores[chosen, every] > search.scores[rows])
    into, place = rows[better], (chosen * len(rows) + every)[better]
    for name in POINTS:
        getattr(search, name)[into] = getattr(copies, name)[place]
    run = torch.arange(count, device=rows.device)[:, None]
    made = run <= torch.where(is_broken, first, count)
    for name in COUNTS:
        counts = getattr(copies, name).view(count, -1)
        getattr(search, name)[rows] += (counts * made).sum(dim=0)
