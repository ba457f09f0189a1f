"""Caltech-101 and Flowers-102 in the layouts of their archives."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from components.core.errors import CasemateError
from components.data.sources import open_source


def write_image(path: Path, seed: int = 0) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format="PNG")
    return pixels


# -- Caltech-101


CATEGORIES = ["Faces", "Faces_easy", "Leopards", "accordion", "airplanes", "yin_yang"]
CATEGORIES += [f"thing_{i:02d}" for i in range(95)]


@pytest.fixture
def caltech(tmp_path: Path) -> Path:
    for name in (*CATEGORIES, "BACKGROUND_Google"):
        folder = tmp_path / "101_ObjectCategories" / name
        folder.mkdir(parents=True)
        for number in range(3):
            (folder / f"image_{number:04d}.jpg").touch()
    return tmp_path


def test_caltech_has_102_classes_in_case_blind_order(caltech):
    source = open_source("caltech101", path=str(caltech), options={"train_per_class": 1})
    assert len(source.classes) == 102
    assert source.classes[:3] == ("accordion", "airplanes", "BACKGROUND_Google")
    assert source.classes.index("Faces") == 3
    assert source.classes[-1] == "yin_yang"
    entries = source.entries()
    assert all(source.classes[e.label] == e.locator.split("/")[0] for e in entries)
    for hint, count in (("train", 1), ("test", 2)):
        labels = [e.label for e in entries if e.split_hint == hint]
        assert np.bincount(labels).tolist() == [count] * 102


def test_caltech_split_belongs_to_the_items_and_not_to_the_place(caltech, tmp_path):
    options = {"train_per_class": 2}

    def hints(root: Path) -> dict[str, str]:
        entries = open_source("caltech101", path=str(root), options=options).entries()
        return {e.item_id: e.split_hint for e in entries}

    before = hints(caltech)
    (tmp_path / "elsewhere").mkdir()
    (caltech / "101_ObjectCategories").rename(tmp_path / "elsewhere" / "101_ObjectCategories")
    assert hints(tmp_path / "elsewhere") == before
    firsts = [hint for name, hint in before.items() if name.endswith("_0000.jpg")]
    assert set(firsts) == {"train", "test"}  # not simply the first by name


def test_caltech_without_clutter_and_without_split(caltech):
    options = {"background": False, "train_per_class": None}
    source = open_source("caltech101", path=str(caltech), options=options)
    assert len(source.classes) == 101
    assert "BACKGROUND_Google" not in source.classes
    assert {e.split_hint for e in source.entries()} == {None}


def test_caltech_pixels_below_the_folder_of_torchvision(caltech):
    (caltech / "caltech101").mkdir()
    (caltech / "101_ObjectCategories").rename(caltech / "caltech101" / "101_ObjectCategories")
    place = caltech / "caltech101" / "101_ObjectCategories" / "accordion" / "image_0000.jpg"
    pixels = write_image(place)
    source = open_source("caltech101", path=str(caltech), options={"train_per_class": 1})
    entry = source.entries()[0]
    assert entry.item_id == "caltech101-accordion/image_0000.jpg"
    assert np.array_equal(pickle.loads(pickle.dumps(source)).decode(entry), pixels)


def test_caltech_mistakes_are_named(caltech, tmp_path):
    with pytest.raises(CasemateError, match="is too large: accordion has 3 images"):
        open_source("caltech101", path=str(caltech)).entries()
    with pytest.raises(CasemateError, match="at least 1"):
        open_source("caltech101", path=str(caltech), options={"train_per_class": 0})
    (tmp_path / "empty").mkdir()
    with pytest.raises(CasemateError, match="lacks 101_ObjectCategories"):
        open_source("caltech101", path=str(tmp_path / "empty"))
    (caltech / "101_ObjectCategories" / "102nd").mkdir()
    with pytest.raises(CasemateError, match="has 103 class folders, expected 102"):
        open_source("caltech101", path=str(caltech))
    clutter = caltech / "101_ObjectCategories" / "BACKGROUND_Google"
    clutter.rename(tmp_path / "clutter")
    with pytest.raises(CasemateError, match="background=false"):
        open_source("caltech101", path=str(caltech))


# -- Flowers-102


def write_mat(path: Path, **rows: list[int]) -> None:
    from scipy.io import savemat

    savemat(path, {key: np.array([row], dtype=np.uint16) for key, row in rows.items()})


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    for number in range(1, 7):
        write_image(tmp_path / "jpg" / f"image_{number:05d}.jpg", seed=number)
    write_mat(tmp_path / "imagelabels.mat", labels=[77, 1, 102, 77, 1, 3])
    write_mat(tmp_path / "setid.mat", trnid=[6, 2], valid=[1], tstid=[3, 5, 4])
    return tmp_path


def test_flowers_splits_and_labels_from_one(flowers):
    source = open_source("flowers102", path=str(flowers))
    assert len(set(source.classes)) == 102
    assert source.classes[76] == "passion flower"  # the published class 77
    entries = source.entries()
    assert [(e.item_id, e.label, e.split_hint) for e in entries] == [
        ("flowers102-00006", 2, "train"),
        ("flowers102-00002", 0, "train"),
        ("flowers102-00001", 76, "val"),
        ("flowers102-00003", 101, "test"),
        ("flowers102-00005", 0, "test"),
        ("flowers102-00004", 76, "test"),
    ]
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(copy.decode(entries[0]), write_image(flowers / "x.png", seed=6))


def test_flowers_below_the_folder_of_torchvision(flowers, tmp_path):
    inner = tmp_path / "flowers-102"
    inner.mkdir()
    for part in ("jpg", "imagelabels.mat", "setid.mat"):
        (flowers / part).rename(inner / part)
    assert len(open_source("flowers102", path=str(tmp_path)).entries()) == 6


@pytest.mark.parametrize(
    ("file", "rows", "message"),
    [
        ("imagelabels", {"labels": [77, 1, 103, 77, 1, 3]}, "has 103 under `labels`"),
        ("imagelabels", {"labels": [77, 0, 3, 77, 1, 3]}, "has 0 under `labels`"),
        ("imagelabels", {"marks": [1]}, "row `labels`"),
        ("setid", {"trnid": [7], "valid": [1], "tstid": [2]}, "has 7 under `trnid`"),
        ("setid", {"trnid": [6], "valid": [1], "tstid": [6]}, "twice, the second time under tstid"),
        ("setid", {"trnid": [6, 6], "valid": [1], "tstid": [2]}, "twice"),
        ("setid", None, "is not the published file"),
    ],
)
def test_bad_flower_files_are_named(flowers, file, rows, message):
    path = flowers / f"{file}.mat"
    write_mat(path, **rows) if rows else path.write_bytes(path.read_bytes()[:140])
    with pytest.raises(CasemateError, match=message) as caught:
        open_source("flowers102", path=str(flowers)).entries()
    assert f"{file}.mat" in str(caught.value)


def test_missing_flower_parts_are_named(flowers):
    (flowers / "jpg" / "image_00005.jpg").unlink()
    with pytest.raises(CasemateError, match=r"image_00005\.jpg"):
        open_source("flowers102", path=str(flowers)).entries()
    (flowers / "setid.mat").unlink()
    with pytest.raises(CasemateError, match=r"lacks setid\.mat"):
        open_source("flowers102", path=str(flowers))
