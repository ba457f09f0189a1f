"""Finished results at a path or URI: of a storage, of one flow, one step, or one certificate."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from components.core.errors import CasemateError, first_line
from components.core.folders import Folder
from components.core.object_stores import is_uri
from pipelines.api.places import shown

if TYPE_CHECKING:
    from pipelines.runtime.inventory import StoredStep
    from pipelines.runtime.manifests import Manifest
    from pipelines.runtime.storage import StepPlace, Storage

STEP_NAME = re.compile(r".+-[0-9a-f]{12}")
CERTIFICATE = "certify"  # the stage of a certificate that is not of a step
RESULT_STAGES = ("attack", "certify", "evaluate")
REFUTED = "certificate.refuted.json"


@dataclass(frozen=True)
class FoundResult:
    """A finished step, or a certificate in a folder of its own, which has no manifest."""

    flow: str
    step: str  # e.g. certify.l2
    name: str  # of its folder, with the fingerprint
    place: str  # path or URI
    files: Folder
    manifest: "Manifest | None"

    @property
    def stage(self) -> str:
        return self.step.partition(".")[0] if self.manifest else CERTIFICATE

    def changed(self) -> list[str]:
        """Files that are not those of the manifest; a store checks its files when they are read."""
        from pipelines.runtime.manifests import changed_files, other_manifests

        if self.manifest is None or not isinstance(self.files, Path):
            return []
        files = (
            f"{n}: is not the file of the step" for n in changed_files(self.files, self.manifest)
        )
        return [*files, *(f"{n}: differs from manifest.json" for n in other_manifests(self.files))]


class LeftOut(NamedTuple):
    """A place without a result that counts, and why."""

    place: str
    why: str


def results_at(path: str | Path) -> list[FoundResult]:
    """All finished results at a path or URI, sorted by place; unfinished steps are left out."""
    found = _stored(str(path)) if is_uri(str(path)) else _local(Path(path).expanduser())
    return sorted(found, key=lambda result: result.place)


def _stored(uri: str) -> Iterator[FoundResult]:
    from pipelines.runtime.inventory import existing_storage
    from pipelines.runtime.storage import STEP_URI, Storage

    storage = existing_storage(uri, key="path")
    if step := STEP_URI.fullmatch(storage.root):
        root, flow, name, _ = step.groups()
        yield from _finished(Storage.at(root).step(flow, name))
        return
    found = list(_of_storage(storage))
    parent, _, name = storage.root.rpartition("/")
    if not found and not parent.endswith("/"):  # perhaps one flow of the storage above
        found = list(_of_flow(Storage.at(parent), name))
    yield from found


def _local(path: Path) -> Iterator[FoundResult]:
    from components.certify.verify import certificate_folder
    from pipelines.runtime.storage import Storage

    folder = path if path.is_dir() else certificate_folder(path)
    inside = [entry.name for entry in folder.iterdir()]
    if _is_result(inside):
        yield _folder(folder.resolve(), inside)
    elif any(STEP_NAME.fullmatch(name) for name in inside):
        resolved = folder.resolve()
        yield from _of_flow(Storage.at(resolved.parent), resolved.name)
    else:
        yield from _of_storage(Storage.at(folder))


def _folder(folder: Path, inside: list[str]) -> FoundResult:
    """One step or certificate on this disk, in a storage or copied out of it."""
    from pipelines.runtime.manifests import MANIFEST, read_manifest
    from pipelines.runtime.storage import GENERATIONS, SCRATCH, Storage, is_numbered

    if any(is_numbered(name) for name in inside):
        place = Storage.at(folder.parent.parent).step(folder.parent.name, folder.name)
        manifest = place.manifest()
    else:
        manifest = read_manifest(folder)
    begun = {GENERATIONS, SCRATCH, MANIFEST} & set(inside)
    if manifest is None and (begun or "certificate.json" not in inside):
        raise CasemateError("path", folder, "is not a finished step; run its recipe first")
    step = manifest.step if manifest else folder.name
    return FoundResult(folder.parent.name, step, folder.name, str(folder), folder, manifest)


def _of_storage(storage: "Storage") -> Iterator[FoundResult]:
    from pipelines.runtime.inventory import inventory

    for step, manifest in inventory(storage).finished():
        yield _result(step.place, manifest)


def _of_flow(storage: "Storage", flow: str) -> Iterator[FoundResult]:
    keys = (entry.key.split("/") for entry in storage.store.listing(flow))
    for name in sorted({parts[1] for parts in keys if len(parts) > 2}):
        if STEP_NAME.fullmatch(name):
            yield from _finished(storage.step(flow, name))


def _finished(place: "StepPlace") -> Iterator[FoundResult]:
    if manifest := place.manifest():
        yield _result(place, manifest)


def _result(place: "StepPlace", manifest: "Manifest") -> FoundResult:
    files: Folder = place.path if place.storage.is_local else place.contents(manifest)
    where = str(shown(place))
    return FoundResult(place.recipe, manifest.step, place.name, where, files, manifest)


# -- with what is unfinished


def survey(path: str | Path) -> tuple[list[FoundResult], list[LeftOut]]:
    """The results at a path or URI, and the steps of their stages that are not finished."""
    given = str(path)
    if not is_uri(given) and not Path(path).expanduser().exists():
        raise CasemateError("storage", path, "does not exist; run a recipe first")
    steps = _steps_at(given)
    if steps is None:
        try:
            return results_at(path), []
        except CasemateError as error:
            return [], [LeftOut(given, f"{error.remedy}")]
    results, rest = [], []
    for step in steps:
        if step.manifest is not None:
            results.append(_result(step.place, step.manifest))
        elif step.step.partition(".")[0] in RESULT_STAGES:
            rest.append(LeftOut(str(shown(step.place)), _why_unfinished(step)))
    return results, rest


def _steps_at(given: str) -> "list[StoredStep] | None":
    """The steps of a storage or of one flow; None at a single step or certificate."""
    from pipelines.runtime.inventory import existing_storage, inventory
    from pipelines.runtime.storage import STEP_URI, Storage

    storage = existing_storage(given) if is_uri(given) else Storage.at(Path(given).expanduser())
    if is_uri(given):
        if STEP_URI.fullmatch(storage.root):
            return None
        parent, _, flow = storage.root.rpartition("/")
    else:
        folder = Path(given).expanduser().resolve()
        inside = [entry.name for entry in folder.iterdir()] if folder.is_dir() else [CERTIFICATE]
        if not folder.is_dir() or _is_result(inside):
            return None
        parent, flow = str(folder.parent), folder.name
    found = list(inventory(storage).steps.values())
    if not found and not parent.endswith("/"):  # perhaps one flow of the storage above
        above = inventory(Storage.at(parent)).steps.values()
        found = [step for step in above if step.recipe == flow]
    return sorted(found, key=lambda step: step.place.key)


def _is_result(inside: list[str]) -> bool:
    return "certificate.json" in inside or any(name.endswith("manifest.json") for name in inside)


def _why_unfinished(step: "StoredStep") -> str:
    from pipelines.runtime.inventory import RUNNING

    if step.damage is not None:
        return first_line(step.damage)
    if any(name.endswith(REFUTED) for name in step.names):
        return "refuted by its challenge: a certified item was broken"
    return "is running" if step.state == RUNNING else "is not finished; run its recipe again"
