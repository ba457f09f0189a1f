"""How a flow is started on a cluster: its command, the recipe's file, its storage."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from components.core.code_copies import copy_of
from components.core.errors import CasemateError, at_key
from components.core.object_stores import is_uri, uri_problem
from components.core.user_code import digests, references
from pipelines.deploy.names import Claim, claim_of, claim_problem, leads_up, resource_name
from pipelines.deploy.settings import ManifestSettings
from pipelines.deploy.shapes import Group, actors_on, groups_of
from pipelines.recipe.credentials import TRACKING, refuse_credentials_in_job
from pipelines.recipe.load import with_values
from pipelines.recipe.paths import SQLITE, named_paths, refuse_relative
from pipelines.recipe.schema.place import StorageSection
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.storage import STORAGE_KEY

RECIPE_FOLDER, RECIPE_FILE = "/etc/casemate", "recipe.yaml"
MAX_FILE = 1_000_000  # bytes; a ConfigMap holds a MiB
SUBMITTED = ("raycluster", "ray-up")  # kinds of clusters to which `casemate submit` brings flows
TRACKING_ENV = "MLFLOW_TRACKING_URI"
# Words that mean the same after two shells: that of the submitter and that of the job.
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@%+=-]+")


@dataclass(frozen=True, slots=True)
class Flow:
    """A recipe, ready to be written into a file of some kind."""

    settings: ManifestSettings
    recipe: Recipe  # as the cluster's machines read it
    name: str
    groups: tuple[Group, ...]
    written: str  # name or path of the recipe, where the file was made
    flags: tuple[str, ...]
    file: str | None  # the recipe with all flags applied, if the image does not have it

    @property
    def command(self) -> str:
        """The command that runs the flow, on a machine of the cluster."""
        if self.file is not None:
            return f"casemate run {RECIPE_FOLDER}/{RECIPE_FILE}"
        return " ".join(("casemate", "run", self.written, *self.flags))

    @property
    def submit(self) -> str:
        """The command that sends the flow to a cluster whose dashboard is tunnelled to here."""
        return shlex.join(("casemate", "submit", self.written, *self.flags))

    @property
    def claims(self) -> list[Claim]:
        return [claim_of(text) for text in self.settings.claim]

    @property
    def image(self) -> str:
        assert self.settings.image
        return self.settings.image


def flow_of(
    recipe: Recipe,
    settings: ManifestSettings,
    *,
    storage: str | None = None,
    ready: str | None = None,
    overrides: Sequence[str] = (),
    smoke: bool = False,
) -> Flow:
    """The flow of a recipe, with its storage, on a cluster of a suitable size.

    `ready` is the name of a recipe that the image has; `overrides` and `smoke` made `recipe` from
    it. Any other recipe travels in the file.
    """
    recipe = _placed(recipe, settings, storage)
    groups = groups_of(recipe, settings)
    changes = _changes(recipe, groups)
    placed = with_values(recipe, changes) if changes else recipe
    flags = (*_flags(overrides, smoke), "--storage", recipe.storage.root, *_sets(changes))
    file = None
    plain = ready is not None and all(map(_PLAIN.fullmatch, flags))
    if settings.kind not in SUBMITTED and not plain:
        file = placed.to_yaml()
        _refuse_unfit(placed, file)
    written = ready or recipe.source.removesuffix(" --smoke")
    name = settings.name or resource_name(recipe.name)
    return Flow(settings, placed, name, tuple(groups), written, flags, file)


def _changes(recipe: Recipe, groups: Sequence[Group]) -> dict[str, object]:
    """What the recipe must say on the cluster: no other address, and how many actors there are.

    An autoscaled cluster begins without workers: only a stated number of actors asks for nodes.
    """
    changes: dict[str, object] = {}
    if recipe.cluster.address:
        changes["cluster.address"] = None
    if recipe.cluster.num_actors is None and (count := actors_on(groups)):
        changes["cluster.num_actors"] = count
    return changes


def _flags(overrides: Sequence[str], smoke: bool) -> Iterator[str]:
    for override in overrides:
        yield from ("--set", override)
    yield from ["--smoke"] if smoke else []


def _sets(changes: dict[str, object]) -> Iterator[str]:
    for key, value in changes.items():
        yield from ("--set", f"{key}={'null' if value is None else value}")


# Storage --------------------------------------------------------------------------------------


def _placed(recipe: Recipe, settings: ManifestSettings, storage: str | None) -> Recipe:
    """The recipe with its storage, which all machines of the cluster must reach."""
    with at_key(TRACKING, then=_taken_by(settings)):
        refuse_credentials_in_job(recipe)
    claims = [claim_of(text) for text in settings.claim]
    if storage is None and recipe.storage.root == StorageSection().root and len(claims) == 1:
        storage = claims[0].path
    if storage is not None:
        recipe = with_values(recipe, {STORAGE_KEY: storage})
    if why := uri_problem(recipe.storage.root):
        raise CasemateError(STORAGE_KEY, recipe.storage.root, why)
    _refuse_relative(recipe, settings)
    _refuse_private(recipe, settings, claims)
    if is_uri(recipe.storage.root) and not _tracked(recipe, settings):
        remedy = "cannot hold MLflow's database; add --set tracking.uri=http://mlflow:5000, or "
        remedy += f"{TRACKING_ENV} to the Secret"
        raise CasemateError(STORAGE_KEY, recipe.storage.root, remedy)
    return recipe


def _taken_by(settings: ManifestSettings) -> str:
    """What goes with the `--env` that replace a password, to end that remedy."""
    if settings.kind == "ray-up":
        return " to casemate submit"
    return " with --secret NAME, the Secret that holds them" if settings.on_kubernetes else ""


def _refuse_relative(recipe: Recipe, settings: ManifestSettings) -> None:
    """Refuse relative paths; what all machines share depends on the kind of the file."""
    try:
        refuse_relative(recipe)
    except CasemateError as error:
        if error.key != STORAGE_KEY:
            raise
        remedy = f"is relative; {_shared_place(recipe.storage.root, settings)}"
        raise CasemateError(error.key, error.value, remedy) from error


def _tracked(recipe: Recipe, settings: ManifestSettings) -> bool:
    """Whether the flow finds an MLflow server; a whole Secret may name one."""
    return bool(recipe.tracking.uri or TRACKING_ENV in settings.env) or bool(
        settings.secret and not settings.env
    )


def _refuse_private(recipe: Recipe, settings: ManifestSettings, claims: Sequence[Claim]) -> None:
    """Refuse to write to a path that the machines of the cluster do not share."""
    for named in named_paths(recipe):
        if not named.made or is_uri(named.path) or any(c.holds(named.path) for c in claims):
            continue
        if leads_up(named.path):
            raise CasemateError(named.key, named.path, "has .. in it; write the path without it")
        remedy = f"is on each machine's own disk; {_shared_place(named.path, settings)}"
        if named.prefix == SQLITE:
            remedy = "is on a machine's own disk; name an MLflow server, e.g. http://mlflow:5000"
        raise CasemateError(named.key, named.path, remedy)


def _shared_place(path: str, settings: ManifestSettings) -> str:
    """The remedy for a storage at a path that the machines do not share."""
    if not settings.on_kubernetes:
        return "set --storage to s3://bucket/prefix"
    if claim_problem(f"name:{path}"):
        return "add --claim NAME:PATH and set --storage to that PATH, or to s3://bucket/prefix"
    return f"add --claim NAME:{path}, or set --storage to s3://bucket/prefix"


def unmounted(flow: Flow) -> list[str]:
    """A line for each path that the recipe reads and no claim holds."""
    place = "be brought by file_mounts, which you add to this file"
    if flow.settings.on_kubernetes:
        place = "on a claim (--claim NAME:PATH)"
    return [
        f"{named.key}: {named.path} must be in the image, or {place}"
        for named in named_paths(flow.recipe)
        if not named.made
        and not is_uri(named.path)
        and not any(claim.holds(named.path) for claim in flow.claims)
    ]


# The recipe's file ------------------------------------------------------------------------------


def _refuse_unfit(recipe: Recipe, text: str) -> None:
    """Refuse a recipe that cannot travel in a file: too large, or with code of this machine."""
    if len(text.encode()) > MAX_FILE:
        raise CasemateError("recipe", recipe.source, f"has more than {MAX_FILE:,} bytes resolved")
    values = recipe.resolved()
    here = [digest for digest in digests(values) if copy_of(digest)]
    for reference in references(values):
        if any(digest in reference for digest in here):
            remedy = "is code of this machine; install it in the image and name it python:package."
            remedy += "module:Name, or use --kind raycluster: casemate submit sends code"
            raise CasemateError("recipe", reference, remedy)
