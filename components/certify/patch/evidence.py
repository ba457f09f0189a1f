"""What a votes file's header says of patch votes: ablations, pairs of masks, early stops."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from components.certify.patch.ablations import patch_sides
from components.certify.patch.double_masking import MaskSet
from components.certify.patch.early_stop import ORDER, UNSEEN, voting_order
from components.certify.patch.rules import check_rules
from components.core.errors import CasemateError
from components.core.types import Array
from components.data.ablation import KINDS as ABLATION_KINDS
from components.data.ablation import Ablations

DOUBLE_MASKING = "double_masking"
PATCH_KINDS = (*ABLATION_KINDS, DOUBLE_MASKING)
PATCH_SETTINGS: Mapping[str, Mapping[str, type]] = {
    **{kind: {"band": int, "stride": int} for kind in ABLATION_KINDS},
    DOUBLE_MASKING: {"mask_patch": int, "num_masks": int},  # largest patch hidden, masks per side
}


def _image_size(header: Mapping[str, Any]) -> tuple[int, int]:
    return header["image"]["height"], header["image"]["width"]


def ablations_of(header: Mapping[str, Any]) -> Ablations:
    """The ablations whose votes are kept."""
    settings = header["settings"]
    return Ablations(
        kind=header["kind"],
        image_size=_image_size(header),
        band=settings["band"],
        stride=settings["stride"],
    )


def asked_ablations(header: Mapping[str, Any]) -> Ablations:
    """The ablations that were asked: more than are kept where votes of a finer stride were thinned.

    `settings.asked_stride` is there for thinned votes only; the forward passes had its batches.
    """
    kept = ablations_of(header)
    return replace(kept, stride=header["settings"].get("asked_stride", kept.stride))


def masks_of(header: Mapping[str, Any]) -> MaskSet:
    """The masks whose pairs voted."""
    settings = header["settings"]
    return MaskSet(
        image_size=_image_size(header),
        patch=settings["mask_patch"],
        num_masks=settings["num_masks"],
    )


def patch_streams(header: Mapping[str, Any]) -> dict[str, int]:
    """The one stream of patch votes and its length per item."""
    if header["kind"] == DOUBLE_MASKING:
        return {"pairs": len(masks_of(header).pairs())}
    return {header["kind"]: len(ablations_of(header))}


def stopped_for(header: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`patch_sizes`, `rules` and `order` of votes that stopped early; None if all were asked."""
    stop: Mapping[str, Any] | None = header["settings"].get("stopped_for")
    return stop


def check_patch_header(header: Mapping[str, Any]) -> None:
    """Raise unless the settings describe ablations, or masks, and an early stop that exist."""
    patch_streams(header)
    if "asked_stride" in header["settings"]:
        stride = asked_ablations(header).stride
        if stopped_for(header) is not None or ablations_of(header).stride % stride:
            raise CasemateError("asked_stride", stride, "holds no such stride, or stopped early")
    if (stop := stopped_for(header)) is None:
        return
    if header["kind"] == DOUBLE_MASKING or not isinstance(stop, Mapping):
        raise CasemateError("stopped_for", stop, "is possible for ablations only")
    if set(stop) != {"patch_sizes", "rules", "order"} or stop["order"] != ORDER:
        raise CasemateError("stopped_for", stop, f"needs patch_sizes, rules and order {ORDER}")
    if header["num_classes"] > UNSEEN:
        raise CasemateError("num_classes", header["num_classes"], "is too many for partial votes")
    for size in stop["patch_sizes"]:
        patch_sides(size, _image_size(header))
    check_rules(stop["rules"])


def unknown_votes(predictions: Array, header: Mapping[str, Any]) -> Array:
    """(K,) bool: which ablations of an item were not asked; raises unless the rest came first.

    Without an early stop nothing may be missing.
    """
    if stopped_for(header) is None:
        return np.zeros(len(predictions), dtype=np.bool_)
    unseen: Array = predictions == UNSEEN
    (size,) = patch_streams(header).values()
    if len(predictions) != size:
        raise ValueError(f"has {len(predictions)} votes in a block; partial votes need all {size}")
    in_order = unseen[voting_order(size)]
    if in_order[0] or (in_order[:-1] & ~in_order[1:]).any():
        raise ValueError(f"skips ablations of the order {ORDER}")
    return unseen
