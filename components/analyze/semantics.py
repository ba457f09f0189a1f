"""Semantics of perturbations: can other models classify the perturbation alone?

The thesis "Adversarially Robust Vision Transformers", sec. 4.3.1 and Table 9: judges that are
trained as usual classify the rescaled colour perturbation; right if the true class is among their
five highest. Robust generators score far above chance, others at chance. The text perturbs by
+delta, the published code stores x - x_adv: both signs are measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F

from components.core.errors import CasemateError
from components.core.types import Images, Labels, LogitsFn
from components.evaluate.metrics import Measurement, share
from components.models.logits import check_logits

SIGNS = {1: "plus", -1: "minus"}
SCHEMA = pa.schema(
    [
        ("item_id", pa.string()),
        ("label", pa.int32()),
        ("judge", pa.string()),
        ("sign", pa.int8()),  # 1: picture of x_adv - x, -1: of x - x_adv
        ("prediction", pa.int32()),
        ("hit", pa.bool_()),  # the label is among the k highest logits
    ]
)


@dataclass(frozen=True, slots=True)
class Judge:
    """A classifier of pictures; hold `attack_mode` around its use."""

    name: str
    logits_of: LogitsFn
    shape: tuple[int, int, int]  # (C, H, W) of its images


@torch.no_grad()
def judged(
    judges: Sequence[Judge],
    pictures: Images,
    labels: Labels,
    item_ids: Sequence[str],
    *,
    top_k: int,
) -> pa.Table:
    """One row (`SCHEMA`) per judge, sign and item, from the pictures of +delta.

    The picture of -delta is 1 minus that of delta. Ties go to the lowest class.
    """
    tables = []
    for judge in judges:
        for sign in SIGNS:
            shown = fitted(pictures if sign > 0 else 1 - pictures, judge.shape)
            logits = check_logits(judge.logits_of(shown), item_ids)
            _check_classes(judge, logits.shape[1], labels, top_k=top_k)
            ranks = logits.argsort(dim=1, descending=True, stable=True)
            hits = (ranks[:, :top_k] == labels[:, None]).any(dim=1)
            columns = [
                list(item_ids),
                labels.cpu().numpy(),
                [judge.name] * len(item_ids),
                [sign] * len(item_ids),
                ranks[:, 0].cpu().numpy(),
                hits.cpu().numpy(),
            ]
            arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
            tables.append(pa.Table.from_arrays(arrays, schema=SCHEMA))
    return pa.concat_tables(tables)


def fitted(pictures: Images, shape: tuple[int, int, int]) -> Images:
    """Pictures of the shape that a judge takes: gray ones become colour, sizes are bilinear."""
    channels, *size = shape
    if pictures.shape[1] == 1 and channels == 3:
        pictures = pictures.expand(-1, 3, -1, -1)
    if pictures.shape[1] != channels:
        remedy = f"channels do not fit pictures of {pictures.shape[1]}; choose another judge"
        raise CasemateError("judges", channels, remedy)
    if list(pictures.shape[2:]) == size:
        return pictures
    resized = F.interpolate(
        pictures, size=tuple(size), mode="bilinear", align_corners=False, antialias=True
    )
    return resized.clamp(0, 1)


def measurements(results: pa.Table, *, top_k: int, num_classes: int) -> list[Measurement]:
    """Per judge and sign (`<judge>/plus`) the share of hits; the share of guesses is `chance`."""
    names = results.column("judge").to_pylist()
    signs = np.asarray(results.column("sign"))
    hits = np.asarray(results.column("hit"), dtype=bool)
    found = []
    for judge in dict.fromkeys(names):
        for sign, word in SIGNS.items():
            rows = (np.array(names) == judge) & (signs == sign)
            item, metric = f"{judge}/{word}", f"top{top_k}_accuracy"
            found.append(share(hits[rows], item=item, metric=metric))
    chance = Measurement(item="chance", metric=f"top{top_k}_accuracy", value=top_k / num_classes)
    return [*found, chance]


def _check_classes(judge: Judge, num_classes: int, labels: Labels, *, top_k: int) -> None:
    if num_classes <= top_k:
        remedy = f"includes all {num_classes} classes of judge {judge.name}; write a smaller number"
        raise CasemateError("top_k", top_k, remedy)
    if len(labels) and int(labels.max()) >= num_classes:
        remedy = f"has {num_classes} classes, the data more; choose a judge of the same classes"
        raise CasemateError("judges", judge.name, remedy)
