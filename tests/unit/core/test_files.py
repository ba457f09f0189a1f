"""The one atomic write: whole files or none, and no second helper that renames."""

import ast
import json
import zipfile
from pathlib import Path

import pytest

from components.core.files import atomic, leftovers, rename, write_atomic, write_json, write_text

ROOT = Path(__file__).parents[3]
RENAMES = {"rename", "renames"}


@pytest.mark.parametrize("sync", [True, False])
def test_a_written_file_replaces_the_old_one(tmp_path, sync):
    path = write_atomic(tmp_path / "a.bin", b"old", sync=sync)
    assert write_atomic(path, b"new", sync=sync).read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


def test_text_and_json_keep_their_bytes(tmp_path):
    assert write_text(tmp_path / "t", "ä\r\n").read_bytes() == "ä\r\n".encode()
    written = write_json(tmp_path / "j", {"b": 1, "a": [0.5]}).read_text()
    assert written == json.dumps({"a": [0.5], "b": 1}, indent=2) + "\n"
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "j", float("nan"))
    assert (tmp_path / "j").read_text() == written


@pytest.mark.parametrize("before", [b"old", None])
def test_a_failing_writer_changes_nothing(tmp_path, before):
    path = tmp_path / "a.zip"
    if before:
        path.write_bytes(before)

    def interrupted() -> None:
        with atomic(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
            archive.writestr("name", "content")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (path.read_bytes() if path.exists() else None) == before
    assert not leftovers(tmp_path)


def test_two_writers_of_one_file_do_not_mix(tmp_path):
    path = tmp_path / "shard"
    with atomic(path) as first, atomic(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # whose block ends last


def test_files_of_killed_writers_are_found(tmp_path):
    (tmp_path / "below").mkdir()
    path = tmp_path / "below" / "a.parquet"
    with atomic(path) as temporary:
        temporary.write_bytes(b"half")
        assert leftovers(tmp_path) == [temporary]
    assert leftovers(tmp_path) == []
    assert rename(path, "b.parquet").read_bytes() == b"half"


def renaming_calls(source: str) -> list[int]:
    """Lines that rename a file: `replace` of a path has one argument, that of a text has two."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of_path = node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
        of_module = ast.unparse(node.func) in ("os.replace", "shutil.move")
        if node.func.attr in RENAMES or of_path or of_module:
            found.append(node.lineno)
    return found


def test_the_search_for_renames_finds_them():
    calls = ["a.replace(b)", "os.replace(a, b)", "a.rename(b)", "shutil.move(a, b)"]
    assert renaming_calls("\n".join(calls)) == [1, 2, 3, 4]
    assert renaming_calls("a.replace('x', 'y')\nreplace(a, b=1)\ntable.replace(b=1)") == []


def test_nothing_else_renames_files():
    files = [p for room in ("components", "pipelines") for p in (ROOT / room).rglob("*.py")]
    found = {p.relative_to(ROOT).as_posix(): renaming_calls(p.read_text()) for p in files}
    assert [name for name, lines in found.items() if lines] == ["components/core/files.py"]
