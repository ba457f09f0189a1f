"""Rows of `metrics.parquet` as the chapters look them up, and as cells of tables."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from components.evaluate.metrics import NULL, MetricRow
from components.report.content import Accuracy, Cell, Column, Missing

SETTING = ("dataset", "dataset_digest", "seed", "resize", "fidelity")
Place = tuple[str, str, float | None, str]  # model, item, level, metric
Pair = tuple[MetricRow, MetricRow | None]


@dataclass(frozen=True, slots=True)
class SuiteRows:
    """Comparable numbers of one suite: the same data, seed and preprocessing for all models."""

    suite: str
    models: tuple[str, ...]  # families together, small models first
    rows: Mapping[Place, MetricRow]
    setting: str = ""  # in words, where the report holds several
    number: int = 1  # of the setting

    def row(
        self, model: str, item: str, metric: str, level: float | None = None
    ) -> MetricRow | None:
        """One number; None if it was not measured."""
        return self.rows.get((model, item, level, metric))

    def found(self, metric: str, *, model: str | None = None) -> list[MetricRow]:
        """All rows of a metric, of one model or of all."""
        return [
            row
            for (name, _, _, kind), row in self.rows.items()
            if kind == metric and model in (None, name)
        ]

    def items(self, metric: str) -> tuple[str, ...]:
        """The items that have this metric, in the order of the file."""
        return tuple(dict.fromkeys(row.item for row in self.found(metric)))

    def subject(self, model: str) -> MetricRow:
        """Any row of a model: its family, architecture and size."""
        return next(row for (name, *_), row in self.rows.items() if name == model)

    def title(self, text: str) -> str:
        """A heading, with the setting where there are several."""
        return f"{text} ({self.setting})" if self.setting else text

    def name(self, part: str) -> str:
        """The name of a chart or table of this suite; unique in the report."""
        return f"evaluate.{self.suite}.{part}" + (f"-set{self.number}" if self.setting else "")


def suite_rows(rows: Iterable[MetricRow], suite: str) -> list[SuiteRows]:
    """The rows of a suite, one part for each dataset, seed and preprocessing."""
    chosen = [row for row in rows if row.suite == suite]
    if not chosen:
        return []
    # every shift has its own dataset, which is its item
    apart = [name for name in SETTING if suite != "shifts" or not name.startswith("dataset")]
    parts: dict[tuple[object, ...], list[MetricRow]] = defaultdict(list)
    for row in chosen:
        parts[tuple(getattr(row, name) for name in apart)].append(row)
    shown = [
        name
        for name, values in zip(apart, zip(*parts, strict=True), strict=True)
        if len(set(values)) > 1
    ]
    labels = _labels(chosen)
    return [
        SuiteRows(
            suite,
            tuple(dict.fromkeys(labels[row.model, row.model_digest] for row in _ordered(part))),
            {
                (labels[row.model, row.model_digest], row.item, row.level, row.metric): row
                for row in part
            },
            ", ".join(_setting(name, getattr(part[0], name)) for name in shown),
            number,
        )
        for number, part in enumerate(parts.values(), start=1)
    ]


def _ordered(rows: Sequence[MetricRow]) -> list[MetricRow]:
    return sorted(
        rows,
        key=lambda row: (
            row.family is None,
            row.family or "",
            row.pretrain or "",
            row.params_m or 0.0,
            row.model,
            row.model_digest,
        ),
    )


def _labels(rows: Sequence[MetricRow]) -> dict[tuple[str, str], str]:
    """Model and digest -> its name, with the digest where two models have one name."""
    digests: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        digests[row.model].add(row.model_digest)
    return {
        (model, digest): model if len(found) == 1 else f"{model} {digest[:8]}"
        for model, found in digests.items()
        for digest in found
    }


def _setting(name: str, value: object) -> str:
    words = str(value)
    return words if name == "dataset" else f"{name.replace('_', ' ')} {words[:12]}"


def share(row: MetricRow | None) -> Accuracy | None:
    """A share of items with its interval; None if it was not measured or cannot be computed."""
    if row is None or row.value is None or row.n is None:
        return None
    if row.lo95 is None or row.hi95 is None:
        raise ValueError(f"{row.suite} {row.item} {row.metric} has no interval")
    return Accuracy(row.value, row.lo95, row.hi95, row.n)


def cell(row: MetricRow | None) -> Accuracy | Missing | None:
    """A share as a cell of a table: None reads `not run`, `Missing` has its reason in a note."""
    return Missing() if row is not None and row.value is None else share(row)


def share_column(title: str, detail: str, rows: Iterable[MetricRow | None]) -> Column:
    """A column of shares; of plain percentages where a share has no interval.

    A mean over variants of different items has none.
    """
    bare = any(row is not None and row.value is not None and row.lo95 is None for row in rows)
    percent = f"{detail}, %".removeprefix(", ")
    return Column(title, "number", percent) if bare else Column(title, "measured", detail)


def share_cell(row: MetricRow | None, column: Column) -> Cell:
    """A share as a cell of such a column."""
    return value(row, factor=100) if column.kind == "number" else cell(row)


def value(row: MetricRow | None, *, factor: float = 1.0) -> float | None:
    """A number; None if it was not measured or cannot be computed."""
    return None if row is None or row.value is None else factor * row.value


def points(row: MetricRow | None) -> tuple[float | None, float | None, float | None]:
    """A difference of shares and its interval in percentage points."""
    if row is None or row.value is None:
        return None, None, None
    low, high = (None if end is None else 100 * end for end in (row.lo95, row.hi95))
    return 100 * row.value, low, high


def reason(row: MetricRow | None) -> str:
    """Why a number is missing; empty if it is there."""
    if row is None:
        return "not run"
    found = [flag.removeprefix(NULL) for flag in row.flags if flag.startswith(NULL)]
    return "; ".join(found) if row.value is None else ""


def notes(rows: Iterable[MetricRow | None]) -> str:
    """Reasons for missing numbers and flags of the others, each once."""
    found: list[str] = []
    for row in rows:
        if row is not None:
            found += [flag.removeprefix(NULL) for flag in row.flags]
    return "; ".join(dict.fromkeys(found))


def flag_sentence(rows: Iterable[MetricRow | None]) -> tuple[str, ...]:
    """Flags and reasons as a sentence of a caption, if there are any."""
    found = notes(rows)
    return (f"Flags: {found}.",) if found else ()


def num_items(rows: Iterable[MetricRow | None]) -> str:
    """`1,000 items`, or their range where numbers of items differ."""
    counts = sorted({row.n for row in rows if row is not None and row.n is not None})
    if not counts:
        return "no items"
    if len(counts) == 1:
        return f"{counts[0]:,} items"
    return f"{counts[0]:,} to {counts[-1]:,} items"
