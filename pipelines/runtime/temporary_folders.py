"""Folders that only this user can read, removed when this process ends."""

import atexit
import shutil
import tempfile
from pathlib import Path


def temporary_folder(prefix: str) -> Path:
    """A new folder among the system's temporary ones."""
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
