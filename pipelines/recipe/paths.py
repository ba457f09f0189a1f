"""Every file and folder that a recipe names by its path, and what becomes of relative ones.

A setting that names a path is listed here and nowhere else. Code of the user's own is left out: it
travels as a copy that is named by its digest.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from components.core.errors import CasemateError
from components.core.object_stores import is_uri
from components.data.sources.registry import file_options
from components.denoising.settings import is_on_disk
from components.models.settings import TIMM
from pipelines.recipe.analysis import analysis_paths
from pipelines.recipe.evaluation import evaluation_paths
from pipelines.recipe.load import with_values
from pipelines.recipe.schema.recipe import Recipe

SQLITE = "sqlite:///"
REMEDIES = {  # for other machines
    "storage.root": "set --storage to s3://bucket/runs, or to a folder that all its machines share",
    "tracking.uri": "name an MLflow server, e.g. http://10.0.0.6:5000",
}


class NamedPath(NamedTuple):
    """A path in a recipe: its dotted key, and what is written before it, e.g. `diffusers:`."""

    key: str
    path: str
    prefix: str = ""
    made: bool = False  # it need not exist before the run

    @property
    def relative(self) -> bool:
        return not is_uri(self.path) and not Path(self.path).expanduser().is_absolute()

    def below(self, folder: Path) -> str:
        """The value of the key, with a path that is absolute as seen from `folder`."""
        return f"{self.prefix}{folder / Path(self.path).expanduser()}"


def named_paths(recipe: Recipe) -> Iterator[NamedPath]:
    """All paths of a recipe."""
    data = recipe.data
    yield from _of_source("data", data.source, data.path, data.options)
    if made := data.synthetic:
        yield from _of_source("data.synthetic", made.source, made.path, made.options)
    for above, section in recipe.model_sections():
        if section.pretrained not in (None, TIMM):
            yield _denoiser_or_folder(f"{above}model.pretrained", section.pretrained)
    behind = {
        f"{recipe.objective_key(model)}.objective.denoiser": recipe.objective_of(
            model
        ).denoiser_name
        for model in (recipe.model_names() if recipe.train else ())
    }
    behind |= {f"certify.{k}.denoiser": c.denoiser_name for k, c in recipe.certify.items()}
    for key, name in behind.items():
        if name and is_on_disk(name):
            yield _denoiser_or_folder(key, name)
    yield from (NamedPath(key, path) for key, path in evaluation_paths(recipe))
    yield from (NamedPath(key, path) for key, path in analysis_paths(recipe))
    for name, entry in recipe.report.compare.items():
        yield NamedPath(f"report.compare.{name}.path", entry.path)
    yield NamedPath("storage.root", recipe.storage.root, made=True)
    uri = recipe.tracking.uri or ""
    if uri.startswith(SQLITE):
        yield NamedPath("tracking.uri", uri.removeprefix(SQLITE), SQLITE, made=True)


def _of_source(
    key: str, source: str, path: str | None, options: Mapping[str, Any]
) -> Iterator[NamedPath]:
    """The path of a data source and those of its options that name a file."""
    if path is not None:
        yield NamedPath(f"{key}.path", path)
    for name, value in file_options(source, options).items():
        yield NamedPath(f"{key}.options.{name}", value)


def _denoiser_or_folder(key: str, name: str) -> NamedPath:
    if not is_on_disk(name):
        return NamedPath(key, name)
    kind, _, path = name.partition(":")
    return NamedPath(key, path, f"{kind}:")


def with_paths_of(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with relative paths made absolute below `folder`, whose files must be there."""
    relative = [named for named in named_paths(recipe) if named.relative]
    for named in relative:
        place = folder / named.path
        if not named.made and not place.exists():
            raise CasemateError(named.key, named.path, f"does not exist: {place}")
    changes = {named.key: named.below(folder) for named in relative}
    return with_values(recipe, changes) if changes else recipe


def refuse_relative(recipe: Recipe) -> None:
    """Refuse relative paths where the flow runs on machines that do not share this one's disk."""
    for named in named_paths(recipe):
        if named.relative:
            remedy = REMEDIES.get(named.key, f"set {named.key} to the path that its machines see")
            why = "is relative, and the cluster is not this machine"
            raise CasemateError(named.key, named.path, f"{why}; {remedy}")
