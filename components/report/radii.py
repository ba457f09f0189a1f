"""Comparison of l2 certificates: figures, one curve per sigma, envelope, published tables."""

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
    """Published radii of another work, image by image, and its impossible rows."""

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
    """Accuracy of PREDICT; None if draws stopped early: PREDICT needs a fixed number of draws."""
    if "predicted" not in result.columns:
        return None
    return share(np.asarray(result.columns["predicted"]) == np.asarray(result.columns["label"]))


def bound_chart(result: CertifyResult, *, model: str) -> Chart:
    """Histogram of the lower bounds of the class probability over the items."""
    spread = bound_distribution(result.columns["p_lower"])
    quantiles = ", ".join(f"{100 * q:g}%: {value:.4f}" for q, value in spread.quantiles.items())
    below = int((np.asarray(result.columns["p_lower"]) <= 0.5).sum())
    abstained = f"{below} of {spread.num_items} items have a bound of 1/2 or less and abstain."
    name = f"{result.name}.bounds"
    return Chart(
        name,
        f"{model}: lower bounds of the class probability under noise",
        radius_figures.bound_bars(
            spread.edges,
            spread.counts,
            name=name,
            alt=f"Lower bounds of {result.name}. {abstained}",
        ),
        (
            LegendEntry("items with a lower bound in this range", "proven", "bar"),
            LegendEntry("1/2: at or below it the prediction abstains", "muted", "dash"),
        ),
        (abstained, f"Quantiles over items (lower bound at each share): {quantiles}."),
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
    """Certificates of the same items in one chart, with their envelope and published tables."""
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
    sentences = []
    if several:
        signs.append(LegendEntry("envelope: the best line at each radius", "ink", "line"))
        sentences.append(
            "The envelope is the convention of the literature. It is optimistic: sigma is chosen "
            "per radius on the same items, and no single classifier attains it."
        )
    if compared:
        signs.append(LegendEntry("from published tables", "muted", "dash"))
        sentences.append(
            "Published radii are taken as the smallest number that rounds to the printed one. "
            "Their items, models and budgets may differ, and their votes are not checked."
        )
        sentences += [_first_problem(table) for table in compared if table.problems]
    table = _curves_table(name, radii, group, compared, with_envelope=several)
    title = "Certified accuracy by l2 radius, side by side"
    return Chart(name, title, svg, tuple(signs), tuple(sentences), table)


def _first_problem(table: ComparedTable) -> str:
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
    """Certified accuracy at the declared radii; at radius 0 the label alone must be right."""
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
