"""Common corruptions of images: the 19 of ImageNet-C at 5 severities (Hendrycks & Dietterich 2019).

`corrupt` changes a batch. `settings` holds names and constants and needs no torch, so `corrupt` is
imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.data.corruptions.generate import corrupt

__all__ = ["corrupt"]


def __getattr__(name: str) -> Any:
    if name != "corrupt":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from components.data.corruptions.generate import corrupt

    return corrupt
