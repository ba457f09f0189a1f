"""A model card as one self-contained HTML page, in the style of the report."""

from components.report.card.content import Card
from components.report.card.figures import DOUBTFUL, WITHOUT_NUMBER, Figure
from components.report.content import Cell, Column, Content, Table
from components.report.page import rendered

NOT_EVALUATED = "not evaluated"
TEMPLATE = "card/card.html.j2"
CSV = (
    *(Column("suite"), Column("figure"), Column("badge"), Column("state"), Column("about")),
    *(Column(name, "number") for name in ("value", "low", "high", "items")),
    *(Column("result"), Column("note")),
)


def page(card: Card) -> str:
    """The card as HTML; all values are escaped."""
    content = Content(
        card.title,
        f"Model {card.subject.digest[:12]}: all finished results about it",
        card.identity,
        Table("headline", (Column("Model"),), ()),
        card.checks,
        card.chapters,
        card.recipe_text,
        card.provenance,
        card.verdicts,
    )
    groups: dict[str, list[Figure]] = {}
    for figure in card.suites:
        groups.setdefault(figure.suite, []).append(figure)
    return rendered(
        TEMPLATE,
        content,
        card=card,
        tiles=[figure for figure in card.strip if figure.state != NOT_EVALUATED],
        never_run=[figure for figure in card.strip if figure.state == NOT_EVALUATED],
        groups=groups,
        figures=_csv(card),
        empty=WITHOUT_NUMBER,
        doubtful=DOUBTFUL,
    )


def _csv(card: Card) -> Table:
    """Every figure in full precision."""
    rows: list[tuple[Cell, ...]] = []
    for figure in card.suites:
        share = figure.share
        numbers: tuple[Cell, ...] = (figure.score, None, None, None)
        if share is not None:
            numbers = (share.value, share.low, share.high, share.num_items)
        about = (figure.suite, figure.title, figure.badge, figure.state, figure.detail)
        rows.append((*about, *numbers, figure.source, figure.note))
    return Table("figures", CSV, tuple(rows))
