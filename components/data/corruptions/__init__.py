"""Common corruptions of images: the 19 of ImageNet-C at 5 severities (Hendrycks & Dietterich 2019).

`corrupt` changes a batch. `settings` holds names and constants and needs no torch; the operators
are imported when they are first used.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components.data.corruptions.generate import Pixels
    from components.data.corruptions.settings import Fidelity

__all__ = ["corrupt"]


def corrupt(
    images: "Pixels", *, name: str, severity: int, seed: int, item_ids: Sequence[str],
    fidelity: "Fidelity" = "raw", textures: str | None = None,
) -> "Pixels":  # fmt: skip
    """Images under one corruption; see `components.data.corruptions.generate.corrupt`."""
    from components.data.corruptions.generate import corrupt as generated

    return generated(
        images, name=name, severity=severity, seed=seed, item_ids=item_ids, fidelity=fidelity,
        textures=textures,
    )  # fmt: skip
