"""l2 certificates side by side: figures, one curve per sigma, the envelope, tables of others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from components.certify.l2.curves import (
    BoundDistribution,
    average_certified_radius,
    bound_distribution,
    certified_curve,
    envelope,
    num_possible_failures,
)
from components.core.types import FloatArray
from components.report import radius_figures
from components.report.certified import share
from components.report.content import Accuracy, Cell, Chart, Column, LegendEntry, Table
from components.report.figures import certified_steps
from components.report.results import CertifyResult

ModelOf = Callable[[CertifyResult], str]


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """Radii that somebody else published, image by image, and what cannot be true of them."""

    name: str
    correct: NDArray[np.bool_]
    radius: FloatArray
    problems: tuple[str, ...] = ()


def figures_table(results: Sequence[CertifyResult], model_of: ModelOf) -> Table:
    """One row per certificate: labels, radii, draws."""
    columns = (
        Column("Certificate"),
        Column("Model"),
        Column("sigma", "number"),
        Column("method"),
        Column("right, not abstained", "measured"),
        Column("right label", "measured", "PREDICT, without a radius"),
        Column("average certified radius", "number"),
        Column("draws", "number", "mean per item"),
        Column("draws", "number", "at most"),
        Column("claims that may be false", "number", "together, 99.9% sure"),
    )
    return Table("l2-figures", columns, tuple(_figures_row(r, model_of(r)) for r in results))


def _figures_row(result: CertifyResult, model: str) -> tuple[Cell, ...]:
    settings, radius = result.document.evidence.settings, _radius(result)
    return (
        result.name,
        model,
        float(settings["sigma"]),
        str(settings.get("method", "fixed")),
        share(result.correct),
        predicted_rightly(result),
        average_certified_radius(result.correct, radius),
        round(float(np.mean(result.columns["n"])), 1),
        int(settings["num_estimate"]),
        num_possible_failures(
            num_items=len(radius), failure_prob=float(result.document.claim["failure_prob"])
        ),
    )


def predicted_rightly(result: CertifyResult) -> Accuracy | None:
    """Accuracy of PREDICT; None where draws stopped early, which it does not allow."""
    if "predicted" not in result.columns:
        return None
    return share(np.asarray(result.columns["predicted"]) == np.asarray(result.columns["label"]))


def bound_chart(result: CertifyResult, *, model: str) -> Chart:
    """How sure the vote is: the spread of the lower bounds over the items."""
    spread = bound_distribution(result.columns["p_lower"])
    quantiles = ", ".join(f"{100 * q:g}%: {value:.4f}" for q, value in spread.quantiles.items())
    below = int((np.asarray(result.columns["p_lower"]) <= 0.5).sum())
    said = f"{below} of {spread.num_items} items have a bound of 1/2 or less and abstain."
    name = f"{result.name}.bounds"
    return Chart(
        name,
        f"{model}: how sure the vote under noise is",
        radius_figures.bound_bars(
            spread.edges, spread.counts, name=name, alt=f"Lower bounds of {result.name}. {said}"
        ),
        (
            LegendEntry("items with a lower bound in this range", "proven", "bar"),
            LegendEntry("1/2: at or below it an item abstains", "muted", "dash"),
        ),
        (said, f"Quantiles over items (lower bound at each share): {quantiles}."),
        _bound_table(name, spread),
    )


def _bound_table(name: str, spread: BoundDistribution) -> Table:
    columns = tuple(Column(title, "number") for title in ("from", "to", "items"))
    ends = zip(spread.edges[:-1], spread.edges[1:], spread.counts, strict=True)
    return Table(
        name, columns, tuple((round(float(a), 4), round(float(b), 4), int(n)) for a, b, n in ends)
    )


def curves_charts(
    results: Sequence[CertifyResult], *, model_of: ModelOf, compared: Sequence[ComparedTable]
) -> tuple[Chart, ...]:
    """Certificates of the same items in one chart, with their envelope, beside others' tables."""
    groups: dict[tuple[str, ...], list[CertifyResult]] = {}
    for result in results:
        groups.setdefault(tuple(result.columns["item_id"]), []).append(result)
    shown = [group for group in groups.values() if compared or len(_sigmas(group)) > 1]
    return tuple(_curves(number, group, model_of, compared) for number, group in enumerate(shown))


def _sigmas(group: Sequence[CertifyResult]) -> set[float]:
    return {_sigma(result) for result in group}


def _curves(
    number: int,
    group: Sequence[CertifyResult],
    model_of: ModelOf,
    compared: Sequence[ComparedTable],
) -> Chart:
    radii = np.array(sorted({0.0, *(r for one in group for r in one.document.claim["radii"])}))
    several = len(_sigmas(group)) > 1
    lines = [_line(f"{r.name}, sigma {_sigma(r):g}", r.correct, _radius(r)) for r in group]
    others = [_line(table.name, table.correct, table.radius) for table in compared]
    name = f"l2-curves-{number}"
    shown = ", ".join(line.label for line in (*lines, *others))
    svg = radius_figures.curves(
        lines,
        others=others,
        with_envelope=several,
        name=name,
        alt=f"Certified accuracy by l2 radius of {shown}.",
    )
    signs = [LegendEntry("proven, one line per certificate", "proven", "line")]
    said = []
    if several:
        signs.append(LegendEntry("envelope: the best line at each radius", "ink", "line"))
        said.append(
            "The envelope is the convention of the literature and optimistic: it chooses sigma per "
            "radius on these very items, and no single classifier attains it."
        )
    if compared:
        signs.append(LegendEntry("read from tables of others", "muted", "dash"))
        said.append(
            "Radii of others count as the smallest number that prints like theirs; their items, "
            "models and budgets are their own, and nothing here checks their votes."
        )
        said += [_doubts(table) for table in compared if table.problems]
    table = _curves_table(name, radii, group, compared, with_envelope=several)
    title = "Certified accuracy by l2 radius, side by side"
    return Chart(name, title, svg, tuple(signs), tuple(said), table)


def _doubts(table: ComparedTable) -> str:
    more = f" and {len(table.problems) - 1} more" if len(table.problems) > 1 else ""
    return f"{table.name}: {table.problems[0]}{more}."


def _line(label: str, correct: NDArray[np.bool_], radius: FloatArray) -> radius_figures.RadiusLine:
    return radius_figures.RadiusLine(
        label, *certified_steps(radius[correct & (radius > 0)], num_items=len(radius))
    )


def _curves_table(
    name: str,
    radii: FloatArray,
    group: Sequence[CertifyResult],
    compared: Sequence[ComparedTable],
    *,
    with_envelope: bool,
) -> Table:
    """Certified accuracy at the declared radii; 0 is a right answer without a distance."""
    curves = [certified_curve(r.correct, _radius(r), sigma=_sigma(r), radii=radii) for r in group]
    parts: dict[Column, Sequence[Cell]] = {Column("radius", "number"): radii.tolist()}
    for result in group:
        column = Column(result.name, "proven", f"sigma {_sigma(result):g}")
        parts[column] = [share(result.certified_at(r)) for r in radii]
    if with_envelope:
        best = envelope(curves)
        parts[Column("envelope", "number", "share")] = best.values.tolist()
        parts[Column("best sigma", "number")] = best.sigmas.tolist()
    for table in compared:
        column = Column(table.name, "measured", "table of others")
        parts[column] = [share(table.correct & (table.radius >= r)) for r in radii]
    return Table(name, tuple(parts), tuple(zip(*parts.values(), strict=True)))


def _radius(result: CertifyResult) -> FloatArray:
    return np.asarray(result.columns["radius"], dtype=np.float64)


def _sigma(result: CertifyResult) -> float:
    return float(result.document.evidence.settings["sigma"])
