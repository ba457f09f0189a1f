"""The per-image table of Cohen et al. 2019, tab-separated: export and import.

Columns: idx, label, predict (-1 abstains), radius, correct, time in seconds. Published tables print
three significant digits, rounded to nearest, and some have a running total in `correct`. Therefore
a radius that is read counts as the smallest number that is printed this way, and correctness is
computed from label and prediction alone.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal, InvalidOperation
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.certify.l2.bounds import max_radius
from components.certify.l2.predict import ABSTAIN
from components.certify.l2.settings import PublishedRadiiSettings
from components.core.errors import CasemateError
from components.core.files import atomic
from components.core.types import FloatArray

COLUMNS = ("idx", "label", "predict", "radius", "correct", "time")
DECIMALS = 6  # decimals of exported radii, which are truncated, not rounded
PUBLISHED_DIGITS = 3  # significant ones, rounded to nearest; trailing zeros are not printed


@dataclass(frozen=True, slots=True)
class CohenRow:
    """One image; `radius` never exceeds the computed one, `printed` is the text in the file."""

    index: int
    label: int
    prediction: int
    radius: float
    printed: float
    stated_correct: int | None = None  # as in the file; never used to count
    seconds: float | None = None

    @property
    def correct(self) -> bool:
        """Whether prediction and label agree; an abstention is never correct."""
        return self.prediction != ABSTAIN and self.prediction == self.label


def rows_of_certificates(certificates: pa.Table) -> list[CohenRow]:
    """The rows of a `certificates.parquet` of kind gaussian; `idx` counts them, sorted by item."""
    missing = [n for n in ("label", "prediction", "radius") if n not in certificates.column_names]
    if missing:
        raise CasemateError("certificates", ", ".join(missing), "missing: not an l2 certificate")
    return [
        CohenRow(index, row["label"], row["prediction"], row["radius"], row["radius"])
        for index, row in enumerate(certificates.to_pylist())
    ]


def write_cohen_tsv(path: Path, rows: Iterable[CohenRow]) -> None:
    """Write the table; an unknown `time` is left empty."""
    with atomic(path) as temporary, temporary.open("w", newline="") as file:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(COLUMNS)
        for row in rows:
            seconds = "" if row.seconds is None else f"{row.seconds:.3f}"
            radius = _cut_off(row.radius)
            table.writerow(
                (row.index, row.label, row.prediction, radius, int(row.correct), seconds)
            )


def _cut_off(radius: float) -> str:
    """Six decimals towards zero: a printed claim may not exceed the computed one."""
    return str(Decimal(radius).quantize(Decimal(1).scaleb(-DECIMALS), rounding=ROUND_FLOOR))


def read_cohen_tsv(path: Path) -> list[CohenRow]:
    """The rows of such a table; an invalid line is an error that gives its number."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CasemateError("file", path, f"cannot be read as text: {error}") from error
    written = text.rstrip("\r\n").splitlines()
    header, *lines = csv.reader(written, delimiter="\t") if written else [[]]
    if tuple(header) != COLUMNS:
        raise CasemateError("file", path, f"does not begin with the columns {' '.join(COLUMNS)}")
    rows = [_parse(cells, path, number) for number, cells in enumerate(lines, start=2)]
    if not rows:
        raise CasemateError("file", path, "has no rows")
    if len({row.index for row in rows}) < len(rows):
        raise CasemateError("file", path, "repeats an idx")
    return rows


def _parse(cells: list[str], path: Path, number: int) -> CohenRow:
    try:
        index, label, prediction, radius, correct, time = cells
        row = CohenRow(
            index=int(index),
            label=int(label),
            prediction=int(prediction),
            radius=_least_that_prints(radius),
            printed=float(radius),
            stated_correct=int(correct),
            seconds=_seconds(time),
        )
    except (ValueError, InvalidOperation) as error:
        raise CasemateError("file", path, f"line {number} is not a row: {error}") from error
    if not 0 <= row.printed < math.inf or row.label < 0 or row.prediction < ABSTAIN:
        raise CasemateError("file", path, f"line {number} has an impossible radius or class")
    return row


def _least_that_prints(text: str) -> float:
    """The smallest number that rounds to a radius printed as `text`.

    Half a unit of its last significant digit below, or of the third one if fewer are printed.
    """
    printed = Decimal(text)
    if not printed.is_finite():
        raise ValueError(f"radius {text}")
    if printed == 0:
        return 0.0
    digits = max(len(printed.as_tuple().digits), PUBLISHED_DIGITS)
    unit = Decimal(1).scaleb(printed.adjusted() - digits + 1)
    return max(float(printed - unit / 2), 0.0)


def _seconds(text: str) -> float | None:
    """Seconds, from a number or from h:mm:ss; None if the cell is empty."""
    if not text:
        return None
    seconds = 0.0
    for part in text.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


def audit(rows: Sequence[CohenRow], *, sigma: float, n: int, alpha: float) -> Iterator[str]:
    """Impossible values in a table made with n draws of sigma at failure probability alpha."""
    bound = max_radius(sigma=sigma, n=n, alpha=alpha)
    for row in rows:
        if row.radius > bound:
            yield f"idx {row.index}: radius {row.printed} exceeds the possible {bound:.6f}"
        if row.prediction == ABSTAIN and row.printed > 0:
            yield f"idx {row.index}: abstains but claims a radius"
    stated = [row.stated_correct for row in rows]
    if None in stated or stated == [int(row.correct) for row in rows]:
        return
    if stated == list(accumulate(int(row.correct) for row in rows)):
        yield "correct is a running total, not 0 or 1 per row"
    else:
        yield "correct does not follow from label and predict"


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """Published radii of another work, image by image, and its impossible rows."""

    name: str
    correct: NDArray[np.bool_]
    radius: FloatArray
    problems: tuple[str, ...] = ()


def read_published(name: str, settings: PublishedRadiiSettings) -> PublishedTable:
    """The table that a recipe compares with; its radii are audited where sigma is known."""
    rows = read_cohen_tsv(Path(settings.path).expanduser())
    sigma, n, alpha = settings.sigma, settings.num_estimate, settings.failure_prob
    problems = tuple(audit(rows, sigma=sigma, n=n, alpha=alpha)) if sigma else ()
    correct = np.array([row.correct for row in rows])
    return PublishedTable(name, correct, np.array([row.radius for row in rows]), problems)
