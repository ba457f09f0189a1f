"""The gallery: what was measured here, then every published table and figure with its recipes."""

import re
from collections.abc import Iterator
from pathlib import Path

from pipelines.recipe.load import available, headline
from pipelines.recipe.published import Published, beyond, papers, published

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "notebooks" / "results"
INTRODUCTION = """\
# Gallery

What was measured on a laptop, and which recipe repeats which published table or figure. `casemate
recipes --table` prints the second part with costs and with what is finished in a storage;
`casemate recipes NAME` prints a recipe.
"""


def gallery_page() -> str:
    """Measured recipes first, then paper after paper."""
    return "\n".join([INTRODUCTION, *_measured(), *_papers()]).rstrip("\n") + "\n"


def _measured() -> Iterator[str]:
    """Recipes with a page of results."""
    yield "## Measured here\n"
    yield from ("| recipe | what it is | results |", "|---|---|---|")
    pages = {page: page.read_text() for page in sorted(RESULTS.glob("*.md"))}
    for name in available():
        named = re.compile(rf"(?:`|run |make ){re.escape(name)}(?![\w-])")
        found = [page for page, text in pages.items() if named.search(text)]
        if found:
            links = ", ".join(f"[{page.stem}](results/{page.name})" for page in found)
            yield f"| `{name}` | {_cell(headline(name))} | {links} |"
    yield ""


def _papers() -> Iterator[str]:
    """The tables and figures of every paper."""
    entries = published()
    for paper, title in papers().items():
        yield f"## {title}\n"
        yield from ("| | shows | recipes | not covered |", "|---|---|---|---|")
        yield from (_row(entry) for entry in entries if entry.item.paper == paper)
        if rest := beyond(paper):
            yield f"| | of no table or figure | {_names(rest)} | |"
        yield ""


def _row(entry: Published) -> str:
    recipes = _names(entry.recipes or entry.miniatures)
    small = " (in miniature)" if entry.miniatures and not entry.recipes else ""
    gap = _cell(entry.partly or entry.missing)
    return f"| {entry.item} | {_cell(entry.title)} | {recipes}{small} | {gap} |"


def _names(recipes: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in recipes)


def _cell(text: str) -> str:
    """Text that does not end a table's cell."""
    return text.replace("|", "\\|")
