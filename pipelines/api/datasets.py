"""Public datasets, downloaded to where their sources read them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.data.sources.registry import find_source


@dataclass(frozen=True, slots=True)
class FetchedData:
    """A complete, verified copy of a dataset, as its source reads it."""

    name: str
    path: str  # data.path of a recipe
    classes: tuple[str, ...]
    splits: dict[str, int]  # items
    num_files: int
    num_bytes: int
    was_there: bool  # found complete, nothing was downloaded

    @property
    def recipe_lines(self) -> str:
        """The section `data` of a recipe that reads this copy."""
        import yaml

        values: dict[str, Any] = {"source": self.name, "path": self.path}
        if find_source(self.name).side is None:  # images of all sizes
            values |= {"image_size": 224, "fit": "crop"}
        return yaml.safe_dump({"data": values}, sort_keys=False, allow_unicode=True, width=1000)

    def facts(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name,
            "path": self.path,
            "num_classes": len(self.classes),
            "splits": self.splits,
            "num_files": self.num_files,
            "num_bytes": self.num_bytes,
            "was_there": self.was_there,
        }


def get_data(
    name: str, to: str | Path, *, report: Callable[[str], None] = lambda line: None
) -> FetchedData:
    """Download a public dataset into the folder `to`, or verify the copy that is there.

    The copy is opened by the source of that name. `report` gets a line for each step.

    >>> from pipelines import api
    >>> api.get_data("cifar11", "data")
    Traceback (most recent call last):
    components.core.errors.CasemateError: data get: 'cifar11' is unknown; ...
    """
    from components.data.downloads import download
    from components.data.sources import open_source

    made = download(name, to, report=report)
    source = open_source(name, path=str(to))
    entries = source.entries()
    for split in {entry.split_hint for entry in entries}:
        source.decode(next(entry for entry in entries if entry.split_hint == split))
    counts = Counter(entry.split_hint or "all" for entry in entries)
    splits = {split: counts[split] for split in ("train", "val", "test", "all") if split in counts}
    return FetchedData(
        name, str(to), source.classes, splits, made.num_files, made.num_bytes, made.was_there
    )
