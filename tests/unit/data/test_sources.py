"""Sources list stable ids, decode exact pixels, and name what is wrong with bad input."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from components.core.errors import CasemateError
from components.data.sources import open_source
from components.data.sources.base import UndecodableItemError


def write_png(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# -- embedded


def test_digits_spread_sixteen_levels_over_the_byte_range():
    from sklearn.datasets import load_digits

    source = open_source("digits", path=None)
    entries = source.entries()
    levels = load_digits().images
    assert [entry.label for entry in entries] == load_digits().target.tolist()
    assert entries[17].item_id == "digits-00017"
    for index in (0, 17, 1796):
        pixels = source.decode(entries[index])
        assert pixels.shape == (8, 8, 1)
        assert pixels.dtype == np.uint8
        # |stored - exact| <= 1/2 pins the rounding; the ends must be reached exactly
        assert np.abs(pixels[..., 0] - levels[index] * 255 / 16).max() <= 0.5
    stack = np.stack([source.decode(entry) for entry in entries])
    assert set(np.unique(stack)) == {round(v * 255 / 16 + 1e-9) for v in range(17)}


def test_mnist5k_is_the_published_subset_and_is_parsed_once():
    source = open_source("mnist5k", path=None)
    entries = source.entries()
    assert open_source("mnist5k", path=None) is source
    assert len(entries) == 5000
    assert entries[17].item_id == "mnist5k-00017"
    assert np.bincount([entry.label for entry in entries]).tolist() == [500] * 10
    pixels = source.decode(entries[4999])
    assert pixels.shape == (28, 28, 1)
    assert pixels.max() > 200


def test_embedded_sources_survive_pickling():
    source = open_source("digits", path=None)
    copy = pickle.loads(pickle.dumps(source))
    entry = source.entries()[5]
    assert np.array_equal(copy.decode(entry), source.decode(entry))


@pytest.mark.parametrize(
    ("name", "path", "key"),
    [
        ("imagenet-9", None, "data.source"),
        ("npz", None, "data.path"),
        ("digits", "somewhere", "data.path"),
    ],
)
def test_wrong_source_settings_are_named(name, path, key):
    with pytest.raises(CasemateError) as caught:
        open_source(name, path=path)
    assert caught.value.key == key


# -- folder


@pytest.fixture
def photo_root(tmp_path: Path) -> Path:
    root = tmp_path / "my photos ünïcode"
    for number, (name, file) in enumerate(
        [("cat", "a 1.png"), ("cat", "b.PNG"), ("Hünd", "日本.png"), ("Hünd", "deep/er/x.png")]
    ):
        write_png(root / name / file, random_pixels(6, 5, 3, seed=number))
    return root


def test_folder_of_classes_with_spaces_and_unicode(photo_root):
    (photo_root / "cat" / "notes.txt").write_text("not an image")
    (photo_root / "cat" / ".hidden.png").write_bytes(b"not an image")
    source = open_source("folder", path=str(photo_root))
    assert source.classes == ("Hünd", "cat")
    entries = {entry.item_id: entry for entry in source.entries()}
    assert set(entries) == {
        "folder-cat/a 1.png",
        "folder-cat/b.PNG",
        "folder-Hünd/日本.png",
        "folder-Hünd/deep/er/x.png",
    }
    entry = entries["folder-Hünd/日本.png"]
    assert (entry.label, entry.split_hint) == (0, None)
    assert np.array_equal(source.decode(entry), random_pixels(6, 5, 3, seed=2))
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(copy.decode(entry), source.decode(entry))


def test_folder_with_native_splits(tmp_path):
    for split, name in [("train", "a"), ("train", "b"), ("test", "a")]:
        write_png(tmp_path / split / name / "0.png", random_pixels(4, 4))
    found = open_source("folder", path=str(tmp_path)).entries()
    assert [(e.item_id, e.label, e.split_hint) for e in found] == [
        ("folder-train/a/0.png", 0, "train"),
        ("folder-train/b/0.png", 1, "train"),
        ("folder-test/a/0.png", 0, "test"),
    ]


def test_a_class_that_is_called_train_is_a_class(tmp_path):
    for file in ("car/0.png", "train/0.png", "train/steam/1.png"):
        write_png(tmp_path / file, random_pixels(4, 4))
    source = open_source("folder", path=str(tmp_path))
    assert source.classes == ("car", "train")
    assert {entry.split_hint for entry in source.entries()} == {None}


def test_class_only_in_test_is_refused(tmp_path):
    for split, name in [("train", "a"), ("train", "b"), ("test", "c")]:
        write_png(tmp_path / split / name / "0.png", random_pixels(4, 4))
    with pytest.raises(CasemateError, match="test/c"):
        open_source("folder", path=str(tmp_path)).entries()


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(CasemateError, match="nowhere"):
        open_source("folder", path=str(tmp_path / "nowhere"))


def test_folder_without_class_folders_is_refused(tmp_path):
    write_png(tmp_path / "0.png", random_pixels(4, 4))
    with pytest.raises(CasemateError, match="0 class folders"):
        open_source("folder", path=str(tmp_path))


def test_empty_class_folder_is_named(photo_root):
    (photo_root / "zebra").mkdir()
    with pytest.raises(CasemateError, match="zebra holds no image"):
        open_source("folder", path=str(photo_root)).entries()


@pytest.mark.parametrize("damage", ["garbage", "truncated", "empty", "sixteen bits"])
def test_undecodable_image_is_named(photo_root, damage):
    bad = photo_root / "cat" / "a 1.png"
    if damage == "sixteen bits":
        Image.fromarray(np.full((6, 5), 40_000, dtype=np.uint16)).save(bad)
    else:
        whole = bad.read_bytes()
        bad.write_bytes({"garbage": b"no", "truncated": whole[:-40], "empty": b""}[damage])
    source = open_source("folder", path=str(photo_root))
    entry = next(e for e in source.entries() if e.item_id.endswith("a 1.png"))
    with pytest.raises(UndecodableItemError, match=r"a 1\.png"):
        source.decode(entry)


def test_vanished_file_is_no_undecodable_item(photo_root):
    """Otherwise `skip` would quietly drop everything on a worker that lacks the disk."""
    source = open_source("folder", path=str(photo_root))
    entry = source.entries()[0]
    (photo_root / entry.locator).unlink()
    with pytest.raises(CasemateError, match="every worker") as caught:
        source.decode(entry)
    assert not isinstance(caught.value, UndecodableItemError)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("1", 1), ("P", 3), ("RGBA", 3)])
def test_image_modes_become_one_or_three_channels(tmp_path, mode, channels):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(random_pixels(4, 6, 3)).convert(mode).save(tmp_path / name / "0.png")
    source = open_source("folder", path=str(tmp_path))
    assert source.decode(source.entries()[0]).shape == (4, 6, channels)


def test_version_follows_the_stored_bytes(photo_root):
    source = open_source("folder", path=str(photo_root))
    before = {entry.item_id: entry.version for entry in source.entries()}
    write_png(photo_root / "cat" / "b.PNG", random_pixels(9, 9, 3))
    after = {entry.item_id: entry.version for entry in source.entries()}
    assert {i for i in before if before[i] != after[i]} == {"folder-cat/b.PNG"}


# -- npz


def test_npz_with_native_splits(tmp_path):
    x, y = random_pixels(5, 4, 6, 3), np.array([0, 1, 2, 1, 0], dtype=np.uint8)
    path = tmp_path / "a file.npz"
    np.savez_compressed(
        path, x_train=x, y_train=y, x_test=x[:2], y_test=y[:2], classes=np.array(["p", "ö", "r"])
    )
    source = open_source("npz", path=str(path))
    entries = source.entries()
    assert source.classes == ("p", "ö", "r")
    assert [e.item_id for e in entries[4:]] == [
        "npz-train-00004",
        "npz-test-00000",
        "npz-test-00001",
    ]
    assert [e.label for e in entries] == [0, 1, 2, 1, 0, 0, 1]
    assert np.array_equal(source.decode(entries[3]), x[3])
    assert np.array_equal(pickle.loads(pickle.dumps(source)).decode(entries[6]), x[1])


def test_npz_with_a_val_split_of_its_own(tmp_path):
    x, y = random_pixels(6, 4, 4), np.array([0, 1, 0, 1, 1, 0])
    arrays = {"x_train": x[:3], "y_train": y[:3], "x_val": x[3:5], "y_val": y[3:5]}
    arrays |= {"x_test": x[5:], "y_test": y[5:]}
    np.savez(tmp_path / "a.npz", **arrays)
    source = open_source("npz", path=str(tmp_path / "a.npz"))
    entries = source.entries()
    assert [e.split_hint for e in entries] == ["train"] * 3 + ["val"] * 2 + ["test"]
    assert [e.label for e in entries] == y.tolist()
    assert entries[4].item_id == "npz-val-00001"
    for entry, image in zip(entries, x, strict=True):
        assert np.array_equal(source.decode(entry)[..., 0], image)
    for alone in ("x_val", "y_val"):
        rest = {key: value for key, value in arrays.items() if "val" not in key or key == alone}
        np.savez(tmp_path / "half.npz", **rest)
        with pytest.raises(CasemateError, match=f"has only {alone}"):
            open_source("npz", path=str(tmp_path / "half.npz"))


def test_npz_of_plain_grey_images(tmp_path):
    x = random_pixels(3, 4, 4)
    np.savez(tmp_path / "a.npz", images=x, labels=np.array([1, 0, 1]))
    source = open_source("npz", path=str(tmp_path / "a.npz"))
    assert source.classes == ("0", "1")
    entries = source.entries()
    assert (entries[2].item_id, entries[2].split_hint) == ("npz-00002", None)
    assert np.array_equal(source.decode(entries[2]), x[2][..., None])


GOOD = {"images": random_pixels(3, 4, 4), "labels": np.array([0, 1, 1])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": None, "pictures": GOOD["images"]}, "labels, pictures"),
        ({"labels": np.array([0, 1])}, "2 labels for 3 images"),
        ({"labels": np.array([0, -1, 1])}, "label -1 at 1"),
        ({"labels": np.array([0.0, 1.0, 1.0])}, "float64"),
        ({"classes": np.array(["only"])}, "label 1 at 1, but there are 1 classes"),
        ({"classes": np.array(["a", "a"])}, "twice"),
        ({"images": GOOD["images"] / 255}, "float64"),
        ({"images": random_pixels(3, 4, 4, 2)}, "C 1 or 3"),
        ({"labels": np.array([0, 1, "x"], dtype=object)}, "plain arrays"),
    ],
)
def test_bad_npz_is_explained(tmp_path, change, message):
    arrays = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(CasemateError, match=message) as caught:
        open_source("npz", path=str(tmp_path / "bad.npz"))
    assert "bad.npz" in str(caught.value)


def test_damaged_and_missing_npz_are_named(tmp_path):
    path = tmp_path / "a.npz"
    with pytest.raises(CasemateError, match=r"a\.npz is not a file"):
        open_source("npz", path=str(path))
    np.savez(path, **GOOD)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CasemateError, match=r"a\.npz is not a readable"):
        open_source("npz", path=str(path))


def test_npz_replaced_between_listing_and_decoding_is_noticed(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, **GOOD)
    source = open_source("npz", path=str(path))
    np.savez(path, images=random_pixels(9, 4, 4), labels=np.zeros(9, dtype=int))
    with pytest.raises(CasemateError, match="changed"):
        source.decode(source.entries()[0])
