"""The code that travels to a cluster: `components`, `pipelines`, `pyproject.toml`, user modules.

Nothing else of a checkout is packed, read or hashed: datasets and weights beside the code may be of
any size.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from components.core.code_copies import copy_of, digest_of
from pipelines.runtime.temporary_folders import temporary_folder

ROOT = Path(__file__).resolve().parents[2]  # the checkout, or site-packages
PACKAGES = ("components", "pipelines")
PROJECT = "pyproject.toml"
SUFFIXES = frozenset(
    {".py", ".yaml", ".j2", ".js", ".txt", ".toml", ".md"}
)  # of files in the packages


def code_files(root: Path = ROOT) -> list[Path]:
    """The files of our packages, in their order."""
    return sorted(path for package in PACKAGES for path in _below(root / package))


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] not in "._"]  # __pycache__
        yield from (Path(place, name) for name in names if Path(name).suffix in SUFFIXES)


@cache
def code_digest(root: Path = ROOT) -> str:
    """Digest of the files of our packages; the same in a checkout, a wheel and a sent copy."""
    return digest_of(code_files(root), root)


def is_checkout(root: Path = ROOT) -> bool:
    """Whether the code is sent to a cluster; an installed wheel must be in the cluster's image."""
    return (root / PROJECT).exists()


def code_env(
    user_code: Sequence[str] = (), *, root: Path = ROOT, further: Sequence[Path] = ()
) -> dict[str, Any]:
    """The part of a runtime environment that brings the code, and further folders, to a cluster.

    A checkout is sent. Copies of the user's own code travel in any case, each as a folder named by
    its digest; a local Ray finds them where this process does.
    """
    env: dict[str, Any] = {}
    if is_checkout(root):
        env["working_dir"] = str(_staged(root))
    copies = [copy for digest in user_code if (copy := copy_of(digest))]
    if modules := [*copies, *further]:
        env["py_modules"] = [str(module) for module in modules]
    return env


@cache
def _staged(root: Path) -> Path:
    """A folder with a copy of the code and nothing else; it is removed with this process."""
    folder = code_folder() / code_digest(root)
    for path in [*code_files(root), root / PROJECT]:
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return folder


@cache
def code_folder() -> Path:
    """A folder for code that is sent, removed with this process."""
    return temporary_folder("casemate-code-")
