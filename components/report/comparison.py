"""The page of `casemate compare`: models side by side, differences, certified curves."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from components.core.settings import Fractional
from components.core.shares import measured_percent
from components.core.types import FloatArray
from components.evaluate.comparison import SIGNIFICANT, Compared, Comparison, Share
from components.evaluate.verdicts import Kind, Verdicts
from components.report.content import (
    RESULT_KINDS,
    Accuracy,
    Cell,
    Chapter,
    Chart,
    Column,
    Content,
    Fact,
    Missing,
    Table,
)
from components.report.evaluation.plots import Curve, Series, curves, dots
from components.report.evaluation.signs import MAX_MODELS, hidden_models, sign_of
from components.report.radius_figures import RadiusLine, certified_steps, signed_curves

NAME = "comparison"
CERTIFIED = "certified"
MOST_OPEN = 24  # rows of a table that is not folded
TITLES = {"measured": "Without an adversary", "attacked": "Under attack", "proven": "Certified"}


class Subject(NamedTuple):
    """A compared model: label, name in its flow, digest, places of its results, verdicts."""

    label: str
    model: str
    digest: str
    places: tuple[str, ...]
    verdicts: Sequence[Verdicts]


def comparison_page(subjects: Sequence[Subject], found: Compared) -> Content:
    """Figures with models as columns, differences of pairs, what was refused."""
    labels = [subject.label for subject in subjects]
    chapters = [_figures(labels, found), _differences(found)]
    chapters += [chapter for chapter in (_curves(subjects, found),) if chapter]
    chapters += [chapter for chapter in (_parts(labels, found), _refused(found)) if chapter]
    tests = len(found.comparisons)
    ties = sum(one.is_tie for one in found.comparisons)
    return Content(
        " against ".join(labels) if len(labels) <= 3 else f"{len(labels)} models compared",
        f"{len(labels)} models, {tests} paired tests, {ties} of them ties",
        tuple(Fact(s.label, f"{s.model}, digest {s.digest[:12]}") for s in subjects),
        Table("headline", (Column("Model"),), ()),  # the first chapter has all models
        (),
        tuple(chapters),
        "",
        tuple(Fact(s.label, place, code=True) for s in subjects for place in s.places),
    )


# -- figures


def _figures(labels: Sequence[str], found: Compared) -> Chapter:
    whole = [share for share in found.shares if not share.is_part]
    tables = [_values(labels, whole, kind) for kind in RESULT_KINDS]
    charts = (_dots(labels, whole),) if whole else ()
    return Chapter(
        "figures",
        "Figures",
        "Only figures that at least two models share under the same conditions. A model without a "
        "value has no comparable result.",
        charts=charts,
        tables=tuple(table for table in tables if table),
    )


def _values(
    labels: Sequence[str], shares: Sequence[Share], kind: Kind, *, name: str = ""
) -> Table | None:
    """Rows are figures, columns are models."""
    own = [share for share in shares if share.kind == kind]
    figures = list(dict.fromkeys(share.figure for share in own))
    if not figures:
        return None
    held = {(share.figure, share.model): share for share in reversed(own)}
    rows: list[tuple[Cell, ...]] = []
    for figure in figures:
        found = [held.get((figure, label)) for label in labels]
        doubts = [f"{s.model}: {s.doubt}" for s in found if s is not None and s.doubt]
        cells = [Missing() if share is None else _accuracy(share) for share in found]
        rows.append((figure, *cells, "; ".join(doubts)))
    columns = [Column("Figure"), *(Column(label, kind) for label in labels), Column("Note", "note")]
    if not any(row[-1] for row in rows):  # an empty column makes a narrow page scroll
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    title = TITLES[kind]
    folded = len(rows) > MOST_OPEN
    return Table(name or f"figures.{kind}", tuple(columns), tuple(rows), title=title, folded=folded)


def _accuracy(share: Share) -> Accuracy:
    return Accuracy(share.value, share.low, share.high, share.num_items)


def _dots(labels: Sequence[str], shares: Sequence[Share]) -> Chart:
    figures = list(dict.fromkeys(share.figure for share in shares))
    held = {(share.figure, share.model): _accuracy(share) for share in reversed(shares)}
    shown = list(labels[:MAX_MODELS])
    signs = {label: sign_of(number) for number, label in enumerate(shown)}
    series = [Series([held.get((f, label)) for f in figures], signs[label]) for label in shown]
    alt = "; ".join(f"{s.figure} {s.model} {measured_percent(s.value)} %" for s in shares)
    return Chart(
        "figures",
        "All figures with 95% intervals",
        dots(figures, series, x_label="accuracy, % of items", name="figures", alt=alt),
        tuple(sign.legend(label) for label, sign in signs.items()),
        (
            "Intervals are those of each model alone; the differences below are paired and mostly "
            "shorter.",
            *hidden_models(len(labels)),
        ),
    )


# -- differences

DIFFERENCES = (
    *(Column("Figure"), Column("Model"), Column("minus"), Column("better")),
    Column("points", "number"),
    *(Column("at least", "number", "95%"), Column("at most", "number", "95%")),
    *(Column("won", "number", "items"), Column("lost", "number", "items"), Column("n", "number")),
    *(Column("p", "number"), Column("p, Holm", "number"), Column("test")),
    Column("Note", "note"),
)


def _differences(found: Compared) -> Chapter:
    whole = [one for one in found.comparisons if not one.is_part]
    return Chapter(
        "differences",
        "Differences",
        "Every pair on the same items. Won: items that only the first model is right about. p is "
        "exact (McNemar); for a mean over variants of items it is that of Student's paired t. "
        f"{holm_words(whole)} Not significant at {SIGNIFICANT:g}: a tie. A tie does not show that "
        "two models are equal; the interval shows how far apart they may be.",
        tables=(_difference_table("differences", whole),),
    )


def holm_words(comparisons: Sequence[Comparison]) -> str:
    """Whether p-values were adjusted, and for how many tests."""
    num_tests = max((one.num_tests for one in comparisons), default=0)
    if num_tests < 2:
        return "There is one test: p is not adjusted."
    return (
        f"p is also adjusted for {num_tests} tests by the method of Holm, which decides; intervals "
        "are not adjusted, so that of a tie may exclude 0."
    )


def _difference_table(name: str, comparisons: Sequence[Comparison]) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            *(one.figure, one.one, one.other, one.outcome),
            *(100 * end for end in (one.value, one.low, one.high)),
            *(one.won, one.lost, one.num_items, one.p_value, one.adjusted, one.test),
            "; ".join(filter(None, (one.note, one.defences))),
        )
        for one in comparisons
    )
    return Table(name, DIFFERENCES, rows, folded=len(rows) > MOST_OPEN)


def _parts(labels: Sequence[str], found: Compared) -> Chapter | None:
    """Variants of suites: many, so behind the whole figures."""
    parts = [one for one in found.comparisons if one.is_part]
    if not parts:
        return None
    shares = [share for share in found.shares if share.is_part]
    values = _values(labels, shares, "measured", name="variants")
    return Chapter(
        "variants",
        "Variants of suites",
        f"{holm_words(parts)} Whole figures are not among these tests.",
        tables=(*([values] if values else []), _difference_table("variants.differences", parts)),
    )


def _refused(found: Compared) -> Chapter | None:
    if not found.refusals:
        return None
    columns = (Column("Figures", "note"), Column("Model"), Column("and"), Column("Why", "note"))
    rows = tuple((", ".join(r.figures), r.one, r.other, r.why) for r in found.refusals)
    return Chapter(
        "refused", "Not comparable", "", tables=(Table("not_comparable", columns, rows),)
    )


# -- certified curves


def _curves(subjects: Sequence[Subject], found: Compared) -> Chapter | None:
    """One chart per threat and set of certificates that compare with each other."""
    charts = []
    proven = [one for one in found.comparisons if one.kind == "proven"]
    bases = list(dict.fromkeys(one.figure.partition("@")[0] for one in proven))
    for base in bases:
        own = [one for one in proven if one.figure.partition("@")[0] == base]
        for number, group in enumerate(_groups(own)):
            name = f"{base}.{number + 1}" if number else base
            charts.append(_curve_chart(base, name, group, subjects, found))
    if not charts:
        return None
    intro = "Lower bounds that hold for every attack within the budget; nothing is proven beyond."
    return Chapter("curves", "Certified curves", intro, charts=tuple(charts))


def _groups(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Labels that some chain of comparisons connects, in their order."""
    groups: list[list[str]] = []
    for one in comparisons:
        joined = [g for g in groups if one.one in g or one.other in g]
        merged = list(dict.fromkeys([*(label for g in joined for label in g), one.one, one.other]))
        groups = [g for g in groups if g not in joined] + [merged]
    return groups


def _curve_chart(
    base: str, name: str, group: Sequence[str], subjects: Sequence[Subject], found: Compared
) -> Chart:
    order = [subject.label for subject in subjects]
    shown = sorted(group, key=order.index)[:MAX_MODELS]
    signs = {label: sign_of(order.index(label) % MAX_MODELS) for label in shown}
    lines, points = [], []
    for label in shown:
        own = [s for s in found.shares if s.model == label and s.figure.partition("@")[0] == base]
        radii = _radii(subjects[order.index(label)], base, own[0].place)
        if radii is not None:
            lines.append((RadiusLine(label, *radii), signs[label]))
        points.append(Curve(list(_points(own)), signs[label]))
    alt = f"Certified accuracy of {', '.join(shown)}"
    if len(lines) == len(shown):
        svg = signed_curves(lines, name=name, alt=alt)
    else:
        x_label = "side of the square patch, pixels" if ".patch" in base else "budget"
        y_label = "certified accuracy, % of items"
        svg = curves(points, x_label=x_label, y_label=y_label, name=name, alt=alt)
    return Chart(
        name,
        f"{base}: certified accuracy",
        svg,
        tuple(signs[label].legend(label) for label in shown),
        (f"{alt}. The figures at the claimed budgets are in the table above.",
         *hidden_models(len(group))),
    )  # fmt: skip


def _radii(subject: Subject, base: str, place: str) -> tuple[FloatArray, FloatArray] | None:
    """(radius, share) knots of the certificate that was compared."""
    for own in subject.verdicts:
        if own.base == base and own.place == place and own.radii is not None:
            held = own.radii[own.radii > 0]
            return certified_steps(held, num_items=len(own.radii))
    return None


def _points(shares: Sequence[Share]) -> Iterator[tuple[float, Accuracy]]:
    """(budget, share) of one certificate: of several, the first."""
    for share in shares:
        if share.place == shares[0].place:
            budget = share.figure.partition("@")[2].split(" ")[0]
            yield Fractional.read(budget), _accuracy(share)
