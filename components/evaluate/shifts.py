"""Distribution shift: accuracy on another dataset, and on clean images of the same classes.

`masked` compares only the classes that the shifted dataset has, the protocol of ImageNet-R and -A
(Hendrycks et al. 2021); `unmasked` is the argmax over all classes of the model. The gap is clean
accuracy on the same classes minus shifted accuracy, each with the same protocol.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from components.core.errors import CasemateError
from components.core.statistics import difference
from components.core.types import IntArray, Labels, Logits
from components.data.sources.names import (
    imagenet_a_synsets,
    imagenet_r_synsets,
    imagenet_synsets,
)
from components.evaluate.metrics import Measurement, null, share

NUM_NAMED = 5  # classes that an error lists
IMAGENET_SETS = {  # prepared by components/data/sources/imagenet_variants.py
    "imagenet_r": imagenet_r_synsets,
    "imagenet_a": imagenet_a_synsets,
    "imagenet_v2": imagenet_synsets,
    "imagenet_sketch": imagenet_synsets,
}
# Number, sum, first and last of the indices in the datasets' own evaluation scripts.
PUBLISHED_INDICES = {"imagenet_r": (200, 86135, 1, 988), "imagenet_a": (200, 102178, 6, 988)}
SCHEMA = pa.schema(
    [
        ("item_id", pa.string()),
        ("label", pa.int32()),  # class of the model
        ("masked_prediction", pa.int32()),
        ("prediction", pa.int32()),
    ]
)


@dataclass(frozen=True, slots=True)
class ClassMap:
    """Label of a shifted dataset -> class of the model; None: the class is left out."""

    to_model: Mapping[int, int | None]
    num_model_classes: int

    def __post_init__(self) -> None:
        found = self.kept
        if not found or not 0 <= found[0] <= found[-1] < self.num_model_classes:
            raise ValueError(f"classes must be some of the model's {self.num_model_classes}")

    @property
    def kept(self) -> tuple[int, ...]:
        """Classes of the model that the dataset has, rising: the mask."""
        return tuple(sorted({target for target in self.to_model.values() if target is not None}))

    def of_clean(self) -> "ClassMap":
        """The map of a dataset with the model's own labels, restricted to the same classes."""
        kept = set(self.kept)
        every = range(self.num_model_classes)
        own = {label: label if label in kept else None for label in every}
        return ClassMap(own, self.num_model_classes)

    def model_labels(self, labels: Sequence[int]) -> IntArray:
        """(N,) classes of the model; -1 where the class is left out."""
        if unknown := sorted(set(labels) - set(self.to_model)):
            raise CasemateError("shifts", f"label {unknown[0]}", "is not in the class map")
        targets = [self.to_model[label] for label in labels]
        return np.array([-1 if t is None else t for t in targets], dtype=np.int64)


def imagenet_indices(name: str) -> tuple[int, ...]:
    """Places of a set's classes among the 1000, rising; checked against the published ones."""
    place = {wnid: index for index, wnid in enumerate(imagenet_synsets())}
    indices = tuple(place[wnid] for wnid in IMAGENET_SETS[name]())
    found = (len(indices), sum(indices), indices[0], indices[-1])
    published = PUBLISHED_INDICES.get(name, (1000, 499_500, 0, 999))
    if found != published or list(indices) != sorted(indices):
        raise ValueError(f"timm's list of {name} is not the published one: {found}")
    return indices


def class_map_of(
    source: str,
    dataset_classes: Sequence[str],
    *,
    num_classes: int,
    model_classes: Sequence[str] | None,
    class_map: Mapping[str, str | None],
) -> ClassMap:
    """The map of a prepared dataset: of the ImageNet sets by their source, of others by name.

    `model_classes` are the names of the model's classes, None if it has none.
    """
    if source in IMAGENET_SETS:
        if class_map:
            remedy = f"would be ignored: {source} has the labels of ImageNet; remove it"
            raise CasemateError("shifts.class_map", _listed(list(class_map)), remedy)
        return imagenet_map(source, num_classes=num_classes, wnids=model_classes)
    if model_classes is None:
        remedy = f"classes of the model have no names, so those of {source} cannot be found"
        raise CasemateError("shifts", num_classes, remedy)
    _check_names(model_classes, num_classes)
    return named_map(dataset_classes, model_classes, class_map=class_map)


def imagenet_map(name: str, *, num_classes: int, wnids: Sequence[str] | None = None) -> ClassMap:
    """The map of ImageNet-R, -A, -V2 or -Sketch, whose labels are those of the 1000 classes.

    `wnids` are the classes of the model in the order of its logits; a model of 1000 classes has
    those of ILSVRC-2012 by default. Classes that the model lacks are left out.
    """
    if wnids is None:
        if num_classes != len(imagenet_synsets()):
            remedy = f"classes are not the 1000 of ImageNet; {name} needs the model's wnids"
            raise CasemateError("shifts", num_classes, remedy)
        wnids = imagenet_synsets()
    _check_names(wnids, num_classes)
    if foreign := [wnid for wnid in wnids if wnid not in set(imagenet_synsets())]:
        remedy = f"are not WordNet ids of ImageNet; {name} needs a model of ImageNet classes"
        raise CasemateError("shifts", _listed(foreign), remedy)
    own = {wnid: place for place, wnid in enumerate(wnids)}
    every = imagenet_synsets()
    to_model = {label: own.get(every[label]) for label in imagenet_indices(name)}
    if not any(target is not None for target in to_model.values()):
        raise CasemateError("shifts", name, "shares no class with the model")
    return ClassMap(to_model, num_classes)


def named_map(
    dataset_classes: Sequence[str],
    model_classes: Sequence[str],
    *,
    class_map: Mapping[str, str | None],
) -> ClassMap:
    """The map of any dataset: equal names, and `class_map` where they differ (None: left out)."""
    _check_names(model_classes, len(model_classes))
    own = {name: place for place, name in enumerate(model_classes)}
    if unused := [name for name in class_map if name not in set(dataset_classes)]:
        remedy = "are not classes of the shifted dataset"
        raise CasemateError("shifts.class_map", _listed(unused), remedy)
    if unknown := [to for to in class_map.values() if to is not None and to not in own]:
        remedy = "are not classes of the model; correct class_map"
        raise CasemateError("shifts.class_map", _listed(unknown), remedy)
    targets = {name: class_map.get(name, name) for name in dataset_classes}
    missing = [name for name, target in targets.items() if target not in own and target is not None]
    if missing:
        remedy = "have no class of the model; map them in class_map, or to null to leave them out"
        raise CasemateError("shifts.class_map", _listed(missing), remedy)
    to_model = {
        label: None if (target := targets[name]) is None else own[target]
        for label, name in enumerate(dataset_classes)
    }
    if not any(target is not None for target in to_model.values()):
        raise CasemateError("shifts.class_map", "every class", "is left out; keep some")
    return ClassMap(to_model, len(model_classes))


def shift_predictions(
    item_ids: Sequence[str], labels: Labels, logits: Logits, class_map: ClassMap
) -> pa.Table:
    """One row per item whose class is kept (`SCHEMA`); the lowest class wins a tie."""
    if logits.dim() != 2 or logits.shape[1] != class_map.num_model_classes:
        found = "x".join(map(str, logits.shape[1:]))
        remedy = f"logits per image, but the class map has {class_map.num_model_classes} classes"
        raise CasemateError("shifts", found, remedy)
    own = class_map.model_labels(labels.tolist())
    (rows,) = np.nonzero(own >= 0)
    kept = torch.tensor(class_map.kept, device=logits.device)
    chosen = logits[torch.from_numpy(rows).to(logits.device)]
    return pa.table(
        [
            [item_ids[row] for row in rows.tolist()],
            pa.array(own[rows], pa.int32()),
            pa.array(kept[chosen[:, kept].argmax(dim=1)].tolist(), pa.int32()),
            pa.array(chosen.argmax(dim=1).tolist(), pa.int32()),
        ],
        schema=SCHEMA,
    )


def measurements(
    shifted: pa.Table, clean: pa.Table | None, class_map: ClassMap, *, item: str
) -> list[Measurement]:
    """Masked and unmasked accuracy, both also on clean images of the same classes, and the gaps."""
    flags = _flags(class_map)
    found = []
    for protocol in ("masked", "unmasked"):
        right = _correct(shifted, protocol)
        found.append(share(right, item=item, metric=protocol, flags=flags))
        if clean is None or not len(clean) or not len(shifted):
            why = "no clean images of these classes" if len(shifted) else "no items"
            names = (f"clean_{protocol}", f"gap_{protocol}")
            found += [null(item=item, metric=name, why=why, flags=flags) for name in names]
            continue
        before = _correct(clean, protocol)
        found.append(share(before, item=item, metric=f"clean_{protocol}", flags=flags))
        found.append(_gap(before, right, item=item, metric=f"gap_{protocol}", flags=flags))
    return found


def _gap(
    clean: NDArray[np.bool_],
    shifted: NDArray[np.bool_],
    *,
    item: str,
    metric: str,
    flags: tuple[str, ...],
) -> Measurement:
    counts = int(clean.sum()), int(shifted.sum())
    gap = difference(*counts, n=len(clean), n_before=len(shifted))
    return Measurement(
        item=item,
        metric=metric,
        value=gap["value"],
        n=len(shifted),
        lo95=gap["low"],
        hi95=gap["high"],
        flags=flags,
    )


def _correct(rows: pa.Table, protocol: str) -> NDArray[np.bool_]:
    column = "masked_prediction" if protocol == "masked" else "prediction"
    verdicts: NDArray[np.bool_] = np.asarray(rows.column(column)) == np.asarray(
        rows.column("label")
    )
    return verdicts


def _flags(class_map: ClassMap) -> tuple[str, ...]:
    left_out = sum(target is None for target in class_map.to_model.values())
    total = len(class_map.to_model)
    return (f"classes: {total - left_out} of {total}",) if left_out else ()


def _check_names(names: Sequence[str], num_classes: int) -> None:
    if len(names) != num_classes or len(set(names)) != num_classes:
        remedy = f"names of classes, but the model has {num_classes} classes, each with its own"
        raise CasemateError("shifts", len(set(names)), remedy)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more
