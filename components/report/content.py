"""What the page is made of: plain frozen values, ready to be set in type.

Every number about robustness has a standing, and the page never lets a reader guess which one:
*measured* (accuracy on the items as they are), *attacked* (what was left after an attack, so an
upper limit of what holds) and *proven* (a certificate, so a lower limit that no attack undercuts).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from components.core.errors import CasemateError

Standing = Literal["measured", "attacked", "proven"]
ColumnKind = Literal["text", "number", "measured", "attacked", "proven"]
STANDINGS: tuple[Standing, ...] = ("measured", "attacked", "proven")


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A share of items with its exact 95% interval."""

    value: float
    low: float
    high: float
    num_items: int

    @classmethod
    def parse(cls, raw: Mapping[str, Any], *, source: str) -> "Accuracy":
        """From the JSON form that all stages write."""
        try:
            value, low, high = (float(raw[key]) for key in ("value", "low", "high"))
            result = cls(value, low, high, int(raw["num_items"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CasemateError(
                source, raw, "is no accuracy {value, low, high, num_items}"
            ) from error
        if result.num_items < 1 or not 0 <= result.low <= result.value <= result.high <= 1:
            raise CasemateError(source, raw, "is no accuracy: needs 0 <= low <= value <= high <= 1")
        return result

    @property
    def num_correct(self) -> int:
        """The integer count behind the share."""
        return round(self.value * self.num_items)

    def percent(self, standing: Standing) -> str:
        """One decimal; a proven share is rounded down, so that the text never promises more.

        Division of the counts matters: 0.57 * 1000 is 569.99... in binary, and would print as 56.9.
        """
        if standing == "proven":
            tenths = self.num_correct * 1000 // self.num_items
            return f"{tenths // 10}.{tenths % 10}%"
        return f"{100 * self.value:.1f}%"

    def interval(self) -> str:
        """Both ends rounded outwards, so that the printed interval covers the exact one."""
        low, high = math.floor(1000 * self.low) / 10, math.ceil(1000 * self.high) / 10
        return f"{low:.1f} to {high:.1f}"


Cell = str | int | float | bool | Accuracy | None


@dataclass(frozen=True, slots=True)
class Column:
    """A table column; the three standings hold accuracies, the other two plain values."""

    title: str
    kind: ColumnKind = "text"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows for the page and, under `name`, for a CSV file."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    marked: int | None = None  # the row that the page points out
    mark: str = ""
    title: str = ""  # above the table, where the chapter holds several

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
    """A sign in a chart and its meaning; set in HTML, where it stays legible on a phone."""

    label: str
    colour: str  # name of a page colour: measured, attacked, proven, muted
    sign: Literal["bar", "line", "dash", "dot", "diamond"]


@dataclass(frozen=True, slots=True)
class Chart:
    """An inline SVG with everything needed to understand it without seeing it."""

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
    verdict: Literal["", "right", "wrong"] = ""


@dataclass(frozen=True, slots=True)
class Strip:
    """Pictures of one item, side by side."""

    title: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class Gallery:
    """Strips that share one explanation."""

    title: str
    caption: str
    strips: tuple[Strip, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """A term and its value; `code` values are set in a fixed-width face."""

    term: str
    value: str
    code: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """A statement that the page tested against its own inputs."""

    holds: bool
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether attacked accuracy can be believed, and if not, why."""

    subject: str
    label: Literal["reliable", "suspect"]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A chapter of the page; empty parts are not shown."""

    anchor: str
    title: str
    intro: str = ""
    charts: tuple[Chart, ...] = ()
    galleries: tuple[Gallery, ...] = ()
    tables: tuple[Table, ...] = ()
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class Content:
    """The whole page."""

    title: str
    subtitle: str
    identity: tuple[Fact, ...]
    headline: Table
    checks: tuple[Check, ...]
    sections: tuple[Section, ...]
    recipe_text: str
    provenance: tuple[Fact, ...] = field(default=())
    verdicts: tuple[Verdict, ...] = field(default=())

    def tables(self) -> tuple[Table, ...]:
        """Every table of the page, each name once."""
        found = [self.headline]
        for section in self.sections:
            found += [chart.table for chart in section.charts if chart.table]
            found += section.tables
        names = [table.name for table in found]
        if len(set(names)) != len(names):
            raise ValueError(f"two tables share a name: {sorted(names)}")
        return tuple(found)
