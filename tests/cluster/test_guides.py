"""Every command of README and guides, executed in the order of the pages, in one folder.

The folder looks like a checkout after `make demo`, but every recipe runs in its `--smoke` form: the
commands are tested, not the figures. A block that begins with `# needs: ...` wants what this
machine may not have, and is parsed only (`tests/unit/test_pages.py`). Recipes and Python files of a
page are written where its commands look for them. About a quarter of an hour on two cores.
"""

import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests import image_folders
from tests.e2e.cli import ROOT
from tests.object_store import free_port
from tests.pages import FENCE, needs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]
GUIDES = ROOT / "notebooks" / "guides"
PAGES = [ROOT / "README.md", *sorted(GUIDES.glob("*.md"))]
MAKE = re.compile(r"^make (?!ui).*$", re.MULTILINE)  # `make demo` is `casemate run demo`
MAKE_READS = ("Makefile", "pyproject.toml", "requirements.lock", ".boot")
GOES_ON = "# until Ctrl-C\n"  # first line of a block of servers
CASEMATE = f"""#!/bin/bash
case "$*" in *--smoke*|*--help*) small="";; *) small=--smoke;; esac
case "$1" in
  prepare|train|tune|attack|evaluate|analyze|certify|report|run)
    exec {ROOT}/.venv/bin/casemate "$@" $small;;
  gate)  # 1: figures of shrunk runs may miss their minimum
    {ROOT}/.venv/bin/casemate "$@" || [ $? = 1 ];;
  *) exec {ROOT}/.venv/bin/casemate "$@";;
esac
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with the programs of this checkout on its path, and images of a user."""
    folder = tmp_path_factory.mktemp("guides")
    for name in (*MAKE_READS, ".venv", "notebooks", "components", "pipelines"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    (folder / "bin" / "casemate").write_text(CASEMATE)
    (folder / "bin" / "casemate").chmod(0o755)
    for name in ("images", "my-images"):
        image_folders.flat(folder / name)
    shell("casemate run demo", folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def environment(folder: Path) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "MLFLOW_TRACKING"))}
    path = f"{folder / 'bin'}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    return {**own, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def shell(commands: str, folder: Path) -> None:
    """Run commands as a user would paste them; each must succeed."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder, env=environment(folder),
        capture_output=True, text=True, timeout=3000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def serve(command: str, folder: Path) -> None:
    """Start a server, read its first page, end it."""
    port = free_port()
    env = {**environment(folder), "MLFLOW_PORT": str(port)}
    server = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=env, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and server.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}") as page:
                assert b"<title>MLflow</title>" in page.read()
                return
            time.sleep(0.5)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        said = server.communicate(timeout=60)[0]
    raise AssertionError(f"{command} does not answer:\n{said[-3000:]}")


def follow(language: str, body: str, folder: Path) -> None:
    """Do what a reader does with a block."""
    if language == "yaml" and (name := re.search(r"^name: (\S+)", body, re.MULTILINE)):
        (folder / f"{name[1]}.yaml").write_text(body)
    elif language == "python" and (name := re.match(r"# (\S+\.py)\n", body)):
        (folder / name[1]).write_text(body)
    elif language == "python":
        shell(f"python - <<'EOF'\n{body}EOF", folder)
    elif language == "bash" and body.startswith(GOES_ON):
        for command in body.removeprefix(GOES_ON).splitlines():
            serve(command, folder)
    elif language == "bash":
        shell(MAKE.sub("", body), folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work(page, checkout):
    for language, body in FENCE.findall(page.read_text()):
        if not needs(body):
            follow(language, body, checkout)
