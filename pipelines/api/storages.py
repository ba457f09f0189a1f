"""What a storage holds, and what may be removed from it."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from pipelines.api.places import shown
from pipelines.api.tables import frame

if TYPE_CHECKING:
    import pandas as pd

    from pipelines.runtime.garbage import Findings
    from pipelines.runtime.inventory import Inventory

DAY = 24 * 3600.0  # seconds
DAYS = 7.0  # without a change, after which an unfinished step is given up
FLOW_COLUMNS = ("flow", "state", "finished", "begun", "bytes", "changed")
STEP_COLUMNS = (
    *("flow", "step", "fingerprint", "state", "generation"),
    *("bytes", "unfinished_bytes", "earlier_bytes", "changed", "folder"),
)


def default_storage() -> str:
    """Where recipes are kept that name no storage."""
    from pipelines.recipe.schema.place import StorageSection

    return StorageSection().root


def flows(storage: str | Path | None = None) -> "pd.DataFrame":
    """The flows of a storage (a folder or a URI), one row per recipe; the last change last.

    `state` is finished, unfinished or running; `finished` counts steps of those `begun`.

    >>> from pipelines import api
    >>> import tempfile
    >>> api.flows(tempfile.mkdtemp()).empty
    True
    """
    rows: Iterable[dict[str, Any]] = (
        {
            "flow": flow.name,
            "state": flow.state,
            "finished": flow.num_finished,
            "begun": len(flow.steps),
            "bytes": flow.bytes,
            "changed": datetime.fromtimestamp(flow.modified, UTC),
        }
        for flow in _inventory(storage).flows()
    )
    return frame(rows).reindex(columns=list(FLOW_COLUMNS))


def flow_steps(name: str | None = None, storage: str | Path | None = None) -> "pd.DataFrame":
    """The steps of one flow, or of all, finished or not; the last change last."""
    found = _inventory(storage).flows()
    if name is not None and name not in {flow.name for flow in found}:
        known = ", ".join(sorted(flow.name for flow in found)) or "it is empty"
        remedy = f"is not a flow of {storage or default_storage()}; it holds: {known}"
        raise CasemateError("flow", name, remedy if found else remedy.replace("it holds: ", ""))
    rows: Iterable[dict[str, Any]] = (
        {
            "flow": flow.name,
            "step": step.step,
            "fingerprint": step.fingerprint,
            "state": step.state,
            "generation": step.generation,
            "bytes": step.sizes.files,
            "unfinished_bytes": step.sizes.unfinished,
            "earlier_bytes": step.sizes.earlier,
            "changed": datetime.fromtimestamp(step.modified, UTC),
            "folder": shown(step.place),
        }
        for flow in found
        for step in flow.steps
        if name in (None, flow.name)
    )
    return frame(rows).reindex(columns=list(STEP_COLUMNS))


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What `gc` has found, or removed; `kept` says what it left alone, and why."""

    deleted: bool
    findings: "Findings"

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.findings.garbage)

    @property
    def num_files(self) -> int:
        return sum(len(entry.keys) for entry in self.findings.garbage)

    @property
    def kept(self) -> tuple[str, ...]:
        return self.findings.kept

    @property
    def table(self) -> "pd.DataFrame":
        """One row per place and reason."""
        return frame(self.records()).reindex(columns=["place", "reason", "files", "bytes"])

    def records(self) -> list[dict[str, Any]]:
        """The rows of `table` as plain values."""
        return [
            {"place": e.place, "reason": e.reason, "files": len(e.keys), "bytes": e.bytes}
            for e in self.findings.garbage
        ]


def gc(
    storage: str | Path | None = None, *, delete: bool = False, older_than: float = DAYS
) -> Cleanup:
    """Find what no finished step of a storage needs, or remove it with `delete`.

    Unfinished steps go after `older_than` days without a change. Finished steps, steps in use and
    files that are not of flows stay.

    >>> from pipelines import api
    >>> import tempfile
    >>> api.gc(tempfile.mkdtemp()).num_files
    0
    """
    from pipelines.runtime.garbage import find_garbage, remove_garbage

    if not older_than >= 0:
        raise CasemateError("older_than", older_than, "is not a number of days, 0 or more")
    clean = remove_garbage if delete else find_garbage
    return Cleanup(delete, clean(_inventory(storage), older_than=older_than * DAY))


def _inventory(storage: str | Path | None) -> "Inventory":
    from pipelines.runtime.inventory import existing_storage, inventory

    return inventory(existing_storage(storage or default_storage()))
