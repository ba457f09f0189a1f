"""The Python files of a checkout as syntax trees, for `tests.benchmarks.plumbing`.

Files are only parsed, never imported, so that any layout of any age can be read.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOTS = ("components", "pipelines")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file: `name` as it is imported, `path` relative to the checkout."""

    name: str
    path: str
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """`components` or `pipelines`."""
        return self.name.partition(".")[0]

    @property
    def is_flat(self) -> bool:
        """Whether the file lies directly in its root folder; the root's own `__init__` does not."""
        return self.name.count(".") == 1 and not self.path.endswith("__init__.py")

    def functions(self) -> Iterator[Function]:
        return (node for node in self.nodes if isinstance(node, Function))

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))

    def num_lines(self) -> int:
        return len(self.text.splitlines())

    def num_code_lines(self) -> int:
        """Lines with a token of code; strings that stand alone (docstrings) are not code."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in NOT_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in self.nodes:
            if isinstance(node, ast.Expr) and is_string(node.value):
                lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
        return len(lines)


def is_string(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def last_name(node: ast.AST | None) -> str:
    """`C` of `C`, `a.C`, `C(...)` and `C[...]`."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return getattr(node, "id", "") or getattr(node, "attr", "")


def read_modules(checkout: Path) -> list[Module]:
    """All modules of `components` and `pipelines`."""
    modules = []
    for root in ROOTS:
        for file in sorted((checkout / root).rglob("*.py")):
            path = file.relative_to(checkout)
            name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            text = file.read_text()
            modules.append(Module(name, path.as_posix(), text, ast.parse(text)))
    return modules


@dataclass
class Names:
    """Where the names of all modules come from, through re-exports and aliases."""

    modules: list[Module]
    imported: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    defined: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for module in self.modules:
            self.imported[module.name] = dict(_imports(module))
            self.defined[module.name] = set(_definitions(module.tree))

    def origin(self, module: str, name: str) -> tuple[str, str]:
        """The module that defines `name` as it is known in `module`, and its name there."""
        for _ in range(10):  # re-exports of re-exports; more would be a circle
            if name in self.defined.get(module, ()):
                break
            source = self.imported.get(module, {}).get(name)
            if source is None:
                break
            module, name = source
        return module, name

    def origin_of(self, module: str, node: ast.AST) -> tuple[str, str] | None:
        """The same for `name` and `alias.name` in an expression."""
        if isinstance(node, ast.Name):
            return self.origin(module, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self.imported.get(module, {}).get(node.value.id)
            if owner and (place := f"{owner[0]}.{owner[1]}".strip(".")) in self.defined:
                return self.origin(place, node.attr)
        return None


def _imports(module: Module) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, (node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    yield alias.asname, (alias.name, "")


def _definitions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
