"""Content of the report page: plain frozen values, ready to be rendered.

Every accuracy is labelled with its kind: *measured* (without an adversary), *attacked* (after an
attack, so an upper bound of robust accuracy) or *proven* (certified, so a lower bound).
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from components.attacks.sanity.findings import Label
from components.core import shares
from components.core.errors import CasemateError

ResultKind = shares.ShareKind
ColumnKind = Literal["text", "note", "number", "measured", "attacked", "proven"]
Sign = Literal["bar", "line", "dash", "dot", "diamond", "square", "triangle"]
RESULT_KINDS: tuple[ResultKind, ...] = ("measured", "attacked", "proven")


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A share of items with its 95% interval (`core/shares.py`)."""

    value: float
    low: float
    high: float
    num_items: int

    @classmethod
    def parse(cls, raw: Mapping[str, Any], *, where: str) -> "Accuracy":
        """From the JSON form that all stages write."""
        try:
            value, low, high = (float(raw[key]) for key in ("value", "low", "high"))
            result = cls(value, low, high, int(raw["num_items"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CasemateError(
                where, raw, "is not an accuracy {value, low, high, num_items}"
            ) from error
        if result.num_items < 1 or not 0 <= result.low <= result.value <= result.high <= 1:
            raise CasemateError(
                where, raw, "is not an accuracy: needs 0 <= low <= value <= high <= 1"
            )
        return result

    @classmethod
    def stored(cls, raw: Mapping[str, Any], *, where: str) -> "Accuracy":
        """From a file of an attack, a search or a certificate, whose interval is another one."""
        found = shares.shown(asdict(cls.parse(raw, where=where)))
        return cls(**found)

    @property
    def num_correct(self) -> int:
        """The integer count behind the share."""
        return round(self.value * self.num_items)

    def percent(self, kind: ResultKind) -> str:
        """59.7% proven, which is rounded down; 59.78% measured or attacked."""
        return f"{shares.percent(self.value, self.num_items, kind)}%"

    def words(self, kind: ResultKind) -> str:
        """The share with its interval and its number of items."""
        return f"{self.percent(kind)} ({self.interval()}), n = {self.num_items:,}"

    def interval(self) -> str:
        """Both ends rounded outwards, so that the printed interval covers the exact one."""
        return " to ".join(shares.interval_ends(self.low, self.high))


@dataclass(frozen=True, slots=True)
class Missing:
    """An accuracy that cannot be computed; a note of its row has the reason."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A verdict in one word; an alarm stands out."""

    label: str
    is_alarm: bool = False

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True, slots=True)
class Link:
    """A text that leads to an address of a server."""

    text: str
    address: str

    def __str__(self) -> str:
        return self.text

    def __post_init__(self) -> None:
        if not self.address.startswith(("http://", "https://")):
            raise ValueError(f"{self.address!r} is not an address of a server")


Cell = str | int | float | bool | Accuracy | Missing | Flag | Link | None


@dataclass(frozen=True, slots=True)
class Column:
    """A table column; the three kinds of results hold accuracies, the others plain values.

    A `note` is longer than a `text` and gets more room.
    """

    title: str
    kind: ColumnKind = "text"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a table on the page and of the CSV file `name`."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    marked: int | None = None  # the highlighted row
    mark: str = ""
    title: str = ""  # above the table, where the chapter holds several
    folded: bool = False  # a long table that the reader opens
    sortable: bool = False  # by its columns, where scripts run
    fold_label: str = ""  # what the reader opens; empty: the number of rows

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"table name {self.name!r} cannot be a file name")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.name}: {len(row)} cells, {len(self.columns)} columns"
                )


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A sign in a chart and its meaning; rendered in HTML, so that it is legible on a phone."""

    label: str
    colour: str  # name of a page colour: measured, attacked, proven, muted
    sign: Sign


@dataclass(frozen=True, slots=True)
class Chart:
    """An inline SVG with title, legend, caption and its numbers as a table."""

    name: str
    title: str
    svg: str
    legend: tuple[LegendEntry, ...]
    caption: tuple[str, ...]
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """One small image as a PNG data URI."""

    uri: str
    alt: str
    caption: str
    outcome: Literal["", "right", "wrong"] = ""  # of a prediction


@dataclass(frozen=True, slots=True)
class Strip:
    """Pictures of one item in a row."""

    title: str
    pictures: tuple[Picture, ...]
    status: Literal["", "right", "wrong"] = ""  # of what is proven about the item


@dataclass(frozen=True, slots=True)
class Gallery:
    """Strips that share one explanation."""

    title: str
    caption: str
    strips: tuple[Strip, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """A term and its value; `code` values are shown in a fixed-width font."""

    term: str
    value: str
    code: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """A consistency check of the results and whether it holds."""

    holds: bool
    text: str


@dataclass(frozen=True, slots=True)
class AttackVerdict:
    """Result of the sanity checks of one attack on one model."""

    subject: str
    label: Label
    reasons: tuple[str, ...]
    num_checks: int = 0  # that were run
    num_unchecked: int = 0  # that could not be run on this model

    @property
    def passed(self) -> str:
        """How many checks pass, and apart from these how many were not run."""
        run = self.num_checks
        missing = f", {self.num_unchecked} not checked" if self.num_unchecked else ""
        return f"{run - len(self.reasons)} of {run} sanity checks pass{missing}"


@dataclass(frozen=True, slots=True)
class Chapter:
    """A chapter of the report; empty parts are not shown."""

    anchor: str
    title: str
    intro: str = ""
    charts: tuple[Chart, ...] = ()
    galleries: tuple[Gallery, ...] = ()
    tables: tuple[Table, ...] = ()
    facts: tuple[Fact, ...] = ()
    filters: Mapping[str, str] = field(default_factory=dict)
    """What a reader may choose the chapter by, where scripts run: a value for each filter."""


@dataclass(frozen=True, slots=True)
class Content:
    """The whole report."""

    title: str
    subtitle: str
    identity: tuple[Fact, ...]
    headline: Table
    checks: tuple[Check, ...]
    chapters: tuple[Chapter, ...]
    recipe_text: str
    provenance: tuple[Fact, ...] = field(default=())
    verdicts: tuple[AttackVerdict, ...] = field(default=())
    published: tuple[Fact, ...] = ()  # the result that the recipe reproduces
    compared: Table | None = None  # its figures and ours
    steps: Table | None = None  # when and where steps ran; not stored as CSV: it differs each time

    def tables(self) -> tuple[Table, ...]:
        """All tables of the report; names must be unique."""
        found = [self.headline, *([self.compared] if self.compared else [])]
        for chapter in self.chapters:
            found += [chart.table for chart in chapter.charts if chart.table]
            found += chapter.tables
        names = [table.name for table in found]
        if len(set(names)) != len(names):
            raise ValueError(f"two tables share a name: {sorted(names)}")
        return tuple(found)
