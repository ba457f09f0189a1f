"""Temporary folders end with their process."""

import subprocess
import sys
from pathlib import Path

MADE = """
from pipelines.runtime.temporary_folders import temporary_folder

folder = temporary_folder("of-a-test-")
(folder / "file").write_text("1")
print(folder)
raise SystemExit(3)
"""


def test_a_temporary_folder_is_removed_with_its_process():
    done = subprocess.run([sys.executable, "-c", MADE], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("of-a-test-")
    assert not folder.exists()
