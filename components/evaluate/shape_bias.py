"""Shape against texture on conflict stimuli: a cat with the skin of an elephant, 16 classes.

Geirhos et al. 2019, "ImageNet-trained CNNs are biased towards texture". The probabilities of 1000
ImageNet classes become one decision among 16: softmax over all 1000, then the mean (sum, max) over
the indices of each class. Never a softmax over the 207 indices.

Shape accuracy counts all images (Bhojanapalli et al. 2021, Fig. 6); the bias counts only images
whose shape and texture differ, and of these the ones decided for either.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from components.core.errors import CasemateError, at_key
from components.core.types import IntArray, Logits
from components.data.places import Place
from components.data.sources.files import sub_folders
from components.evaluate.metrics import Measurement, null, share
from components.evaluate.settings import Pooling

NUM_IMAGENET_CLASSES = 1000
FILE_NAME = re.compile(r"^([a-z]+)(\d+)-([a-z]+)(\d+)\.png$")
# As published: all images, per shape class, per texture class, images without conflict.
PUBLISHED_COUNTS = (1280, 80, 80, 80)
NONSTANDARD = "nonstandard_stimuli"  # flag: the folder is not the published set

# ILSVRC-2012 indices; ranges include their ends.
_INDICES = """
airplane 404
bear 294-297
bicycle 444 671
bird 8 10-16 18-20 22-24 80-83 87-96 98-100 127-133 135-145
boat 472 554 625 814 914
bottle 440 720 737 898-899 901 907
car 436 511 817
cat 281-286
chair 423 559 765 857
clock 409 530 892
dog 152-191 193-203 205-226 228-241 243-250 252-257 259 261-263 265-268
elephant 385-386
keyboard 508 878
knife 499
oven 766
truck 555 569 656 675 717 734 864 867
"""


def _class_indices(text: str) -> dict[str, tuple[int, ...]]:
    table = {}
    for line in text.split("\n"):
        if line:
            name, *parts = line.split()
            ends = [part.split("-") for part in parts]
            table[name] = tuple(i for e in ends for i in range(int(e[0]), int(e[-1]) + 1))
    return table


CLASS_INDICES = _class_indices(_INDICES)
CLASSES = tuple(CLASS_INDICES)  # alphabetical


@dataclass(frozen=True, slots=True)
class Stimulus:
    """An image with two cues, as numbers of the 16 classes; `locator` is its place below root."""

    locator: str
    shape: int
    texture: int

    @property
    def is_conflict(self) -> bool:
        """Whether shape and texture name different classes."""
        return self.shape != self.texture


def parse_name(locator: str) -> Stimulus:
    """The stimulus of `<shape>/<shape><i>-<texture><j>.png`."""
    folder, _, name = locator.rpartition("/")
    match = FILE_NAME.match(name)
    if match is None:
        raise CasemateError("shape_bias", locator, "is not named <shape><i>-<texture><j>.png")
    shape, _, texture, _ = match.groups()
    for word in (shape, texture):
        if word not in CLASS_INDICES:
            remedy = f"names {word!r}, not one of the 16 classes: {', '.join(CLASSES)}"
            raise CasemateError("shape_bias", locator, remedy)
    if folder.rpartition("/")[2] != shape:
        raise CasemateError("shape_bias", locator, "lies in the folder of another shape")
    return Stimulus(locator, CLASSES.index(shape), CLASSES.index(texture))


def list_stimuli(root: Place) -> list[Stimulus]:
    """All stimuli below `root`, sorted by place; an error names folders that are not a class."""
    with at_key("shape_bias"):
        folders = sub_folders(root)
    if unknown := [name for name in folders if name not in CLASS_INDICES]:
        remedy = f"has folders that are not one of the 16 classes: {', '.join(unknown)}"
        raise CasemateError("shape_bias", root, remedy)
    places = sorted(
        f"{name}/{path.name}"
        for name in folders
        for path in (root / name).iterdir()
        if not path.name.startswith(".")
    )
    if not places:
        raise CasemateError("shape_bias", root, "has no stimuli; expected <shape>/*.png")
    return [parse_name(place) for place in places]


def is_published_set(stimuli: Sequence[Stimulus]) -> bool:
    """Whether the counts are those of the published 1280 images."""
    total, per_shape, per_texture, same = PUBLISHED_COUNTS
    shapes = Counter(one.shape for one in stimuli)
    textures = Counter(one.texture for one in stimuli)
    return (
        len(stimuli) == total
        and set(shapes.values()) == {per_shape}
        and set(textures.values()) == {per_texture}
        and sum(not one.is_conflict for one in stimuli) == same
    )


def class_scores(logits: Logits, *, pooling: Pooling) -> Tensor:
    """(B, 16) float64 from (B, 1000) logits: pooled probabilities of each class's indices."""
    if logits.dim() != 2 or logits.shape[1] != NUM_IMAGENET_CLASSES:
        found = "x".join(map(str, logits.shape[1:]))
        remedy = f"logits per image; the suite needs the {NUM_IMAGENET_CLASSES} of ImageNet"
        raise CasemateError("shape_bias", found, remedy)
    prob = logits.double().softmax(dim=1)
    scores = prob.new_empty(len(prob), len(CLASSES))
    for place, indices in enumerate(CLASS_INDICES.values()):
        own = prob[:, list(indices)]
        if pooling == "mean":  # from the first on, so that equal probabilities have an exact mean
            first = own[:, :1]
            scores[:, place] = (first + (own - first).mean(dim=1, keepdim=True)).squeeze(1)
        else:
            scores[:, place] = own.sum(dim=1) if pooling == "sum" else own.amax(dim=1)
    return scores


def decide(logits: Logits, *, pooling: Pooling) -> IntArray:
    """(B,) decisions among the 16 classes; the first wins a tie."""
    decisions: IntArray = class_scores(logits, pooling=pooling).argmax(dim=1).cpu().numpy()
    return decisions


def measurements(stimuli: Sequence[Stimulus], decisions: IntArray) -> list[Measurement]:
    """Shape and texture accuracy, shape bias, and the bias of each shape class."""
    if len(stimuli) != len(decisions):
        raise ValueError(f"{len(stimuli)} stimuli, but {len(decisions)} decisions")
    flags = () if is_published_set(stimuli) else (NONSTANDARD,)
    shape = np.array([one.shape for one in stimuli])
    texture = np.array([one.texture for one in stimuli])
    conflict = shape != texture
    by_shape, by_texture = decisions == shape, decisions == texture
    found = [
        share(by_shape, item="all", metric="shape_acc", flags=flags),
        share(by_shape[conflict], item="all", metric="shape_acc_conflict", flags=flags),
        share(by_texture[conflict], item="all", metric="texture_acc", flags=flags),
        _bias(by_shape[conflict], by_texture[conflict], item="all", flags=flags),
    ]
    for place, name in enumerate(CLASSES):
        own = conflict & (shape == place)
        found.append(_bias(by_shape[own], by_texture[own], item=name, flags=flags))
    return found


def _bias(
    by_shape: NDArray[np.bool_],
    by_texture: NDArray[np.bool_],
    *,
    item: str,
    flags: tuple[str, ...],
) -> Measurement:
    """N_shape / (N_shape + N_texture) over images with conflict; null if neither cue decided."""
    decided = by_shape | by_texture
    if not decided.any():
        why = "no image was decided for its shape or its texture"
        return null(item=item, metric="shape_bias", why=why, flags=flags)
    return share(by_shape[decided], item=item, metric="shape_bias", flags=flags)
