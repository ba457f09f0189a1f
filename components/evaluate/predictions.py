"""Per-item results of a classifier, and what follows from them: accuracy, classes, comparisons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.core.errors import CasemateError
from components.core.statistics import mcnemar_p_value, paired_difference
from components.core.tables import schema_of
from components.core.types import FloatArray, IntArray, Labels, Logits
from components.evaluate.metrics import Measurement, share

TOP = 5
SCHEMA = schema_of(
    "item_id: string, label: int32, prediction: int32, top5: bool, confidence: float32"
)


@dataclass(frozen=True, eq=False, slots=True)
class Predictions:
    """What a model says about each item."""

    item_ids: tuple[str, ...]
    labels: IntArray  # (N,)
    predictions: IntArray  # (N,)
    top5: NDArray[np.bool_]  # (N,) whether the label is among the five highest logits
    confidence: FloatArray  # (N,) probability of the prediction

    def __post_init__(self) -> None:
        columns = (self.labels, self.predictions, self.top5, self.confidence)
        if any(column.shape != (len(self.item_ids),) for column in columns):
            raise ValueError(f"expected columns of {len(self.item_ids)} items")
        if len(set(self.item_ids)) < len(self.item_ids):
            raise ValueError("an item occurs twice")

    def __len__(self) -> int:
        return len(self.item_ids)

    @property
    def correct(self) -> NDArray[np.bool_]:
        """(N,) verdicts."""
        verdicts: NDArray[np.bool_] = self.predictions == self.labels
        return verdicts

    @classmethod
    def of_logits(cls, item_ids: Sequence[str], labels: Labels, logits: Logits) -> "Predictions":
        """From logits (N, K); the lowest class wins a tie, also for a place among the top five."""
        ranks = logits.argsort(dim=1, descending=True, stable=True)
        hits = (ranks[:, :TOP] == labels[:, None]).any(dim=1)
        top = ranks[:, :1]
        confidence = logits.float().softmax(dim=1).gather(1, top).squeeze(1)
        return cls(
            tuple(item_ids),
            labels.cpu().numpy().astype(np.int64),
            top.squeeze(1).cpu().numpy().astype(np.int64),
            hits.cpu().numpy(),
            confidence.cpu().numpy().astype(np.float64),
        )

    @classmethod
    def of_table(cls, table: pa.Table) -> "Predictions":
        """From the rows of `table`."""
        return cls(
            tuple(table.column("item_id").to_pylist()),
            np.asarray(table.column("label"), dtype=np.int64),
            np.asarray(table.column("prediction"), dtype=np.int64),
            np.asarray(table.column("top5"), dtype=bool),
            np.asarray(table.column("confidence"), dtype=np.float64),
        )

    def table(self) -> pa.Table:
        """One row per item (`SCHEMA`), in this order."""
        columns = [list(self.item_ids), self.labels, self.predictions, self.top5, self.confidence]
        arrays = [pa.array(c, f.type, safe=False) for c, f in zip(columns, SCHEMA, strict=True)]
        return pa.Table.from_arrays(arrays, schema=SCHEMA)

    def rows(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> "Predictions":
        """The chosen items: their positions, or one boolean per item."""
        places = np.arange(len(self))[index]
        return Predictions(
            tuple(self.item_ids[place] for place in places),
            self.labels[places],
            self.predictions[places],
            self.top5[places],
            self.confidence[places],
        )


def joined(parts: Iterable[Predictions]) -> Predictions:
    """All parts as one, sorted by item id: equal whatever the parts were."""
    tables = [part.table() for part in parts]
    return Predictions.of_table(pa.concat_tables(tables).sort_by("item_id"))


def aligned(one: Predictions, other: Predictions) -> tuple[Predictions, Predictions]:
    """Both sorted by item id; an error unless they hold the same items with the same labels."""
    missing = sorted(set(one.item_ids) ^ set(other.item_ids))
    if missing:
        remedy = f"is in one of two results only ({len(missing)} such items); compare equal items"
        raise CasemateError("items", missing[0], remedy)
    first, second = joined([one]), joined([other])
    if (different := first.labels != second.labels).any():
        item_id = first.item_ids[int(different.argmax())]
        raise CasemateError("items", item_id, "has two labels; compare results on one dataset")
    return first, second


def comparison_measurements(
    one: Predictions, other: Predictions, *, rival: str, item: str, level: float | None = None
) -> list[Measurement]:
    """`difference_to/<rival>` with its interval, and `mcnemar_p/<rival>`, the exact p-value.

    Items may come in any order.
    """
    first, second = aligned(one, other)
    return verdict_comparison(first.correct, second.correct, rival=rival, item=item, level=level)


def verdict_comparison(
    one: NDArray[np.bool_],
    other: NDArray[np.bool_],
    *,
    rival: str,
    item: str,
    level: float | None = None,
) -> list[Measurement]:
    """The same numbers from (N,) verdicts about the same items in the same order."""
    gap, p_value = paired_difference(one, other), mcnemar_p_value(one, other)
    at = partial(Measurement, item=item, level=level, n=len(one))
    return [
        at(metric=f"difference_to/{rival}", value=gap["value"], lo95=gap["low"], hi95=gap["high"]),
        at(metric=f"mcnemar_p/{rival}", value=p_value),
    ]


def accuracy_measurements(
    found: Predictions, *, item: str, level: float | None = None, flags: Iterable[str] = ()
) -> list[Measurement]:
    """Top-1 and top-5 accuracy."""
    flags = tuple(flags)
    return [
        share(found.correct, item=item, metric="accuracy", level=level, flags=flags),
        share(found.top5, item=item, metric="top5_accuracy", level=level, flags=flags),
    ]


def class_accuracy(found: Predictions, classes: Sequence[str]) -> list[Measurement]:
    """The accuracy of every class, in the order of the classes; null where it has no items."""
    if len(found) and not 0 <= found.labels.min() <= found.labels.max() < len(classes):
        raise ValueError(f"labels must be below {len(classes)}, the number of classes")
    return [
        share(found.correct[found.labels == label], item=name, metric="class_accuracy")
        for label, name in enumerate(classes)
    ]
