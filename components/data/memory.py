"""Images in memory as a dataset with one split, for certificates without prepared files."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from components.core.digests import digest_bytes, digest_json
from components.core.errors import CasemateError
from components.data.prepared import ImageSplit

LEVELS = 255
ROUNDING = 0.02  # of a level, far above the error of float32 division by 255


@dataclass(frozen=True, eq=False)
class MemoryDataset:
    """Test items in memory; `digest` covers ids, labels and pixels."""

    classes: tuple[str, ...]
    test: ImageSplit
    digest: str

    @staticmethod
    def of(
        images: Tensor,
        labels: Tensor,
        *,
        num_classes: int,
        item_ids: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
    ) -> "MemoryDataset":
        """(N, C, H, W) images, uint8 or floats on the 256 levels of [0, 1], with (N,) labels.

        `classes` names them; None: by their numbers.
        """
        stored, ids = as_levels(images), checked_ids(item_ids, len(images))
        test = ImageSplit(ids, stored, checked_labels(labels, stored, num_classes))
        names = tuple(classes or (str(number) for number in range(num_classes)))
        if len(set(names)) != num_classes:
            remedy = f"different names, but there are {num_classes} classes"
            raise CasemateError("classes", len(set(names)), remedy)
        identity = {
            "classes": num_classes,
            "item_ids": ids,
            "labels": test.labels.tolist(),
            "shape": list(stored.shape),
            "pixels": digest_bytes(stored.contiguous().numpy().tobytes()),
        }
        return MemoryDataset(names, test, digest_json(identity))

    @property
    def channels(self) -> int:
        return int(self.test.images.shape[1])

    @property
    def height(self) -> int:
        return int(self.test.images.shape[2])

    @property
    def width(self) -> int:
        return int(self.test.images.shape[3])

    @property
    def splits(self) -> dict[str, int]:
        """Items per split."""
        return {"test": len(self.test)}

    def open_split(self, split: str) -> ImageSplit:
        """The items; `test` is the only split."""
        if split != "test":
            raise CasemateError("split", split, "does not exist in memory; the only split is test")
        return self.test

    def on_demand(self, split: str) -> ImageSplit:
        """The items, which are in memory already."""
        return self.open_split(split)


def numbered(count: int) -> tuple[str, ...]:
    """Default item ids: positions, padded with zeros so that they sort in order."""
    return tuple(f"{number:08d}" for number in range(count))


def checked_ids(item_ids: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """The ids of `count` items: as given, or their positions."""
    ids = numbered(count) if item_ids is None else tuple(map(str, item_ids))
    if len(ids) != count:
        raise CasemateError("item_ids", len(ids), f"ids for {count} images; give one per image")
    if len(set(ids)) < len(ids) or "" in ids:
        raise CasemateError("item_ids", len(ids), "must be unique and not empty")
    return ids


def checked_labels(labels: Tensor, images: Tensor, num_classes: int) -> Tensor:
    """(N,) int64 on the CPU, or an error that states the problem."""
    try:
        found = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = f"are not {len(images)} class numbers, one per image"
        raise CasemateError("labels", repr(labels)[:80], remedy) from error
    if found.shape != (len(images),) or found.is_floating_point() or found.dtype == torch.bool:
        shape = "x".join(map(str, found.shape))
        remedy = f"are not {len(images)} class numbers, one per image"
        raise CasemateError("labels", f"{shape or 'one'} {found.dtype}", remedy)
    if not len(found):
        raise CasemateError("images", 0, "are too few: give at least one")
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= num_classes:
        wrong = low if low < 0 else high
        raise CasemateError("labels", wrong, f"is not a class; the model has {num_classes}")
    return found.long()


def as_pixels(images: Tensor) -> Tensor:
    """(N, C, H, W) float32 in [0, 1], from floats or from uint8."""
    found = torch.as_tensor(images).detach()
    if found.dim() != 4:
        shape = "x".join(map(str, found.shape))
        raise CasemateError("images", shape, "are not (items x channels x height x width)")
    if found.dtype == torch.uint8:
        return found.to(torch.float32) / LEVELS
    inside = found.is_floating_point() and bool(((found >= 0) & (found <= 1)).all())
    if not inside:
        remedy = "are neither uint8 nor floats in [0, 1]; undo the normalisation"
        raise CasemateError("images", f"of {found.dtype}", remedy)
    return found.to(torch.float32)


def as_levels(images: Tensor) -> Tensor:
    """(N, C, H, W) uint8; floats must lie on the 256 levels, so that nothing is rounded silently.

    Votes record a digest of the stored pixels, which is needed to repeat them.
    """
    given = torch.as_tensor(images).detach()
    if given.dtype == torch.uint8 and given.dim() == 4:
        return given.cpu()
    scaled = as_pixels(given).cpu() * LEVELS
    levels = scaled.round()
    if bool(((scaled - levels).abs() > ROUNDING).any()):
        remedy = "lie between the 256 levels of stored images; give (255 * images).round().byte()"
        raise CasemateError("images", f"of {given.dtype}", remedy)
    return levels.to(torch.uint8)
