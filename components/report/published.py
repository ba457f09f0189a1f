"""Published figures beside ours, where the first comment of a recipe names them in a plain form.

Three forms are read; any other text is only quoted:

    90.06 % clean
    90.06 % clean, 56.14 % under AutoAttack
    88.4 % clean; 75.0, 63.8 % certified against 2 x 2 and 4 x 4 patches

In the third, clean is the accuracy of the smoothed classifier. The caller makes sure that the run
follows the recipe: same data, model, attacks and certificates.
"""

import re
from collections.abc import Iterator, Sequence

from components.report.certified import share
from components.report.content import Accuracy, Cell, Column, ResultKind, Table
from components.report.records import CertifyResult
from components.report.wording import side

MODEL = "main"
PERCENT = r"\d+\.\d+"
FORM = re.compile(
    rf"(?P<clean>{PERCENT}) % clean"
    rf"(?:, (?P<attacked>{PERCENT}) % under AutoAttack"
    rf"|; (?P<certified>{PERCENT}(?:, {PERCENT})*) % certified against "
    r"(?P<sizes>\d+ x \d+(?:(?:,| and) \d+ x \d+)*) patches)?(?=[.,;( ]|$)"
)
Row = tuple[Cell, ...]


def beside_published(
    text: str, headline: Table, certificates: Sequence[CertifyResult]
) -> Table | None:
    """A table of published and own figures of the same quantities; None where there is none."""
    found = FORM.match(text)
    if found is None:
        return None
    rows = (
        [*_certified(found, certificates)] if found["certified"] else [*_of_main(found, headline)]
    )
    columns = (Column("Quantity"), Column("published, %", "number"), Column("here"))
    return Table("published", columns, tuple(rows), title="Published and here") if rows else None


def _of_main(found: re.Match[str], headline: Table) -> Iterator[Row]:
    """Clean accuracy, and that under an attack list which is AutoAttack and nothing else."""
    row = next((row for row in headline.rows if row[0] == MODEL), None)
    for column, cell in zip(headline.columns, row or (), strict=False):
        if isinstance(cell, Accuracy):
            if (column.title, column.kind) == ("Clean", "measured"):
                yield _row("clean", found["clean"], cell, "measured")
            if column.title == "After AutoAttack" and found["attacked"]:
                yield _row(f"AutoAttack, {column.detail}", found["attacked"], cell, "attacked")


def _certified(found: re.Match[str], certificates: Sequence[CertifyResult]) -> Iterator[Row]:
    """Shares of the one certificate against patches."""
    own = [result for result in certificates if result.family.threat_name == "patch"]
    if len(own) != 1 or not own[0].sound:
        return
    (result,) = own
    yield _row("clean, smoothed", found["clean"], share(result.correct), "measured")
    sizes = [int(size) for size in re.findall(r"(\d+) x", found["sizes"])]
    for size, value in zip(sizes, found["certified"].split(", "), strict=True):
        if size in result.document.claim["patch_sizes"]:
            yield _row(side(size), value, share(result.certified_at(size)), "proven")


def _row(quantity: str, published: str, ours: Accuracy, kind: ResultKind) -> Row:
    return quantity, float(published), ours.words(kind)
