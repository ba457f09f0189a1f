"""Patch certificates that differ only in ablation size and stride: one table, two charts for all.

Table in the layout of Salman et al. 2022, Table 8; charts as in their Figures 5, 9, 12, 14 and 15.
"""

from collections.abc import Sequence

from components.report.certified import primary_budget, proven_column, share
from components.report.content import Cell, Chart, Column, LegendEntry, Table
from components.report.patch_figures import Series, sweep_curves
from components.report.records import CertifyResult
from components.report.sweeps import ModelOf, Sweep, swept_values
from components.report.wording import patch_with_area

AXES = {"size": "side of an ablation, pixels", "stride": "stride between ablations, pixels"}
MAX_LINES = 6


def patch_sizes(result: CertifyResult) -> list[int]:
    """The claimed patch sides, smallest first."""
    return sorted(int(m) for m in result.document.claim["patch_sizes"])


def _votes(sweep: Sweep) -> str:
    return sweep.first.family.short_vote_words(sweep.first.document.evidence)


def sweep_table(sweep: Sweep, model_of: ModelOf, *, image_area: int) -> Table:
    """One row per model, stride and size: standard accuracy, then certified by patch."""
    columns = [
        Column("Model"),
        Column("stride", "number", "px"),
        Column("size", "number", "px"),
        Column("without adversary", "measured"),
    ]
    for m in patch_sizes(sweep.first):
        columns.append(proven_column("certified", patch_with_area(m, image_area), sweep.first))
    models = list(dict.fromkeys(model_of(r) for r in sweep.results))
    ordered = sorted(
        sweep.results,
        key=lambda r: (models.index(model_of(r)), swept_values(r)[1], swept_values(r)[0]),
    )
    rows: list[tuple[Cell, ...]] = []
    for result in ordered:
        size, stride = swept_values(result)
        certified = [share(result.certified_at(m)) for m in patch_sizes(sweep.first)]
        rows.append((model_of(result), stride, size, share(result.correct), *certified))
    title = f"{_votes(sweep)}: accuracy by stride and size"
    return Table(sweep.name, tuple(columns), tuple(rows), title=title)


def sweep_charts(sweep: Sweep, model_of: ModelOf, *, image_area: int) -> tuple[Chart, ...]:
    """Certified and standard accuracy by size and by stride, where there are several values.

    Several models are compared at one patch size; a single model is shown at all sizes.
    """
    charts = []
    for place, axis in enumerate(AXES):
        fixed = _fixed(sweep, place)
        line = [r for r in sweep.results if swept_values(r)[1 - place] == fixed]
        if len({swept_values(r)[place] for r in line}) > 1:
            charts.append(_chart(sweep, line, model_of, axis=axis, image_area=image_area))
    return tuple(charts)


def _fixed(sweep: Sweep, place: int) -> int:
    """The value of the other axis with the most points along this one; ties: the smallest."""
    points: dict[int, set[int]] = {}
    for result in sweep.results:
        points.setdefault(swept_values(result)[1 - place], set()).add(swept_values(result)[place])
    return min(points, key=lambda value: (-len(points[value]), value))


def _chart(
    sweep: Sweep,
    line: Sequence[CertifyResult],
    model_of: ModelOf,
    *,
    axis: str,
    image_area: int,
) -> Chart:
    place = list(AXES).index(axis)
    ordered = sorted(line, key=lambda r: swept_values(r)[place])
    models = list(dict.fromkeys(model_of(r) for r in ordered))
    patches = patch_sizes(sweep.first) if len(models) == 1 else [int(primary_budget(sweep.first))]
    certified, standard = [], []
    for model in models:
        own = [r for r in ordered if model_of(r) == model]
        x = tuple(swept_values(r)[place] for r in own)
        standard.append(Series(model, x, tuple(share(r.correct) for r in own)))
        certified += [
            Series(
                model if len(models) > 1 else patch_with_area(m, image_area),
                x,
                tuple(share(r.certified_at(m)) for r in own),
            )
            for m in patches
        ]
    shown, hidden = certified[:MAX_LINES], certified[MAX_LINES:]
    other, value = list(AXES)[1 - place], swept_values(ordered[0])[1 - place]
    return Chart(
        f"{sweep.name}-{axis}",
        f"{_votes(sweep)}: accuracy by {axis}, {other} {value} px",
        sweep_curves(
            shown,
            standard[:MAX_LINES],
            sound=sweep.first.sound,
            label=AXES[axis],
            name=f"{sweep.name}-{axis}",
            alt=_alt(shown, axis=axis, sound=sweep.first.sound),
        ),
        (
            LegendEntry(_label(sweep), "proven" if sweep.first.sound else "measured", "line"),
            LegendEntry("the vote without an adversary", "measured", "line"),
        ),
        _caption(sweep, models, patches, image_area=image_area, num_hidden=len(hidden)),
    )


def _label(sweep: Sweep) -> str:
    if sweep.first.sound:
        return "proven for every patch of the size named, bars: 95% interval"
    return "by the published count of touched votes, which may be too small: not proven"


def _alt(series: Sequence[Series], *, axis: str, sound: bool) -> str:
    word = "Certified accuracy" if sound else "Accuracy called certified, not sound,"
    parts = [
        f"{s.label}: "
        + ", ".join(f"{x} {y.percent('proven')}" for x, y in zip(s.x, s.y, strict=True))
        for s in series
    ]
    return f"{word} by {axis}. {'; '.join(parts)}."


def _caption(
    sweep: Sweep,
    models: Sequence[str],
    patches: Sequence[int],
    *,
    image_area: int,
    num_hidden: int,
) -> tuple[str, ...]:
    sentences = []
    if not sweep.first.sound:
        sentences.append(
            "sound: false. These figures use the published count of touched ablations, which "
            "ignores the seam at the image's edge; they reproduce published tables and are not "
            "a guarantee."
        )
    about = f"model {models[0]}" if len(models) == 1 else f"{len(models)} models"
    sizes = ", ".join(patch_with_area(m, image_area) for m in patches)
    sentences.append(f"{about.capitalize()}; patches of {sizes}; {_num_items(sweep)} items each.")
    thinned = [r for r in sweep.results if "asked_stride" in r.document.evidence.settings]
    if thinned:
        sentences.append(
            f"{len(thinned)} of {len(sweep.results)} certificates use a subset of the votes of a "
            "finer stride; no forward pass was repeated."
        )
    if num_hidden:
        sentences.append(f"{num_hidden} more lines are shown in the table only.")
    sentences.append(
        "Choose a size or stride on other items than these: the best of several on the same items "
        "is optimistically biased."
    )
    return tuple(sentences)


def _num_items(sweep: Sweep) -> int:
    return len(sweep.first.columns["item_id"])
