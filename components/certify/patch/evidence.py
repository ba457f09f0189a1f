"""The header of patch votes: ablations, pairs of masks, early stops."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.certify.header import FieldTypes, VotesHeader
from components.certify.patch.ablations import patch_sides
from components.certify.patch.double_masking import MaskSet
from components.certify.patch.early_stop import ORDER, UNSEEN, voting_order
from components.certify.patch.rules import check_rules
from components.core.errors import CasemateError
from components.core.types import Array
from components.data.ablation import Ablations

ABLATION_FIELDS: FieldTypes = {"band": int, "stride": int}
PAIR_FIELDS: FieldTypes = {"mask_patch": int, "num_masks": int}  # largest patch, masks per side


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """The verdicts for which voting stops as soon as they are decided."""

    patch_sizes: tuple[int, ...]
    rules: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """`settings.stopped_for` of a header."""
        return {"patch_sizes": list(self.patch_sizes), "rules": list(self.rules), "order": ORDER}


def ablations_of(header: VotesHeader) -> Ablations:
    """The ablations whose votes are stored."""
    recorded = header.settings
    return Ablations(
        kind=header.kind,
        image_size=header.image.size,
        band=recorded["band"],
        stride=recorded["stride"],
    )


def computed_ablations(header: VotesHeader) -> Ablations:
    """The ablations that were computed; thinned votes store only those of a coarser stride.

    Only thinned votes have `settings.asked_stride`; it defines the batches of the forward passes.
    """
    kept = ablations_of(header)
    return replace(kept, stride=header.settings.get("asked_stride", kept.stride))


def is_thinned(header: VotesHeader) -> bool:
    """Whether the votes are a subset of those of a finer stride."""
    return "asked_stride" in header.settings


def masks_of(header: VotesHeader) -> MaskSet:
    """The masks whose pairs voted."""
    recorded = header.settings
    return MaskSet(
        image_size=header.image.size,
        patch=recorded["mask_patch"],
        num_masks=recorded["num_masks"],
    )


def early_stop_of(header: VotesHeader) -> EarlyStop | None:
    """The verdicts that voting stopped for; None if all votes were computed."""
    recorded: Mapping[str, Any] | None = header.settings.get("stopped_for")
    if recorded is None:
        return None
    return EarlyStop(tuple(recorded["patch_sizes"]), tuple(recorded["rules"]))


def check_ablation_header(header: VotesHeader) -> None:
    """Raise unless the settings describe valid ablations and a valid early stop."""
    kept, recorded = ablations_of(header), header.settings
    stop = recorded.get("stopped_for")
    if is_thinned(header):
        stride = computed_ablations(header).stride
        if stop is not None or kept.stride % stride:
            raise CasemateError("asked_stride", stride, "does not fit the stride, or stopped early")
    if stop is None:
        return
    if not isinstance(stop, Mapping):
        raise CasemateError("stopped_for", stop, "is possible for ablations only")
    if set(stop) != {"patch_sizes", "rules", "order"} or stop["order"] != ORDER:
        raise CasemateError("stopped_for", stop, f"needs patch_sizes, rules and order {ORDER}")
    if header.num_classes > UNSEEN:
        raise CasemateError("num_classes", header.num_classes, "is too many for partial votes")
    for size in stop["patch_sizes"]:
        patch_sides(size, header.image.size)
    check_rules(stop["rules"])


def check_pair_header(header: VotesHeader) -> None:
    """Raise unless the settings describe valid masks without an early stop."""
    masks_of(header).pairs()
    if is_thinned(header):
        raise CasemateError("asked_stride", header.settings["asked_stride"], "needs ablations")
    if (stop := header.settings.get("stopped_for")) is not None:
        raise CasemateError("stopped_for", stop, "is possible for ablations only")


def unknown_votes(predictions: Array, header: VotesHeader) -> NDArray[np.bool_]:
    """(K,) which ablations of an item were not computed; raises unless the others come first.

    Without an early stop no vote may be missing.
    """
    if early_stop_of(header) is None:
        return np.zeros(len(predictions), dtype=np.bool_)
    unseen: NDArray[np.bool_] = predictions == UNSEEN
    size = len(ablations_of(header))
    if len(predictions) != size:
        raise ValueError(f"has {len(predictions)} votes in a block; partial votes need all {size}")
    in_order = unseen[voting_order(size)]
    if in_order[0] or (in_order[:-1] & ~in_order[1:]).any():
        raise ValueError(f"skips ablations of the order {ORDER}")
    return unseen
