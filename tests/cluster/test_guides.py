"""Every command of README and guides, executed in the order of the pages, in one folder.

The folder looks like a checkout after `make demo`. A block that begins with `# needs: ...` wants
what this machine may not have, and is parsed only (`tests/unit/test_pages.py`). Recipes and Python
files of a page are written where its commands look for them.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.cli import ROOT
from tests.pages import FENCE, needs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]
GUIDES = ROOT / "notebooks" / "guides"
FIRST = GUIDES / "first-run.md"  # makes the runs that the others read
PAGES = [FIRST, ROOT / "README.md", *sorted(set(GUIDES.glob("*.md")) - {FIRST})]
MAKE = re.compile(r"^make .*$", re.MULTILINE)  # `make demo` is `casemate run demo`; tests run tests


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with the programs of this checkout on its path."""
    folder = tmp_path_factory.mktemp("guides")
    for name in ("pyproject.toml", ".venv", "notebooks", "components", "pipelines"):
        (folder / name).symlink_to(ROOT / name)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def shell(commands: str, folder: Path) -> None:
    """Run commands as a user would paste them; each must succeed."""
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    own = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "MLFLOW_TRACKING"))}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder, env={**own, "PATH": path},
        capture_output=True, text=True, timeout=3000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def write_file(language: str, body: str, folder: Path) -> None:
    """A recipe under its name; a Python file under the name in its first line."""
    named = re.match(r"# (\S+\.py)\n", body) if language == "python" else None
    if named:
        (folder / named[1]).write_text(body)
    if language == "yaml" and (name := re.search(r"^name: (\S+)", body, re.MULTILINE)):
        (folder / f"{name[1]}.yaml").write_text(body)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work(page, checkout):
    for language, body in FENCE.findall(page.read_text()):
        write_file(language, body, checkout)
        if language == "bash" and not needs(body):
            shell(MAKE.sub("", body), checkout)
