"""Results of several runs as one table: a name of its own for every model, and what they share."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from components.core.errors import CasemateError
from components.evaluate.metrics import MetricRow

ALL = "all"  # the item of numbers about a suite as a whole
MAIN = "main"  # the only model of most recipes
WHITE_BOX = "white-box"
SUITES = ("clean", "corruptions", "shifts", "shape_bias", "transfer", "spatial")
# Metrics that are accuracies of a whole benchmark; None: of any item.
WHOLE: Mapping[str, tuple[tuple[str | None, str], ...]] = {
    "clean": ((ALL, "accuracy"),),
    "corruptions": ((ALL, "mean75"), (ALL, "mean95")),
    "shifts": ((None, "masked"), (None, "unmasked")),
    "shape_bias": ((ALL, "shape_acc"),),
    "transfer": ((None, "accuracy"),),  # of white-box attacks
    "spatial": ((None, "accuracy"),),
}


class Benchmark(NamedTuple):
    """An accuracy that every model of a figure has: one place of the table of metrics."""

    suite: str
    item: str
    metric: str
    level: float | None = None

    @property
    def title(self) -> str:
        """A few words for a heading."""
        words = [self.suite, *([] if self.item == ALL else [self.item])]
        words += [] if self.metric == "accuracy" else [self.metric]
        return " ".join(words).replace("_", " ")


def merged(files: Mapping[str, Sequence[MetricRow]]) -> list[MetricRow]:
    """The rows of all files, by name of the file; equal rows of several files count once.

    A model is named by its recipe, by its own name where a recipe has several, and by its seed
    where there are several of them. White-box rows of transfer get one item for all models.
    """
    named = _named([(name, row) for name, rows in files.items() for row in rows])
    found: dict[tuple[object, ...], tuple[str, MetricRow]] = {}
    for name, row in named:
        place = (row.model, row.suite, row.item, row.level, row.metric)
        first, other = found.setdefault(place, (name, row))
        if other != row:
            what = " ".join([row.suite, row.item, row.metric])
            both = f"of {first} and of {name}" if first != name else f"in {name}"
            remedy = f"has two results of {what}: {both}; name the folders of one"
            raise CasemateError("scaling", row.model, remedy)
    return [row for _, row in found.values()]


def _named(rows: Iterable[tuple[str, MetricRow]]) -> list[tuple[str, MetricRow]]:
    whole = [(name, _white_box(row)) for name, row in rows]
    seeds: dict[str, set[int]] = defaultdict(set)
    for _, row in whole:
        seeds[_label(row)].add(row.seed)
    return [
        (
            name,
            replace(
                row,
                model=_label(row) + (f" seed {row.seed}" if len(seeds[_label(row)]) > 1 else ""),
            ),
        )
        for name, row in whole
    ]


def _label(row: MetricRow) -> str:
    if row.recipe is None:
        return row.model
    return row.recipe if row.model == MAIN else f"{row.recipe} {row.model}"


def _white_box(row: MetricRow) -> MetricRow:
    """A row of transfer whose source is its target, under an item that models share."""
    attack, slash, source = row.item.partition("/")
    if row.suite == "transfer" and slash and source == row.model:
        return replace(row, item=f"{attack} {WHITE_BOX}")
    return row


def benchmarks_of(rows: Iterable[MetricRow], *, suites: Collection[str] = ()) -> list[Benchmark]:
    """The benchmarks that some model has a value of; of these suites, or of all."""
    found = dict.fromkeys(
        Benchmark(row.suite, row.item, row.metric, row.level)
        for row in rows
        if row.value is not None and (not suites or row.suite in suites) and _is_whole(row)
    )
    return sorted(found, key=lambda b: (SUITES.index(b.suite), b.item, b.level or 0.0, b.metric))


def _is_whole(row: MetricRow) -> bool:
    if row.suite == "transfer" and not row.item.endswith(WHITE_BOX):
        return False
    if row.suite not in WHOLE or (row.level is not None and row.suite != "transfer"):
        return False
    return any(item in (None, row.item) and m == row.metric for item, m in WHOLE[row.suite])
