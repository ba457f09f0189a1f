"""Folders of finished steps as people see them."""

from pathlib import Path

from pipelines.runtime.storage import belongs_to_storage


def files_of(folder: Path) -> dict[str, Path]:
    """The files of a step by their names, without what the storage keeps beside them."""
    paths = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {
        name: path
        for name, path in sorted(paths.items())
        if name == "manifest.json" or not belongs_to_storage(name)
    }
