"""Adversarial transfer: matrices of accuracy, drop and transfer rate; pairs as in the paper."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from string import ascii_uppercase

from components.evaluate.metrics import MetricRow
from components.report.content import Cell, Chart, Column, LegendEntry, Table
from components.report.evaluation import rows as look
from components.report.evaluation.heat_maps import HeatCell, HeatLayout, heat_map, shade_legend
from components.report.evaluation.rows import SuiteRows
from components.report.wording import pixels

CLEAN = "clean"
RESNET = "resnet"  # the second of a pair, as in the paper
MAX_DROPS, MAX_DECIMALS, MAX_NUMBERS = 5, 6, 12  # models up to which a cell has room for them
INTRO = (
    "Perturbations made for a source model, evaluated on a target model (Bhojanapalli et al. 2021, "
    "sec. 3.5 and appendix E); the diagonal is the white-box attack. All items are perturbed, also "
    "misclassified ones. The drop is accuracy minus clean accuracy of the target. The transfer "
    "rate is the share of target errors among items that the target classified correctly and the "
    "perturbation made the source misclassify."
)


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack with its budget: the matrix is read from items `<kind>/<source>` at this level."""

    kind: str
    eps: float

    @property
    def title(self) -> str:
        return f"{self.kind.upper()}, eps {pixels(self.eps)}"


def attacks_of(suite: SuiteRows) -> list[Attack]:
    """The attacks of a matrix, in the order of the file."""
    found = [
        Attack(row.item.partition("/")[0], row.level)
        for row in suite.found("accuracy")
        if row.item != CLEAN and row.level is not None
    ]
    return list(dict.fromkeys(found))


def cell(
    suite: SuiteRows, attack: Attack, source: str, target: str, metric: str
) -> MetricRow | None:
    """A number of the matrix."""
    return suite.row(target, f"{attack.kind}/{source}", metric, attack.eps)


def _models(suite: SuiteRows, attack: Attack) -> list[str]:
    """Models of the matrix: targets in their order, then sources that were no target."""
    prefix = f"{attack.kind}/"
    sources = [
        row.item.removeprefix(prefix)
        for row in suite.found("accuracy")
        if row.item.startswith(prefix) and row.level == attack.eps
    ]
    return list(dict.fromkeys([*(m for m in suite.models if m in sources), *sources]))


def charts(suite: SuiteRows) -> Iterator[Chart]:
    for number, attack in enumerate(attacks_of(suite), start=1):
        yield _accuracy_map(suite, attack, number)
        yield _rate_map(suite, attack, number)


def _accuracy_map(suite: SuiteRows, attack: Attack, number: int) -> Chart:
    models = _models(suite, attack)
    cells: list[list[HeatCell | None]] = []
    for source in models:
        line: list[HeatCell | None] = []
        for target in models:
            found = cell(suite, attack, source, target, "accuracy")
            drop = look.points(cell(suite, attack, source, target, "drop"))[0]
            line.append(_shaded(found, len(models), below=drop, is_error=False))
        cells.append(line)
    name = suite.name(f"matrix-{number}")
    return _heat_chart(
        suite,
        models,
        cells,
        title=f"{attack.title}: accuracy of targets",
        alt=f"Accuracy of {len(models)} targets under perturbations of {len(models)} sources. "
        f"{_white_box(suite, attack, models)}",
        darker="the more errors of the target",
        notes=(
            "Rows are sources, columns targets; numbers are accuracy in percent"
            + (
                ", below them the drop from clean accuracy in points. "
                if len(models) <= MAX_DROPS
                else ". "
            )
            + f"{look.num_items(suite.found('accuracy'))}; intervals are in the table.",
            _white_box(suite, attack, models),
            *look.flag_sentence(
                cell(suite, attack, s, t, "accuracy") for s in models for t in models
            ),
        ),
        table=_matrix_table(suite, attack, models, name),
    )


def _rate_map(suite: SuiteRows, attack: Attack, number: int) -> Chart:
    models = _models(suite, attack)
    found = [[cell(suite, attack, s, t, "transfer_rate") for t in models] for s in models]
    cells = [
        [_shaded(row, len(models), below=None, is_error=True) for row in line] for line in found
    ]
    name = suite.name(f"rates-{number}")
    rows: list[tuple[Cell, ...]] = [
        (source, target, look.cell(row), row.n if row else None, look.notes([row]))
        for source, line in zip(models, found, strict=True)
        for target, row in zip(models, line, strict=True)
    ]
    columns = (
        *(Column("Source"), Column("Target"), Column("transfer rate", "attacked")),
        *(Column("n", "number", "fooled source, correct target"), Column("Note", "note")),
    )
    every = [row for line in found for row in line]
    return _heat_chart(
        suite,
        models,
        cells,
        title=f"{attack.title}: transfer rate",
        alt=f"Share of perturbations that also fool the target, for {len(models)} models; the "
        "table has every number.",
        darker="the more perturbations transfer",
        notes=(
            f"Rows are sources, columns targets, in percent of {look.num_items(every)} that were "
            "correct and whose perturbation fooled the source.",
        ),
        table=Table(name, columns, tuple(rows)),
    )


def _heat_chart(
    suite: SuiteRows,
    models: Sequence[str],
    cells: Sequence[Sequence[HeatCell | None]],
    *,
    title: str,
    alt: str,
    darker: str,
    notes: tuple[str, ...],
    table: Table,
) -> Chart:
    """A map of all models by all models, named like its table."""
    layout = _layout(suite, models)
    return Chart(
        table.name,
        suite.title(title),
        heat_map(cells, layout, kind="attacked", name=table.name, alt=alt),
        (shade_legend(f"the darker, {darker}", "attacked"), *_keys(models)),
        notes,
        table,
    )


def _shaded(
    row: MetricRow | None, num_models: int, *, below: float | None, is_error: bool
) -> HeatCell | None:
    """A cell with as many digits as there is room for."""
    if row is None or row.value is None:
        return None
    digits = 1 if num_models <= MAX_DECIMALS else 0
    text = f"{100 * row.value:.{digits}f}" if num_models <= MAX_NUMBERS else ""
    drop = f"{below:+.1f}" if below is not None and num_models <= MAX_DROPS else ""
    return HeatCell(row.value if is_error else 1 - row.value, text, drop)


def _layout(suite: SuiteRows, models: Sequence[str]) -> HeatLayout:
    families = [suite.subject(m).family if m in suite.models else None for m in models]
    breaks = [place for place in range(1, len(models)) if families[place] != families[place - 1]]
    return HeatLayout(
        [f"{letter(place)} {model}" for place, model in enumerate(models)],
        [letter(place) for place in range(len(models))],
        "target",
        "source",
        row_breaks=breaks,
        column_breaks=breaks,
    )


def letter(place: int) -> str:
    """A, B, ..., Z, AA, AB, ...: a short name for a column."""
    more, last = divmod(place, len(ascii_uppercase))
    return (letter(more - 1) if more else "") + ascii_uppercase[last]


def _keys(models: Sequence[str]) -> Iterator[LegendEntry]:
    for place, model in enumerate(models):
        yield LegendEntry(f"{letter(place)}: {model}", "muted", "dot")


def _white_box(suite: SuiteRows, attack: Attack, models: Sequence[str]) -> str:
    found = [
        f"{model} {share.percent('attacked')}"
        for model in models
        if (share := look.share(cell(suite, attack, model, model, "accuracy")))
    ]
    return f"White box: {', '.join(found)}." if found else "No white-box result."


def _matrix_table(suite: SuiteRows, attack: Attack, models: Sequence[str], name: str) -> Table:
    columns = (
        *(Column("Source"), Column("Target"), Column("clean", "measured", "target")),
        *(Column("accuracy", "attacked"), Column("drop", "number", "points")),
        *(Column("at least", "number", "95%"), Column("at most", "number", "95%")),
        *(Column("n", "number"), Column("Note", "note")),
    )
    cells: list[tuple[Cell, ...]] = []
    for source in models:
        for target in models:
            found = cell(suite, attack, source, target, "accuracy")
            drop = cell(suite, attack, source, target, "drop")
            cells.append(
                (
                    source,
                    target,
                    look.cell(suite.row(target, CLEAN, "accuracy")),
                    look.cell(found),
                    *look.points(drop),
                    found.n if found else None,
                    look.notes([found, drop]),
                )
            )
    return Table(name, columns, tuple(cells))


def tables(suite: SuiteRows) -> Iterator[Table]:
    """Pairs of models of different families, in the layout of the paper's Tables 4 and 5."""
    for number, attack in enumerate(attacks_of(suite), start=1):
        models = [m for m in _models(suite, attack) if m in suite.models]
        pairs = [
            sorted(pair, key=lambda model: suite.subject(model).family == RESNET)
            for pair in combinations(models, 2)
            if len({suite.subject(model).family for model in pair}) == 2
        ]
        if not pairs:
            continue
        columns = (
            *(Column("A"), Column("B"), Column("pre-training", "text", "of A")),
            *(Column("A clean", "measured"), Column("B clean", "measured")),
            *(Column(f"{a} to {b}", "attacked") for a, b in ("AA", "BB", "AB")),
            *(Column("drop", "number", "points"), Column("B to A", "attacked")),
            *(
                Column("drop", "number", "B to A, points"),
                Column("n", "number"),
                Column("Note", "note"),
            ),
        )
        yield Table(
            suite.name(f"pairs-{number}"),
            columns,
            tuple(_pair(suite, attack, *pair) for pair in pairs),
            title=suite.title(f"{attack.title}: pairs across families"),
        )


def _pair(suite: SuiteRows, attack: Attack, one: str, other: str) -> tuple[Cell, ...]:
    clean = [suite.row(model, CLEAN, "accuracy") for model in (one, other)]
    routes = ((one, one), (other, other), (one, other), (other, one))
    found = [cell(suite, attack, *route, "accuracy") for route in routes]
    drops = [cell(suite, attack, *route, "drop") for route in routes[2:]]
    shares = [look.cell(row) for row in (*clean, *found)]
    return (
        one,
        other,
        suite.subject(one).pretrain,
        *shares[:5],
        look.points(drops[0])[0],
        shares[5],
        look.points(drops[1])[0],
        found[0].n if found[0] else None,
        look.notes(found),
    )
