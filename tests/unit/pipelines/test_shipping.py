"""Only the code travels: what is packed, what is not read, and the revision that goes along."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.runtime import cluster, provenance
from pipelines.runtime.shipping import PACKAGES, PROJECT, ROOT, code_digest, code_env, code_files

HUGE = 600 * 10**9  # bytes: reading them would take longer than the whole suite


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A small checkout with huge (sparse) files beside and inside the packages."""
    for name in ("components/core/a.py", "pipelines/recipes/b.yaml", "pipelines/c.j2", PROJECT):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    for name in ("weights/vit.safetensors", "data/imagenet.tar", "x.npz", "components/core/w.pth"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, HUGE)
    (tmp_path / "components/__pycache__").mkdir()
    (tmp_path / "components/__pycache__/a.py").touch()
    return tmp_path


def files_below(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_only_the_code_is_packed_and_read(checkout):
    env = code_env(root=checkout)
    assert env.keys() == {"working_dir"}
    sent = Path(env["working_dir"])
    code = {"components/core/a.py", "pipelines/recipes/b.yaml", "pipelines/c.j2"}
    assert files_below(sent) == {*code, PROJECT}
    assert sent.name == code_digest(checkout) == code_digest(sent)


def test_every_file_of_our_packages_is_sent():
    """A new kind of file in the packages must be listed in `SUFFIXES`."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    tracked = subprocess.check_output(["git", "-C", ROOT, "ls-files", *PACKAGES], text=True)
    sent = {path.relative_to(ROOT).as_posix() for path in code_files()}
    assert {name for name in tracked.splitlines() if (ROOT / name).exists()} <= sent


def test_the_digest_is_that_of_names_and_contents(checkout, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(checkout / "components", other / "components", ignore=lambda *_: ["w.pth"])
    shutil.copytree(checkout / "pipelines", other / "pipelines")
    assert code_digest(other) == code_digest(checkout)  # a wheel has no pyproject.toml
    assert code_env(root=other) == {}  # and is not sent
    changed = shutil.copytree(other, other.parent / "changed")
    (changed / "components/core/a.py").write_text("changed")
    assert code_digest(changed) != code_digest(other)


def test_code_of_the_users_own_may_lie_in_any_folder(checkout, tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CASEMATE_USER_CODE", str(cache))
    copy = cache / "casemate_user_0123456789abcdef"
    (copy / "tests").mkdir(parents=True)
    (copy / "tests/mine.py").touch()
    env = code_env(["0123456789abcdef"], root=checkout)
    assert env["py_modules"] == [str(copy)]
    assert "excludes" not in env


def revision_in(folder: Path, **env: str) -> str:
    """The revision that the code in a folder says of itself."""
    script = "from pipelines.runtime.provenance import git_revision; print(git_revision())"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CASEMATE_REV")}
    return subprocess.check_output(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**environ, **env},
        text=True,
    ).strip()


def test_a_sent_copy_knows_the_revision_it_was_sent_with():
    sent = Path(code_env()["working_dir"])
    assert revision_in(sent) == "None"
    assert revision_in(sent, CASEMATE_REVISION="abc-dirty") == "abc-dirty"


def test_an_empty_revision_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "a/b/c.py"))  # has no .git
    monkeypatch.setenv("CASEMATE_REVISION", "")
    assert provenance.git_revision.__wrapped__() is None


@pytest.mark.parametrize(
    ("sent", "revision", "expected"),
    [
        (True, "abc", {"CASEMATE_REVISION": "abc"}),
        (True, None, {"CASEMATE_REVISION": ""}),  # not that of the cluster's image
        (False, "abc", {}),  # the cluster's image has its own code and revision
    ],
)
def test_the_revision_travels_with_the_code(monkeypatch, sent, revision, expected):
    monkeypatch.setattr(cluster, "is_checkout", lambda: sent)
    monkeypatch.setattr(cluster, "git_revision", lambda: revision)
    assert cluster.revision_env() == expected
