"""Adversarial transfer: perturbations made for one model, evaluated on all.

Bhojanapalli et al. 2021, sec. 3.5 and appendix E: FGSM and PGD without a random start, one gray
level in l-inf at the network's input, on all images, also on those that are misclassified already.

Steps are fractions of a gray level, which 8-bit images would destroy: a perturbation is kept as
whole multiples of its step, or as float32 images where clipping made other values, and the image
that is evaluated is the one that is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from components.attacks.gradient import sign_ascent
from components.attacks.projections import project_linf
from components.core.errors import CasemateError
from components.core.statistics import paired_difference
from components.core.tables import schema_of
from components.core.types import Images, Labels, LogitsFn
from components.evaluate.metrics import Measurement, null, share
from components.evaluate.settings import TransferKind, TransferSuiteSettings
from components.models.logits import check_logits

Shape = tuple[int, int, int]
Verdicts = dict[tuple[str, str | None, str], NDArray[np.bool_]]  # by attack, source, target
RESAMPLED = "resampled"  # flag: the perturbation was resized
CLEAN = "clean"  # the attack of rows about unperturbed images
SCHEMA = schema_of(  # attack: `clean`, `fgsm`, `pgd`; source: null where clean
    "item_id: string, label: int32, attack: string, source: string, target: string, "
    "prediction: int32"
)


@dataclass(frozen=True, slots=True)
class TransferModel:
    """A model with the shape (C, H, W) of its images; hold `attack_mode` around its use."""

    name: str
    logits_of: LogitsFn
    shape: Shape


@dataclass(frozen=True, eq=False, slots=True)
class Perturbation:
    """A perturbation in l-inf, kept exactly: `applied` gives the same bits again."""

    kept: Tensor  # int8 multiples of `unit`, or float32 perturbed images
    unit: float
    eps: float

    @classmethod
    def of(cls, x: Images, x_adv: Images, *, unit: float, eps: float) -> "Perturbation":
        """The perturbation from `x` to `x_adv`, as multiples of `unit` if it has that form.

        `x_adv` may differ from it by the rounding of the steps: those sums are in float32.
        """
        multiples = ((x_adv - x).double() / unit).round()
        num_steps = max(1.0, eps / unit)
        if bool((multiples.abs() <= torch.iinfo(torch.int8).max).all()):
            exact = cls(multiples.to(torch.int8), unit, eps)
            if bool(((exact.applied(x) - x_adv).abs() <= num_steps * 2.0**-23).all()):
                return exact
        return cls(x_adv.clone(), unit, eps)

    def applied(self, x: Images) -> Images:
        """The perturbed images, in the ball and in [0, 1]; `x` are the images it was made for."""
        if self.kept.dtype != torch.int8:
            return self.kept.to(x)
        return project_linf(x + self.kept.to(x) * self.unit, center=x, eps=self.eps)

    def resized(self, x: Images, other: Images) -> Images:
        """`other`, another size of `x`, with the perturbation of `x` resized to it (bilinear)."""
        delta = self.applied(x) - x
        size = (other.shape[-2], other.shape[-1])
        fitted = F.interpolate(delta, size=size, mode="bilinear", align_corners=False)
        return project_linf(other + fitted.to(other), center=other, eps=self.eps)


def craft(
    logits_of: LogitsFn, x: Images, y: Labels, attack: TransferKind, how: TransferSuiteSettings
) -> Perturbation:
    """The perturbation of one model: FGSM in one step of eps, PGD in equal parts of it.

    The steps of PGD add up to eps, so its projection only corrects rounding.
    """
    num_steps = 1 if attack == "fgsm" else how.num_steps
    step_size = how.eps / num_steps
    x_adv = sign_ascent(
        logits_of, x, y, start=x, eps=how.eps, step_size=step_size, num_steps=num_steps
    )
    return Perturbation.of(x, x_adv, unit=step_size, eps=how.eps)


def conflict(source: Shape, target: Shape, how: TransferSuiteSettings) -> str | None:
    """Why a perturbation of one model does not fit another; None if it does."""
    if source == target or (how.resample and source[0] == target[0]):
        return None
    return f"the source takes {_size(source)}, the target {_size(target)}"


def transfer_predictions(
    models: Sequence[TransferModel],
    images: Mapping[Shape, Images],
    y: Labels,
    item_ids: Sequence[str],
    how: TransferSuiteSettings,
) -> pa.Table:
    """Predictions of every model on clean images and on the perturbations of every model.

    `images` holds the same items in each size that a model takes. Every perturbation is made once
    and evaluated on all targets while in memory; pairs that do not fit (`conflict`) have no rows.
    """
    _check(models, images, len(item_ids))
    tables = [_rows(item_ids, y, CLEAN, None, model, images[model.shape]) for model in models]
    for source in models:
        x = images[source.shape]
        for attack in how.attacks:
            found = craft(source.logits_of, x, y, attack, how)
            x_adv = found.applied(x)
            for target in models:
                if conflict(source.shape, target.shape, how) is not None:
                    continue
                same = source.shape == target.shape
                inputs = x_adv if same else found.resized(x, images[target.shape])
                tables.append(_rows(item_ids, y, attack, source.name, target, inputs))
    return pa.concat_tables(tables)


def measurements(
    results: pa.Table, shapes: Mapping[str, Shape], how: TransferSuiteSettings
) -> dict[str, list[Measurement]]:
    """Per target: clean accuracy; per attack and source (item `pgd/<source>`, level eps) the
    accuracy, its drop from clean and the transfer rate. The diagonal is the white-box attack.

    transfer_rate = P(target wrong | source fooled, target right on the clean image), where a
    source is fooled by a perturbation that turns its right prediction into a wrong one.
    """
    verdicts = _verdicts(results)
    found: dict[str, list[Measurement]] = {}
    for target in shapes:
        rows = [share(verdicts[CLEAN, None, target], item=CLEAN, metric="accuracy")]
        for attack, source in product(how.attacks, shapes):
            why = conflict(shapes[source], shapes[target], how)
            flags = () if shapes[source] == shapes[target] else (RESAMPLED,)
            rows += (
                _cell(verdicts, attack, source, target, eps=how.eps, flags=flags)
                if why is None
                else _no_cell(f"{attack}/{source}", eps=how.eps, why=why)
            )
        found[target] = rows
    return found


def _cell(
    verdicts: Verdicts,
    attack: str,
    source: str,
    target: str,
    *,
    eps: float,
    flags: tuple[str, ...],
) -> list[Measurement]:
    item = f"{attack}/{source}"
    clean, right = verdicts[CLEAN, None, target], verdicts[attack, source, target]
    fooled = verdicts[CLEAN, None, source] & ~verdicts[attack, source, source]
    drop = paired_difference(right, clean)
    return [
        share(right, item=item, level=eps, metric="accuracy", flags=flags),
        Measurement(
            item=item,
            level=eps,
            metric="drop",
            value=drop["value"],
            n=len(right),
            lo95=drop["low"],
            hi95=drop["high"],
            flags=flags,
        ),
        share(~right[fooled & clean], item=item, level=eps, metric="transfer_rate", flags=flags),
    ]


def _no_cell(item: str, *, eps: float, why: str) -> list[Measurement]:
    names = ("accuracy", "drop", "transfer_rate")
    return [null(item=item, level=eps, metric=name, why=why) for name in names]


def _verdicts(results: pa.Table) -> Verdicts:
    """(N,) verdicts by attack, source and target, all in the order of their item ids."""
    rows = results.sort_by([(name, "ascending") for name in ("target", "attack", "item_id")])
    groups: dict[tuple[str, str | None, str], list[tuple[str, bool]]] = {}
    for row in rows.to_pylist():
        key = (row["attack"], row["source"], row["target"])
        groups.setdefault(key, []).append((row["item_id"], row["prediction"] == row["label"]))
    first = [item_id for item_id, _ in next(iter(groups.values()))]
    for (attack, source, target), group in groups.items():
        if [item_id for item_id, _ in group] != first:
            raise ValueError(f"{attack} of {source} on {target} is about other items")
    return {key: np.array([right for _, right in group]) for key, group in groups.items()}


@torch.no_grad()
def _rows(
    item_ids: Sequence[str],
    y: Labels,
    attack: str,
    source: str | None,
    target: TransferModel,
    x: Images,
) -> pa.Table:
    prediction = check_logits(target.logits_of(x), item_ids).argmax(dim=1)
    columns = [
        list(item_ids),
        y.tolist(),
        [attack] * len(x),
        [source] * len(x),
        [target.name] * len(x),
        prediction.tolist(),
    ]
    arrays = [pa.array(column, f.type) for column, f in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _check(models: Sequence[TransferModel], images: Mapping[Shape, Images], num_items: int) -> None:
    if len({model.name for model in models}) < len(models):
        raise ValueError("two models have one name")
    for model in models:
        if model.shape not in images:
            remedy = f"needs images of {_size(model.shape)}"
            raise CasemateError("transfer", model.name, remedy)
        if tuple(images[model.shape].shape) != (num_items, *model.shape):
            raise ValueError(f"images for {model.name} must be {num_items} x {_size(model.shape)}")


def _size(shape: Shape) -> str:
    return "x".join(map(str, shape))
