"""Which recipes repeat a table or figure of the papers.

Recipes say it in the line `# Paper:` of their heads; `recipes/published.toml` lists all tables and
figures and says what is not covered. Nothing is written twice.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from pipelines.recipe.load import RECIPES, available, find, headline

CATALOGUE = RECIPES / "published.toml"
KINDS = ("table", "figure")
IN_MINIATURE = " in miniature"  # marks recipes that are smaller than the published experiment
_LABEL = re.compile(r"# ([A-Z][a-z]+): ")
_NUMBERS = r"\d+[a-z]?(?:(?:, | and | to )\d+[a-z]?)*"
_REFERENCE = re.compile(rf"\b(Table|Figure)s? ({_NUMBERS})")


class Item(NamedTuple):
    """A table or figure of a paper; papers are called as the folders of their recipes."""

    paper: str
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind.capitalize()} {self.number}"


@dataclass(frozen=True, slots=True)
class Published:
    """An entry of the catalogue with the recipes that repeat it."""

    item: Item
    title: str
    recipes: tuple[str, ...]
    miniatures: tuple[str, ...]
    same_as: Item | None  # whose recipes these are
    partly: str  # what its recipes leave out
    missing: str  # why there is none


@cache
def papers() -> dict[str, str]:
    """Title of each paper, by its key."""
    return {key: str(section["paper"]) for key, section in _catalogue().items()}


def published() -> list[Published]:
    """All tables and figures, in the order of the catalogue."""
    said = {name: references(name) for name in available()}
    return [_with_recipes(item, entry, said) for item, entry in _entries()]


def references(name: str) -> frozenset[Item]:
    """The tables and figures that a recipe's head names."""
    paper = paper_of(name)
    if paper is None:
        return frozenset()
    return frozenset(
        Item(paper, kind.lower(), number)
        for kind, numbers in _REFERENCE.findall(paper_line(name))
        for number in _expanded(numbers)
    )


def beyond(paper: str | None) -> list[str]:
    """Recipes of a paper, or of none, that repeat no table or figure."""
    return [name for name in available() if paper_of(name) == paper and not references(name)]


def paper_of(name: str) -> str | None:
    """The paper of a recipe: the folder of its file."""
    folder = find(name).parent
    return None if folder == RECIPES else folder.name


def paper_line(name: str) -> str:
    """What the head of a recipe says after `# Paper:`, on one line."""
    found, inside = [], False
    for line in find(name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if label := _LABEL.match(line):
            inside = label[1] == "Paper"
            line = line.removeprefix(label[0])
        if inside:
            found.append(line.removeprefix("#").strip())
    return " ".join(found)


def is_miniature(name: str) -> bool:
    return IN_MINIATURE in headline(name)


def _catalogue() -> dict[str, dict[str, dict[str, dict[str, str]]]]:
    return tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))


def _entries() -> Iterator[tuple[Item, dict[str, str]]]:
    for paper, section in _catalogue().items():
        for kind in KINDS:
            for numbers, entry in section[kind].items():
                for number in _expanded(numbers):
                    yield Item(paper, kind, number), entry


def _with_recipes(item: Item, entry: dict[str, str], said: dict[str, frozenset[Item]]) -> Published:
    same_as = _same_as(item.paper, entry.get("same_as"))
    wanted = {item, same_as} - {None}
    names = [name for name, items in said.items() if items & wanted]
    small = {name for name in names if is_miniature(name)}
    return Published(
        item,
        entry["title"],
        recipes=tuple(name for name in names if name not in small),
        miniatures=tuple(name for name in names if name in small and item in said[name]),
        same_as=same_as,
        partly=entry.get("partly", ""),
        missing=entry.get("missing", ""),
    )


def _same_as(paper: str, text: str | None) -> Item | None:
    if text is None:
        return None
    kind, _, number = text.partition(" ")
    return Item(paper, kind.lower(), int(number))


def _expanded(numbers: str) -> Iterator[int]:
    """`1, 3 and 5 to 7` is 1, 3, 5, 6, 7; the parts of `6d` belong to 6."""
    for part in re.split(r", | and ", numbers):
        first, _, last = (re.sub("[a-z ]", "", end) for end in part.partition("to"))
        yield from range(int(first), int(last or first) + 1)
