"""A model card as Markdown: for MLflow's pages, for repositories, for pull requests."""

import re
from collections.abc import Iterable, Iterator, Sequence

from components.core.control_characters import visible
from components.report.card.content import Card
from components.report.card.figures import WITHOUT_NUMBER, Figure
from components.report.page import cell_text

SHORTENED = "_Shortened; `casemate card` writes the whole card._"
SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def markdown(card: Card, *, limit: int | None = None) -> str:
    """The card; with a limit of characters without its last sections and lines."""
    sections = [list(section) for section in _sections(card) if section]
    text = _joined(sections)
    if limit is None or len(text) <= limit:
        return text
    return _cut([line for section in sections for line in (*section, "")], limit)


def _joined(sections: Sequence[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _cut(lines: Sequence[str], limit: int) -> str:
    """As many whole lines as fit before the remark; headings without content are left out."""
    ending = f"\n{SHORTENED}\n"
    kept: list[str] = []
    size = len(ending)
    for line in lines:
        size += len(line) + 1
        if size > limit:
            break
        kept.append(line)
    while kept and (not kept[-1] or kept[-1].startswith(("#", "|---"))):
        kept.pop()
        if kept and kept[-1].startswith("| Figure"):
            kept.pop()
    return "\n".join([*kept, ""]) + ending


def _sections(card: Card) -> Iterator[list[str]]:
    yield [f"# {_plain(card.title)}"]
    if card.failed:
        yield [
            f"**{len(card.failed)} of {len(card.checks)} checks failed.** Do not use these "
            "numbers before the cause is known."
        ]
    yield list(_table(("", ""), ((f.term, f.value) for f in card.identity)))
    yield ["## Headline", "", *_figures(card.strip)]
    yield ["Proven: holds for every attack within the budget, rounded down. Attacked: an upper "
           "bound. Measured: no adversary. In brackets: 95% intervals (Wilson)."]  # fmt: skip
    yield ["## Trust", "", *_trust(card)]
    yield ["## All figures", "", *_figures(card.suites)]
    if card.cost.rows:
        header = [column.title for column in card.cost.columns]
        cells = (
            [cell_text(v, c) for v, c in zip(row, card.cost.columns, strict=True)]
            for row in card.cost.rows
        )
        yield ["## Cost", "", *_table(header, cells)]
    yield ["## Provenance", "", *(_fact(f.term, f.value) for f in card.provenance)]


def _trust(card: Card) -> Iterator[str]:
    passed = sum(check.holds for check in card.checks)
    yield f"- {passed} of {len(card.checks)} checks hold."
    yield from (f"- **Failed:** {_plain(check.text)}" for check in card.failed)
    for verdict in card.verdicts:
        reasons = f": {'; '.join(verdict.reasons) or verdict.passed}"
        yield f"- Attack {_plain(verdict.subject)} is **{verdict.label}**{_plain(reasons)}"
    yield from (f"- {_plain(remark)}" for remark in card.remarks)


def _figures(shown: Iterable[Figure]) -> Iterator[str]:
    header = ("Figure", "Result", "Badge", "n", "About")
    return _table(header, (_row(figure) for figure in shown), escaped=True)


def _row(figure: Figure) -> tuple[str, ...]:
    doubt = f", {figure.state}" if figure.state in ("suspect", "unchecked") else ""
    is_missing = figure.state in WITHOUT_NUMBER
    spread = f" [{figure.interval}]" if figure.interval else ""
    value = "" if is_missing else f"**{_plain(figure.text)}**{spread}"
    count = "" if figure.num_items is None else f"{figure.num_items:,}"
    about = "; ".join(filter(None, (figure.detail, figure.source, figure.note)))
    return (_plain(figure.title), value, f"{figure.badge}{doubt}", count, _plain(about))


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, escaped: bool = False
) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for row in rows:
        yield f"| {' | '.join(row if escaped else map(_plain, row))} |"


def _fact(term: str, value: str) -> str:
    return f"- {_plain(term)}: `{_one_line(value).replace('`', chr(39))}`"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    return SPECIAL.sub(r"\\\1", _one_line(text))


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))
