"""Chapter of the l2 certificates: accuracy by radius, one curve per sigma, published tables."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from components.certify.l2.cohen_tsv import PublishedTable
from components.certify.l2.curves import (
    BoundDistribution,
    average_certified_radius,
    bound_distribution,
    certified_curve,
    envelope,
    num_possible_failures,
)
from components.core.shares import wilson_interval
from components.core.types import FloatArray
from components.report import radius_figures
from components.report.certified import (
    attack_legend,
    budget_points,
    challenge_sentences,
    challenged_point,
    primary_budget,
    proof_paragraphs,
    share,
    standard_sentence,
    wrong_sentence,
)
from components.report.content import Accuracy, Cell, Chapter, Chart, Column, LegendEntry, Table
from components.report.records import CertifyResult
from components.report.run_results import Results
from components.report.sweeps import ModelOf


def chapter(results: Results, found: Sequence[CertifyResult], *, num_examples: int) -> Chapter:
    """l2 certificates."""
    model_of = results.model_of
    return Chapter(
        "radii",
        "Proven within an l2 radius",
        " ".join(proof_paragraphs(found)),
        charts=(
            *(radius_chart(c, model=model_of(c)) for c in found),
            *curves_charts(found, model_of=model_of, published=results.published),
            *(bound_chart(c, model=model_of(c)) for c in found),
        ),
        tables=(figures_table(found, model_of),),
    )


def radius_chart(result: CertifyResult, *, model: str) -> Chart:
    """Certified accuracy by l2 radius."""
    radii = sorted({float(r) for r in result.document.claim["radii"]})
    certified, standard = [share(result.certified_at(r)) for r in radii], share(result.correct)
    knots, held, low, high = _steps(result)
    points = budget_points((f"{r:g}: " for r in radii), certified)
    svg = radius_figures.radius_curve(
        knots,
        share=held,
        low=low,
        high=high,
        standard=standard,
        attacked=challenged_point(result),
        claimed=list(zip(radii, certified, strict=True)),
        cap=float(result.document.summary["max_radius"]),
        name=result.name,
        alt=f"Certified accuracy of {model} by l2 radius, {points}.",
    )
    rows: list[tuple[Cell, ...]] = list(zip(radii, certified, strict=True))
    return Chart(
        result.name,
        f"{model}: certified accuracy by l2 radius",
        svg,
        (
            LegendEntry("proven at this radius, band: 95% interval", "proven", "line"),
            LegendEntry("largest radius that this many draws can prove", "muted", "dash"),
            LegendEntry("the vote without an adversary", "measured", "dot"),
            *attack_legend(result),
        ),
        (
            standard_sentence(result, standard),
            *wrong_sentence(result, primary_budget(result), f"radius {primary_budget(result):g}"),
            *_draws_sentences(result),
            *challenge_sentences(result, f"an l2 budget of {primary_budget(result):g}"),
        ),
        Table(
            result.name,
            (Column("radius", "number", "l2, pixels in [0, 1]"), Column("certified", "proven")),
            tuple(rows),
        ),
    )


def _steps(result: CertifyResult) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Knots of the certified curve with pointwise intervals."""
    proven = result.correct & ~np.asarray(result.columns["abstain"], dtype=np.bool_)
    radii = np.asarray(result.columns["radius"], dtype=np.float64)[proven]
    num_items = len(proven)
    knots, held = radius_figures.certified_steps(radii, num_items=num_items)
    counts = np.rint(held * num_items).astype(int)
    bounds = np.array([wilson_interval(int(k), num_items) for k in counts])
    return knots, held, bounds[:, 0], bounds[:, 1]


def _draws_sentences(result: CertifyResult) -> tuple[str, ...]:
    """Number of draws behind the radii, and their failure probability."""
    claim, settings = result.document.claim, result.document.evidence.settings
    fails = f"fails with a probability of at most {claim['failure_prob']:g}"
    if settings.get("method") != "sequential":
        draws = int(max(result.columns["n"]))
        return (f"Each radius is computed from {draws:,} noisy draws of its item and {fails}.",)
    asked = ", ".join(f"{radius:g}" for radius in settings["declared"]["radii"])
    mean, most = float(np.mean(result.columns["n"])), int(settings["num_estimate"])
    sentences = (
        f"Each item was drawn until the radii {asked} were decided: {mean:,.0f} draws on average, "
        f"at most {most:,}. Each radius {fails}; between and beyond these radii the curve is a "
        "lower bound that more draws could raise."
    )
    if 0 in settings["declared"]["radii"]:
        return (sentences,)
    return (
        sentences,
        "An item whose radii were given up early counts as an abstention here; with radius 0 "
        "among the declared ones its label would have been decided too.",
    )


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
    results: Sequence[CertifyResult], *, model_of: ModelOf, published: Sequence[PublishedTable]
) -> tuple[Chart, ...]:
    """Certificates of the same items in one chart, with their envelope and published tables."""
    groups: dict[tuple[str, ...], list[CertifyResult]] = {}
    for result in results:
        groups.setdefault(tuple(result.columns["item_id"]), []).append(result)
    shown = [group for group in groups.values() if published or len(_sigmas(group)) > 1]
    return tuple(_curves(number, group, model_of, published) for number, group in enumerate(shown))


def _sigmas(group: Sequence[CertifyResult]) -> set[float]:
    return {_sigma(result) for result in group}


def _curves(
    number: int,
    group: Sequence[CertifyResult],
    model_of: ModelOf,
    published: Sequence[PublishedTable],
) -> Chart:
    radii = np.array(sorted({0.0, *(r for one in group for r in one.document.claim["radii"])}))
    several = len(_sigmas(group)) > 1
    lines = [_line(f"{r.name}, sigma {_sigma(r):g}", r.correct, _radius(r)) for r in group]
    others = [_line(table.name, table.correct, table.radius) for table in published]
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
    if published:
        signs.append(LegendEntry("from published tables", "muted", "dash"))
        sentences.append(
            "Published radii are taken as the smallest number that rounds to the printed one. "
            "Their items, models and budgets may differ, and their votes are not checked."
        )
        sentences += [_first_problem(table) for table in published if table.problems]
    table = _curves_table(name, radii, group, published, with_envelope=several)
    title = "Certified accuracy by l2 radius, side by side"
    return Chart(name, title, svg, tuple(signs), tuple(sentences), table)


def _first_problem(table: PublishedTable) -> str:
    more = f" and {len(table.problems) - 1} more" if len(table.problems) > 1 else ""
    return f"{table.name}: {table.problems[0]}{more}."


def _line(label: str, correct: NDArray[np.bool_], radius: FloatArray) -> radius_figures.RadiusLine:
    return radius_figures.RadiusLine(
        label,
        *radius_figures.certified_steps(radius[correct & (radius > 0)], num_items=len(radius)),
    )


def _curves_table(
    name: str,
    radii: FloatArray,
    group: Sequence[CertifyResult],
    published: Sequence[PublishedTable],
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
    for table in published:
        column = Column(table.name, "measured", "table of others")
        parts[column] = [share(table.correct & (table.radius >= r)) for r in radii]
    return Table(name, tuple(parts), tuple(zip(*parts.values(), strict=True)))


def _radius(result: CertifyResult) -> FloatArray:
    return np.asarray(result.columns["radius"], dtype=np.float64)


def _sigma(result: CertifyResult) -> float:
    return float(result.document.evidence.settings["sigma"])
