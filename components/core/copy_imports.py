"""Imports of user code from its copy, below a package that the digest of the copy names.

The module `helper` of a copy is `casemate_user_<digest>.helper`: files of the same name in two
copies, or in two versions of one, are two modules. Their import statements are resolved inside the
copy first, at the top of a file or in a function alike, because every module of a copy has its own
`__import__`. Other modules must be installed, ours or Python's: what lies elsewhere on the path is
not part of the digest, so results could change without it. Imports by `importlib` are not seen.
"""

import builtins
import importlib
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from components.core.code_copies import FOLDER, OURS, code_files, copy_of, top_names

_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()
_OUR_ROOT = Path(__file__).resolve().parents[2]


def import_from(folder: Path, module: str) -> ModuleType:
    """Import a module of a copy."""
    if not any(isinstance(finder, CopyFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, CopyFinder())
    if package := sys.modules.get(folder.name):
        package.__path__ = [str(folder)]  # the copy that it was loaded from may be gone
    return importlib.import_module(f"{folder.name}.{module}")


class CopyFinder(MetaPathFinder):
    """Finds the packages `casemate_user_<digest>` and their modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inner = fullname.partition(".")
        if not package.startswith(FOLDER):
            return None
        if not inner:
            return self._package(package)
        found = PathFinder.find_spec(fullname, path)
        if found is not None and found.origin is not None:
            found.loader = CopyLoader(fullname, found.origin)
            found.cached = None
        return found

    def _package(self, name: str) -> ModuleSpec | None:
        folder = copy_of(name.removeprefix(FOLDER))
        if folder is None:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


class CopyLoader(SourceFileLoader):
    """Runs a file of a copy; no bytecode is read or written: only sources are in the digest."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        package = module.__name__.partition(".")[0]
        own = dict(vars(builtins), __import__=CopyImport(package))
        module.__dict__["__builtins__"] = own  # import statements use its `__import__`
        super().exec_module(module)


class CopyImport:
    """The `__import__` of the modules of one copy."""

    def __init__(self, package: str) -> None:
        folder = Path(next(iter(sys.modules[package].__path__)))
        self.package, self.names = package, top_names(code_files(folder), folder)

    def __call__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        if top not in self.names:
            found = builtins.__import__(name, globals, locals, fromlist or (), 0)
            check_origin(sys.modules[top])
            return found
        inner = builtins.__import__(f"{self.package}.{name}", globals, locals, fromlist or (), 0)
        return inner if fromlist else sys.modules[f"{self.package}.{top}"]


def check_origin(module: ModuleType) -> None:
    """Raise `ImportError` for a module that is not installed, ours or Python's."""
    spec = getattr(module, "__spec__", None)
    places = [*(getattr(module, "__path__", None) or [getattr(module, "__file__", None)])]
    if spec is not None and spec.origin in ("built-in", "frozen"):
        return
    for place in places:
        if place is not None and not _is_known(Path(place), module.__name__):
            raise ImportError(
                f"module {module.__name__} is imported from {place}, which is not part of the "
                "code's digest; put it beside the file that imports it, or install it"
            )


def _is_known(place: Path, name: str) -> bool:
    if {"site-packages", "dist-packages"} & set(place.parts):
        return True
    real = place.resolve()
    return real.is_relative_to(_STANDARD) or (name in OURS and real.is_relative_to(_OUR_ROOT))
