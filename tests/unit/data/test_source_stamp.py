"""The stamp of a source follows every file that results may depend on."""

import shutil
from pathlib import Path

import pytest

from components.core.errors import CasemateError
from components.data.sources import stamp as stamp_module
from components.data.sources.stamp import source_stamp


@pytest.fixture
def root(tmp_path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "0.png").write_bytes(name.encode())
    return tmp_path / "data"


def stamp(path: Path) -> str:
    return source_stamp("folder", str(path))


def test_linked_folders_count_by_what_they_hold(root, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("cat", "dog"):
        (linked / name).symlink_to(root / name)
    assert stamp(linked) == stamp(root)
    (root / "cat" / "0.png").write_bytes(b"cow")
    assert stamp(linked) == stamp(root)
    before = stamp(linked)
    (root / "cat" / "1.png").touch()
    assert stamp(linked) != before


def test_links_in_a_circle_end(root):
    plain = stamp(root)
    (root / "cat" / "up").symlink_to(root)
    (root / "self").symlink_to(root)
    assert stamp(root) == plain


@pytest.mark.parametrize("target", ["/nowhere/at/all", "notes"])
def test_a_link_to_nothing_is_named(root, target):
    (root / "notes").symlink_to(target)  # the second one points to itself
    with pytest.raises(CasemateError, match=str(root / "notes")) as caught:
        stamp(root)
    assert caught.value.key == "data.path"


def test_what_may_not_be_read_is_named(root, monkeypatch):
    def refuse(path: Path) -> str:  # file modes do not stop the superuser
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(stamp_module, "digest_file", refuse)
    with pytest.raises(CasemateError, match=r"cat/0\.png cannot be read here \(Permission"):
        stamp(root)


@pytest.fixture
def large(root, monkeypatch) -> Path:
    """A folder too large to be read whole: labels, a large array, images."""
    monkeypatch.setattr(stamp_module, "READ_UP_TO", 10)
    monkeypatch.setattr(stamp_module, "SMALL_FILE", 64)
    monkeypatch.setattr(stamp_module, "ENDS", 8)
    (root / "labels.txt").write_bytes(b"0 1 1 0")
    (root / "images.npy").write_bytes(bytes(100))
    return root


def changed(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("file", "position"),
    [("labels.txt", 3), ("images.npy", 0), ("images.npy", 7), ("images.npy", 99)],
)
def test_small_files_and_the_ends_of_large_ones_count_in_large_folders(large, file, position):
    before = stamp(large)
    changed(large / file, position)
    assert stamp(large) != before


def test_what_is_not_read_of_a_large_folder(large, tmp_path):
    """The price of not reading everything; sizes and names still count."""
    before = stamp(large)
    changed(large / "images.npy", 50)
    changed(large / "cat" / "0.png", 0)
    assert stamp(large) == before
    shutil.copytree(large, tmp_path / "copy")
    assert stamp(tmp_path / "copy") == before
    (large / "images.npy").write_bytes(bytes(101))
    assert stamp(large) != before
    (large / "images.npy").write_bytes(bytes(100))
    (large / "cat" / "0.png").rename(large / "cat" / "1.png")
    assert stamp(large) != before
