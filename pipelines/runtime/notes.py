"""Small files that a worker writes and the driver reads while a step runs.

On a storage that is a folder they lie in it. Else driver and workers share no disk: the worker
writes them on its own and sends them through Ray's key-value store.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from components.core.files import write_atomic


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes of one step; can be sent to a worker."""

    folder: Path  # of the driver
    key: str | None = None  # in the key-value store; None: the worker sees the folder

    def path(self, name: str) -> Path:
        """Where the worker writes a note."""
        if self.key is None:
            return self.folder / name
        folder = Path(tempfile.gettempdir(), "casemate-notes", self.key.replace("/", "-"))
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def send(self, *names: str) -> None:
        """Worker: show the driver these notes as they are now."""
        if self.key is None:
            return
        for name in names:
            if (path := self.path(name)).exists():
                _internal_kv_put(f"{self.key}/{name}", path.read_bytes())

    def receive(self, *names: str) -> None:
        """Driver: bring these notes into `folder`."""
        if self.key is None:
            return
        for name in names:
            content = _internal_kv_get(f"{self.key}/{name}")
            if content:
                write_atomic(self.folder / name, content, sync=False)

    def forget(self, name: str) -> None:
        """Driver: remove a note of an earlier start."""
        (self.folder / name).unlink(missing_ok=True)
        if self.key is not None:
            _internal_kv_put(f"{self.key}/{name}", b"")
