"""Votes of a coarser stride taken from those of a finer one: the same predictions, no new passes.

Ablations of one kind and size start at all multiples of the stride s below the side, so those of
stride s are among those of stride t whenever t divides s. A certificate from the votes of
these ablations is that of stride s: it counts the ablations of stride s alone.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from components.certify.header import VotesHeader
from components.certify.patch.evidence import ablations_of, computed_ablations, early_stop_of
from components.certify.vote_rows import VoteRow, Votes
from components.core.errors import CasemateError
from components.core.types import IntArray
from components.data.ablation import Ablations

SHARED = ("kind", "model_digest", "dataset_digest", "num_classes", "image", "num_items", "software")


def positions_among(coarse: Ablations, fine: Ablations) -> IntArray:
    """(K,) position of each of the `coarse` ablations among the `fine` ones."""
    same = all(getattr(coarse, name) == getattr(fine, name) for name in ("kind", "image_size"))
    if not same or coarse.band != fine.band:
        raise ValueError(f"{coarse} and {fine} differ in more than the stride")
    found, before = [], 0
    for rows, columns in fine.families:
        down, across = (_places(coarse, fine, side) for side in (rows, columns))
        wide = len(fine.starts(columns))
        found.append((before + down[:, None] * wide + across[None, :]).ravel())
        before += len(fine.starts(rows)) * wide
    return np.concatenate(found)


def _places(coarse: Ablations, fine: Ablations, side: int | None) -> IntArray:
    place = {start: index for index, start in enumerate(fine.starts(side))}
    missing = [start for start in coarse.starts(side) if start not in place]
    if missing:
        remedy = f"needs an ablation at pixel {missing[0]}, which stride {fine.stride} lacks"
        raise CasemateError("certify.stride", coarse.stride, remedy)
    return np.array([place[start] for start in coarse.starts(side)], dtype=np.int64)


def thinned_header(header: VotesHeader, source: Votes) -> VotesHeader:
    """The header of votes taken from finished ones of a finer stride."""
    computed = {"asked_stride": ablations_of(source.header).stride}
    return replace(header, settings={**header.settings, **computed})


def thin_votes(votes: Votes, header: VotesHeader) -> Iterator[VoteRow]:
    """The rows of a votes file with this header, taken from those of a finer stride.

    The header's `settings.asked_stride` is the finer stride; apart from the strides and the name of
    the run the two headers must agree.
    """
    if early_stop_of(votes.header) is not None:
        raise CasemateError("votes", "that stopped early", "are incomplete for another stride")
    if computed_ablations(header) != ablations_of(votes.header) or not _same_votes(votes, header):
        raise CasemateError("votes", votes.sha256[:12], "are of another model, dataset or setting")
    chosen = positions_among(ablations_of(header), ablations_of(votes.header))
    stream = header.kind
    for item in votes.items():
        predictions = item.streams[stream][chosen]
        yield VoteRow(
            item.item_id, item.label, item.image_sha256, stream, 0, len(chosen), predictions
        )


def _same_votes(votes: Votes, header: VotesHeader) -> bool:
    """Whether two headers agree in everything but the stride and the name of the run."""

    def settings(of: VotesHeader) -> dict[str, object]:
        strides = ("stride", "asked_stride")
        return {key: value for key, value in of.settings.items() if key not in strides}

    shared = all(getattr(votes.header, name) == getattr(header, name) for name in SHARED)
    return shared and settings(votes.header) == settings(header)
