"""Reads recipes from YAML; the only module that does."""

import logging
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from components.core.errors import CasemateError
from components.core.hints import nearest_of
from components.core.problems import RecipeError
from components.core.user_code import reading, references, with_absolute_files
from pipelines.recipe import smoke as smoking
from pipelines.recipe.consistency import consistency_problems
from pipelines.recipe.credentials import without_credentials
from pipelines.recipe.explain import explain, truth_values
from pipelines.recipe.schema.base import keys_with_off
from pipelines.recipe.schema.recipe import EXTENDS, Recipe

RECIPES = Path(__file__).parents[1] / "recipes"
MAX_BYTES = 1_000_000  # size of a recipe's file
MAX_NODES = 50_000  # keys and values, aliases counted in full
MAX_DIGITS = 100  # of a whole number
MAX_DEPTH = 50  # sections inside sections; a recipe needs eight
logger = logging.getLogger("casemate.recipe")  # no handler: prints one line on stderr


class OutOfBoundsError(yaml.YAMLError):
    """YAML that is too large to be a recipe."""


class BoundedLoader(yaml.SafeLoader):
    """YAML within bounds: aliases count in full, so a small file cannot expand to many values."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_BYTES:
            raise OutOfBoundsError(f"has {len(text):,} characters; at most {MAX_BYTES:,}")
        super().__init__(text)
        self._num_nodes, self._depth = 0, 0
        self._sizes: dict[int, int] = {}  # of composed nodes, by identity: aliases repeat them

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """One node and all below it, counted."""
        before, is_alias = self._num_nodes, self.check_event(yaml.AliasEvent)  # type: ignore[no-untyped-call]
        self._num_nodes += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise OutOfBoundsError(f"is nested deeper than {MAX_DEPTH} levels")
        node: yaml.Node | None = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        if is_alias and id(node) not in self._sizes:
            raise OutOfBoundsError("holds an alias to a section that contains it")
        if is_alias:
            self._num_nodes = before + self._sizes[id(node)]
        self._sizes[id(node)] = self._num_nodes - before
        if self._num_nodes > MAX_NODES:
            raise OutOfBoundsError(f"holds more than {MAX_NODES:,} values; aliases count in full")
        self._depth -= 1
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        """The values; a tag such as `!!bool` on a text of another kind is an error."""
        try:
            return super().construct_document(node)  # type: ignore[no-untyped-call]
        except (AttributeError, LookupError, TypeError) as error:
            raise yaml.YAMLError(f"holds a tag that does not fit its value ({error})") from error

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """A whole number; Python would take hexadecimal ones of any length."""
        if len(node.value) > MAX_DIGITS:
            raise OutOfBoundsError(f"holds a number of {len(node.value):,} digits")
        return int(super().construct_yaml_int(node))  # type: ignore[no-untyped-call]


BoundedLoader.add_constructor("tag:yaml.org,2002:int", BoundedLoader.construct_yaml_int)  # type: ignore[no-untyped-call]


def _refuse_repeated_keys(node: yaml.Node | None, *, source: str, path: str = "") -> None:
    """Refuse a repeated key: YAML would silently use the last one."""
    if isinstance(node, yaml.SequenceNode):
        for number, inner in enumerate(node.value):
            _refuse_repeated_keys(inner, source=source, path=f"{path}{number}.")
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, inner in node.value:
        here = f"{path}{key.value}"
        if here in seen:
            line = f"on line {key.start_mark.line + 1}"
            raise CasemateError(f"{source}: {here}", line, "is written twice; keep one")
        seen.add(here)
        _refuse_repeated_keys(inner, source=source, path=f"{here}.")


def available() -> list[str]:
    """Names of the ready recipes: the folder is the registry."""
    return sorted(_ready())


SMOKE = " --smoke"  # after the source of a shrunk recipe


def _ready() -> dict[str, Path]:
    return {path.stem: path for path in RECIPES.rglob("*.yaml")}


def headline(name: str) -> str:
    """Description of a ready recipe: the first comment line of its file."""
    first = _ready()[name].read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()


def header(source: str) -> dict[str, str]:
    """The entries of a recipe file's first comment, as `Figures: ...`; {} where no file is.

    They describe the result that the recipe reproduces, and count for no fingerprint.
    """
    path, found, name = Path(source.removesuffix(SMOKE)), dict[str, str](), ""
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return found
    for line in _text(path).splitlines():
        if not line.startswith("#"):
            break
        if entry := re.fullmatch(r"# ([A-Z][a-z]+):\s+(.*)", line):
            name = entry[1]
            found[name] = entry[2].strip()
        elif name:
            found[name] += " " + line.removeprefix("#").strip()
    return found


def find(name_or_path: str, *, key: str = "recipe", base: Path = Path()) -> Path:
    """The file of a ready recipe's name, or of a path relative to `base`."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        path = base / path
        if not path.is_file():
            raise CasemateError(key, path, "is not a file; check the path")
        return path
    ready = _ready()
    if name_or_path in ready:
        return ready[name_or_path]
    raise CasemateError(
        key, name_or_path, nearest_of(name_or_path, ready, listing="casemate recipes")
    )


def load(
    name_or_path: str,
    *,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    user_code: bool = True,
) -> Recipe:
    """A validated recipe from a ready name or a YAML path, with `key=value` overrides applied.

    Reading a recipe that names user code runs that code. With `user_code=False`, which is used to
    open stored recipes, such entries stay plain mappings and nothing is imported.
    """
    path = find(name_or_path)
    return loads(
        _text(path),
        source=str(path),
        overrides=overrides,
        smoke=smoke,
        base=path.parent,
        user_code=user_code,
    )


def _text(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise CasemateError("recipe", path, f"has {size:,} bytes; at most {MAX_BYTES:,}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CasemateError("recipe", path, f"cannot be read as UTF-8 text: {error}") from error


def _values(text: str, *, source: str, base: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The plain values of a recipe's text, on top of those of the recipe that it extends."""
    try:
        loader = BoundedLoader(text)
        node = loader.get_single_node()
        _refuse_repeated_keys(node, source=source)
        values = loader.construct_document(node) if node else None
    except OutOfBoundsError as error:
        raise CasemateError("recipe", source, str(error)) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-13-01
        raise CasemateError("recipe", source, f"is not valid YAML: {_one_line(error)}") from error
    if not isinstance(values, dict):
        raise CasemateError("recipe", source, "must be a mapping with at least `name` and `data`")
    if EXTENDS not in values:
        return values
    key, parent = f"{source}: {EXTENDS}", values.pop(EXTENDS)
    if not isinstance(parent, str):
        raise CasemateError(key, parent, "is neither the name of a ready recipe nor a YAML path")
    path = find(parent, key=key, base=base).resolve()
    if path in below:
        raise CasemateError(key, parent, "leads back to itself; recipes extend in one direction")
    extended = _values(_text(path), source=str(path), base=path.parent, below=(*below, path))
    extended = with_absolute_files(extended, path.parent)
    extended.pop("name", None)  # two recipes with one name would share their folders
    return merged(extended, values)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`, section by section.

    Lists are replaced whole, and so are sections of another `kind`, whose keys differ. A
    null removes an inherited section or list, unless the key gives null a meaning.
    """
    result = deepcopy(dict(under))
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            same = value.get("kind", below.get("kind")) == below.get("kind")
            result[key] = merged(below, value) if same else value
        elif value is None and isinstance(below, Mapping | list) and key not in keys_with_off():
            del result[key]
        else:
            result[key] = value
    return result


def loads(
    text: str,
    *,
    source: str,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    base: Path = Path(),
    user_code: bool = True,
) -> Recipe:
    """A recipe from YAML text; errors name `source`, paths of `extends` are relative to `base`."""
    values = _values(text, source=source, base=base)
    override_keys(values, overrides)
    if user_code and (named := references(values)):
        logger.warning("%s runs user code: %s", source, ", ".join(named))
    recipe = parse(values, source=source, base=base, user_code=user_code)
    return shrink(recipe) if smoke else recipe


def parse(
    values: Mapping[str, Any], *, source: str, base: Path = Path(), user_code: bool = True
) -> Recipe:
    """Validate plain values; every mistake becomes one line `source: key: value remedy`.

    Files of user code are relative to `base`; see `load` for `user_code`.
    """
    values = without_credentials(values, source=source)
    with reading(base=base, trusted=user_code):
        try:
            recipe = Recipe.model_validate(values)
        except ValidationError as error:
            raise RecipeError(source, explain(Recipe, values, error)) from None
        if problems := list(truth_values(Recipe, values)):
            raise RecipeError(source, problems)
        if problems := list(consistency_problems(recipe)):
            raise RecipeError(source, problems)
    recipe.__dict__["source"] = source  # frozen fields aside: see `Recipe.source`
    return recipe


def with_values(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with dotted keys replaced, validated again."""
    values = recipe.resolved()
    for key, value in changes.items():
        set_key(values, key, value)
    return parse(values, source=recipe.source)


def override_keys(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set the keys of texts `KEY=VALUE`, whose values are YAML."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise CasemateError("--set", override, "is not key=value, e.g. --set train.epochs=2")
        try:
            set_key(values, key.strip(), yaml.load(value, Loader=BoundedLoader))
        except (yaml.YAMLError, ValueError) as error:
            shown = value if len(value) < 200 else f"{value[:197]}..."
            raise CasemateError(
                f"--set {key}", shown, f"is not a YAML value: {_one_line(error)}"
            ) from error


def set_key(values: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key in nested mappings, creating missing ones; numbers index lists."""
    place: Any = values
    parts = key.split(".")
    for above, part in zip(["recipe", *parts], parts, strict=False):
        if isinstance(place, list) and part.isdigit():
            slot: Any = int(part)
            if slot >= len(place):
                remedy = f"cannot be set: there are {len(place)} entries, numbered from 0"
                raise CasemateError(f"--set {key}", value, remedy)
        elif isinstance(place, dict):
            slot = part
        else:
            raise CasemateError(f"--set {key}", value, f"cannot be set: `{above}` is not a section")
        section = place
        if isinstance(place, dict) and place.get(slot) is None:
            place[slot] = {}
        place = place[slot]
    section[slot] = deepcopy(value)  # a later key may point inside it


def shrink(recipe: Recipe) -> Recipe:
    """`--smoke`: the same chain in seconds; logs what it replaced."""
    values = recipe.resolved()
    if notes := smoking.shrink(values):
        logger.warning("smoke: %s", "; ".join(notes))
    return parse(values, source=f"{recipe.source}{SMOKE}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
