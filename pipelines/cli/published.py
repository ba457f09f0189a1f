"""`casemate recipes --table`: tables and figures of the papers with their recipes."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any

from components.core.errors import CasemateError
from pipelines import api
from pipelines.cli.options import Flag

Row = dict[str, Any]
WIDTH = 100  # characters of a line of recipes or of a note
OF_TABLE = {
    "storage": Flag(str, "With --table: where finished runs are looked for.", metavar="DIR|URI"),
    "accelerator": Flag(str, "With --table: of the costs; default: A100.", metavar="A"),
    "no_costs": Flag(bool, "With --table: seconds instead of a minute."),
    "markdown": Flag(bool, "With --table: as Markdown, for pages."),
}


def show_table(
    paper: str | None,
    *,
    storage: str | None,
    accelerator: str | None,
    no_costs: bool | None,
    markdown: bool | None,
    as_json: bool,
) -> None:
    """Print every table and figure, then each recipe with its cost and status."""
    if as_json and markdown:
        raise CasemateError("--markdown", "", "cannot be combined with --json")
    at = accelerator or api.ACCELERATOR
    rows = api.published(paper=paper, storage=storage, accelerator=at, costs=not no_costs)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    lines = _markdown if markdown else _terminal
    print("\n".join(lines(rows)))


def _by_paper(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row], list[Row]]]:
    """(title of a paper, its rows with equal neighbours joined, its recipes)."""
    from pipelines.recipe.published import papers

    for key in dict.fromkeys(row["paper"] for row in rows):
        own = [row for row in rows if row["paper"] == key]
        recipes = {about["recipe"]: about for row in own for about in row["recipes"]}
        title = f"{key}: {papers()[key]}" if key else "without a paper"
        yield title, _joined(own), [recipes[name] for name in sorted(recipes)]


def _joined(rows: Sequence[Row]) -> list[Row]:
    """Rows in which neighbours that differ in their number alone are one row."""
    found = []
    for _, group in groupby(rows, key=lambda row: {**row, "item": row["item"].partition(" ")[0]}):
        same = list(group)
        first, last = same[0]["item"], same[-1]["item"]
        item = first if len(same) == 1 else first.replace(" ", "s ") + f" to {last.split()[-1]}"
        found.append({**same[0], "item": item})
    return found


def _names(row: Row) -> list[str]:
    return [
        about["recipe"] + (" (miniature)" if about["miniature"] else "") for about in row["recipes"]
    ]


def _verdict(row: Row) -> str:
    """What is covered, in words."""
    if row["status"] == "not covered":
        return f"not covered: {row['note']}"
    return f"in part: {row['note']}" if row["note"] else ""


def _cost(about: Row) -> str:
    cost = about["cost"]
    left_out = " and ".join(cost["not_estimated"])
    if cost["hours_high"] is None:
        return f"not estimated{': ' if cost['why'] or left_out else ''}{cost['why'] or left_out}"
    low, high = (_hours(cost[key]) for key in ("hours_low", "hours_high"))
    spread = high if low == high else f"{low} to {high}"
    return f"{spread} h" + (f", without {left_out}" if left_out else "")


def _hours(hours: float) -> str:
    return "< 0.1" if hours < 0.1 else f"{hours:.1f}" if hours < 10 else f"{hours:.0f}"


def _status(about: Row) -> str:
    status = str(about["status"])
    downloads = about["downloads"] and not status.startswith("run")
    return f"{status}; downloads weights of timm" if downloads else status


def _terminal(rows: Sequence[Row]) -> Iterator[str]:
    for title, items, recipes in _by_paper(rows):
        yield f"\n{title}\n"
        for row in items:
            yield f"  {row['item']:<17} {row['title']}"
            for text in (", ".join(_names(row)), _verdict(row)):
                yield from (f"{'':<20}{line}" for line in _wrapped(text))
        if not recipes:
            continue
        yield ""
        table = _recipe_cells(recipes)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for cells in table:
            padded = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
            yield f"  {'  '.join(padded)}".rstrip()


def _recipe_cells(recipes: Sequence[Row]) -> list[list[str]]:
    """A head and a row per recipe: name, cost if it was estimated, status."""
    rows = [
        [about["recipe"], *([_cost(about)] if "cost" in about else []), _status(about)]
        for about in recipes
    ]
    cost = recipes[0].get("cost")
    head = [f"cost on one {cost['accelerator']}, {cost['precision']}"] if cost else []
    return [["recipe", *head, "status"], *rows]


def _wrapped(text: str) -> list[str]:
    return wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _markdown(rows: Sequence[Row]) -> Iterator[str]:
    for title, items, recipes in _by_paper(rows):
        yield f"## {title}\n"
        yield "| item | shows | recipes | not covered |"
        yield "|---|---|---|---|"
        for row in items:
            names = ", ".join(f"`{name}`" for name in _names(row))
            yield _cells(row["item"], row["title"], names, row["note"])
        yield ""
        if not recipes:
            continue
        head, *cells = _recipe_cells(recipes)
        yield _cells(*head)
        yield "|---" * len(head) + "|"
        for name, *others in cells:
            yield _cells(f"`{name}`", *others)
        yield ""


def _cells(*texts: str) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"
