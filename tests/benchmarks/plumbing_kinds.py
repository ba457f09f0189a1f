"""Lines that tell kinds of certificates apart, for `tests.benchmarks.plumbing`.

The kinds are `columns`, `rows`, `blocks`, `both`, `double_masking` and `gaussian`. A line of code
(comments, docstrings, imports and `__all__` are not read) counts once if it holds one of these:

- a *kind class* by name, also in an annotation: a class in a module below or called `certify` that
  sets `kind` or `kinds` to some of the kinds, or a base class of such classes. A base class of all
  kinds tells nothing apart and does not count;
- a *kind constant*: a module-level name for one kind (in a `certify` module) or for a collection of
  some of them, but not of all;
- a kind as a string: compared with an expression that says `kind`, in a `case`, as `kind=...` of a
  call, as `kind` of a kind class, or in a tuple, list, set or dict display that names two or more
  kinds and no other string;
- a *predicate*: an `is_...` function or property that returns one comparison with a kind;
- `isinstance` or `case` against what works for one family (`GaussianVoter`, `L2Challenger`, ...).

Training objectives share the words `columns` and `gaussian`. Their classes are not in `certify`
modules, and a string does not count in `components/train`, in a call of `...Objective`, or in a
comparison that says `objective` or `trained`. Telling kinds apart by a key that only one of them
has (`"radius" in entry`) is not seen.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.benchmarks.plumbing_source import Function, Module, Names, is_string, last_name

KINDS = frozenset({"columns", "rows", "blocks", "both", "double_masking", "gaussian"})
WORKER = re.compile(
    r"(Ablation|Pair|DoubleMasking|Gaussian|Smoothing|L2|Patch)\w*"
    r"(Voter|Challenger|Family|Worker|Certificate)"
)
Known = dict[tuple[str, str], frozenset[str]]  # (module, name) -> the kinds that it stands for


def kind_lines(modules: list[Module]) -> dict[str, list[int]]:
    """The lines of every file that has some, by its path."""
    finder = _Finder(modules)
    found = {module.path: sorted(set(finder.lines(module))) for module in modules}
    return {path: lines for path, lines in found.items() if lines}


def in_family(path: str) -> bool:
    """Whether the file is one of the certificate families' own."""
    return path.startswith(("components/certify/", "pipelines/stages/certify"))


def _in_certify(module: Module) -> bool:
    return any(part.startswith("certify") for part in module.name.split("."))


def _some(kinds: Iterable[str]) -> frozenset[str]:
    """The kinds, or none where they are all: what all share tells nothing apart."""
    found = frozenset(kinds)
    return frozenset() if found == KINDS else found


@dataclass
class _Finder:
    modules: list[Module]
    known: Known = field(default_factory=dict)
    predicates: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.names = Names(self.modules)
        for _ in range(3):  # constants made of constants
            self.known |= dict(self._constants())
        self.known |= self._classes()
        self.known = {name: kinds for name, kinds in self.known.items() if _some(kinds)}
        self.predicates = set(self._predicates())

    def kinds_of(self, module: Module, node: ast.AST | None) -> frozenset[str]:
        """The kinds that a string, a name or a display of them stands for."""
        if isinstance(node, ast.Constant):
            return KINDS & {node.value}
        if isinstance(node, ast.Name | ast.Attribute):
            origin = self.names.origin_of(module.name, node)
            return self.known.get(origin, frozenset()) if origin else frozenset()
        if isinstance(node, ast.Starred):
            return self.kinds_of(module, node.value)
        parts = _elements(node)
        if any(is_string(part) and not self.kinds_of(module, part) for part in parts):
            return frozenset()  # a collection of other words, among which is one of these
        return frozenset().union(*(self.kinds_of(module, part) for part in parts))

    def _constants(self) -> Iterator[tuple[tuple[str, str], frozenset[str]]]:
        for module in self.modules:
            for node in module.tree.body:
                if not isinstance(node, ast.Assign | ast.AnnAssign):
                    continue
                name = last_name(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                kinds = self.kinds_of(module, node.value)
                alone = is_string(node.value) and not _in_certify(module)
                if name.isupper() and kinds and not alone:
                    yield (module.name, name), kinds

    def _classes(self) -> Known:
        """Classes with kinds of their own, and the base classes that they come from."""
        found: Known = {}
        bases = {
            (module.name, node.name): [self.names.origin_of(module.name, b) for b in node.bases]
            for module in self.modules
            for node in module.classes()
        }
        for module in self.modules:
            if not _in_certify(module):
                continue
            for node in module.classes():
                kinds = frozenset().union(*(self._own_kinds(module, part) for part in node.body))
                todo: list[tuple[str, str] | None] = [(module.name, node.name)] if kinds else []
                while todo:
                    place = todo.pop()
                    if place in bases:
                        found[place] = found.get(place, frozenset()) | kinds
                        todo += bases[place]
        return found

    def _own_kinds(self, module: Module, node: ast.stmt) -> frozenset[str]:
        """The kinds in `kind: Literal[...]` or `kinds = ...` of a class body."""
        parts: list[ast.AST | None]
        if isinstance(node, ast.AnnAssign):
            name, parts = last_name(node.target), [node.annotation, node.value]
        elif isinstance(node, ast.Assign):
            name, parts = last_name(node.targets[0]), [node.value]
        elif isinstance(node, Function):  # a property
            name, parts = node.name, [*node.body]
        else:
            return frozenset()
        inside = (n for part in parts if part is not None for n in ast.walk(part))
        found = frozenset().union(*(self.kinds_of(module, n) for n in inside))
        return found if name in ("kind", "kinds") else frozenset()

    def _predicates(self) -> Iterator[str]:
        for module in self.modules:
            for node in module.functions():
                returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
                if not node.name.startswith("is_") or len(returned) != 1:
                    continue
                if isinstance(returned[0], ast.Compare) and self._compared(module, returned[0]):
                    yield node.name

    def lines(self, module: Module) -> Iterator[int]:
        """Lines of a module that tell kinds apart, some of them more than once."""
        objectives = module.name.startswith("components.train")
        for node in module.nodes:
            if isinstance(node, ast.Name | ast.Attribute):
                if self.kinds_of(module, node) or last_name(node) in self.predicates:
                    yield node.lineno
            elif isinstance(node, ast.ClassDef) and (module.name, node.name) in self.known:
                yield node.lineno
                yield from (part.lineno for part in node.body if self._own_kinds(module, part))
            elif isinstance(node, Function) and node.name in self.predicates:
                yield node.lineno
            elif not objectives:
                yield from (part.lineno for part in self._strings(module, node))
            yield from _workers(node)

    def _strings(self, module: Module, node: ast.AST) -> list[ast.expr]:
        """The kinds that are written as strings in one expression."""
        if isinstance(node, ast.Compare):
            return self._compared(module, node)
        if isinstance(node, ast.MatchValue):
            return [node.value] if self.kinds_of(module, node.value) else []
        if isinstance(node, ast.Call) and not last_name(node).endswith("Objective"):
            own = (word.value for word in node.keywords if word.arg == "kind")
            return [value for value in own if is_string(value) and self.kinds_of(module, value)]
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
            several = self.kinds_of(module, node)
            parts = [part for part in _elements(node) if is_string(part)]
            return [part for part in parts if len(several) > 1 and len(parts) > 1]
        return []

    def _compared(self, module: Module, node: ast.Compare) -> list[ast.expr]:
        """What a comparison of some kind names."""
        text = ast.unparse(node)
        if "kind" not in text or "objective" in text or "trained" in text:
            return []
        sides = [
            part for side in (node.left, *node.comparators) for part in [side, *_elements(side)]
        ]
        return [side for side in sides if self.kinds_of(module, side)]


def _elements(node: ast.AST | None) -> list[ast.expr]:
    """The members of a tuple, list or set, the keys of a dict, what a comprehension goes over."""
    if isinstance(node, ast.Dict):  # a key is None where another dict is unpacked
        return [key or value for key, value in zip(node.keys, node.values, strict=True)]
    if isinstance(node, ast.DictComp):
        return [node.generators[0].iter]
    return list(node.elts) if isinstance(node, ast.Tuple | ast.List | ast.Set) else []


def _workers(node: ast.AST) -> Iterator[int]:
    """The line where something is asked whether it works for one family."""
    if isinstance(node, ast.Call) and last_name(node) == "isinstance":
        asked: Iterable[ast.AST] = (part for arg in node.args[1:] for part in ast.walk(arg))
    elif isinstance(node, ast.MatchClass):
        asked = [node.cls]
    else:
        return
    yield from (part.lineno for part in asked if WORKER.fullmatch(last_name(part)))  # type: ignore[attr-defined]
