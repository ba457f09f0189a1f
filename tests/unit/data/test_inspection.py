"""What is seen in a folder of images: source, classes, splits, sizes, and everything odd."""

import json

import numpy as np
import pytest

from components.core.errors import CasemateError
from components.data.inspection import inspect, oddities
from components.data.sources.recognition import FIRST_FASHION, recognise
from tests import image_folders as folders


def look(place, **how):
    return inspect(recognise(str(place)), **how)


@pytest.mark.parametrize(
    ("layout", "source", "num_items", "num_classes", "splits"),
    [
        ("flat", "folder", 96, 4, {"all": 96}),
        ("with_splits", "folder", 84, 2, {"train": 60, "val": 12, "test": 12}),
        ("npz", "npz", 100, 4, {"train": 80, "test": 20}),
        ("parquet", "parquet", 100, 4, {"train": 80, "test": 20}),
        ("cifar10", "cifar10", 120, 10, {"train": 100, "test": 20}),
        ("idx", "mnist", 100, 10, {"train": 80, "test": 20}),
        ("mixed_sizes", "folder", 60, 2, {"all": 60}),
    ],
)
def test_layouts_are_recognised(tmp_path, layout, source, num_items, num_classes, splits):
    found = look(folders.LAYOUTS[layout](tmp_path / "data"))
    assert (found.source, found.num_items, len(found.classes)) == (source, num_items, num_classes)
    assert found.splits == splits
    assert sum(found.class_counts.values()) == found.num_looked_at == num_items


def test_sizes_and_channels_are_those_of_the_files(tmp_path):
    found = look(folders.mixed_sizes(tmp_path))
    sides = [50] * 40 + [min(44, 40 + n) for n in range(20, 40)]
    assert found.sizes.uniform is None
    assert found.sizes.shorter(0) == min(sides)
    assert found.sizes.shorter(1) == max(sides)
    assert found.sizes.mean[1] == pytest.approx((40 * 70 + 20 * 44) / 60)
    assert found.channels == (3,)
    assert any("sizes" in line for line in oddities(found))


def test_nothing_is_odd_about_a_plain_folder(tmp_path):
    assert oddities(look(folders.flat(tmp_path))) == []


def test_everything_odd_is_told(tmp_path):
    folders.class_folders(tmp_path, {"cat": 40, "dog": 3, "owl": 1})
    folders.save(tmp_path / "cat" / "grey.png", folders.pixels(0, 1, 32, 80, channels=1))
    (tmp_path / "cat" / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "dog" / "notes.txt").write_text("hello")
    folders.save(tmp_path / "stray.png", folders.pixels(0, 0))
    told = " | ".join(oddities(look(tmp_path)))
    assert "1 of 46 images cannot be read and are skipped: folder-cat/broken.jpg" in told
    assert "1 class has 1 image: owl" in told
    assert "less than 5 images: dog 3" in told
    assert "tenfold" in told
    assert "2 sizes" in told
    assert "grey and colour images are mixed" in told
    assert "1 files are not images: left out (1 .txt)" in told
    assert "1 images beside the folders" in told


def test_long_images_are_told(tmp_path):
    found = look(folders.class_folders(tmp_path, {"a": 6, "b": 6}, height=20, width=40))
    assert any("squash" in line for line in oddities(found))
    assert found.sizes.square_side is None


def test_a_sample_is_spread_over_all_classes_and_told(tmp_path):
    found = look(folders.flat(tmp_path), most=8)
    assert found.num_looked_at == 8
    assert found.num_items == 96
    assert "8 of 96 images were looked at" in " ".join(oddities(found))
    (tmp_path / "yak" / "000.png").write_bytes(b"")  # the first of the last class: index 72
    assert list(look(tmp_path, most=8).unreadable) == ["folder-yak/000.png"]


def test_a_prepared_dataset_has_its_classes_and_each_item_once(tmp_path):
    found = look(folders.prepared(tmp_path / "prepare-abc"))
    assert found.source == "parquet"
    assert found.classes == ("a", "b", "c", "d")
    assert found.splits == {"train": 40, "val": 8, "test": 8}
    assert found.num_items == len({entry.item_id for entry in found.entries}) == 56


def test_a_split_that_has_no_use_is_left_out_and_told(tmp_path):
    folder = folders.prepared(tmp_path / "prepare-abc")
    described = json.loads((folder / "dataset.json").read_text())
    described["splits"]["synthetic"] = {"num_items": 9, "shards": []}
    (folder / "dataset.json").write_text(json.dumps(described))
    (folder / "synthetic-00000.parquet").write_bytes((folder / "val-00000.parquet").read_bytes())
    found = look(folder)
    assert found.splits == {"train": 40, "val": 8, "test": 8}
    assert "synthetic" in " ".join(oddities(found))


def test_folders_beside_splits_are_left_out_and_told(tmp_path):
    folders.with_splits(tmp_path)
    folders.class_folders(tmp_path, {"cat": 2}, split="unsorted")
    found = look(tmp_path)
    assert found.options == {"splits": {"train": "train", "val": "valid", "test": "test"}}
    assert found.splits == {"train": 60, "val": 12, "test": 12}
    assert "the folder unsorted is not a split" in " ".join(oddities(found))


def test_fashion_is_told_from_digits_by_its_labels(tmp_path):
    folders.idx(tmp_path / "data")
    path = tmp_path / "data" / "t10k-labels-idx1-ubyte"
    content = path.read_bytes()
    path.write_bytes(content[:8] + bytes(FIRST_FASHION) + content[18:])
    assert recognise(str(tmp_path / "data")).source == "fashion_mnist"


def test_corrupted_cifar_names_what_is_there(tmp_path):
    labels = np.tile(np.arange(10), 5000)
    np.save(tmp_path / "labels.npy", labels)
    np.save(tmp_path / "fog.npy", np.zeros((1, 32, 32, 3), np.uint8))
    found = recognise(str(tmp_path))
    assert (found.source, found.options["corruption"]) == ("cifar10_c", ["fog"])


def test_a_source_without_files_is_named_as_it_is():
    found = look("digits")
    assert (found.path, found.num_items, found.sizes.square_side) == (None, 1797, 8)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda root: folders.save(root / "a.png", folders.pixels(0, 0)), "no class folders"),
        (lambda root: (root / "notes.txt").write_text("x"), "holds no image"),
        (lambda root: folders.class_folders(root, {"only": 3}), "1 class folders"),
        (lambda root: [np.savez(root / f"{n}.npz", x=1) for n in "ab"], "name one of them"),
        (lambda root: (root / "dataset.json").write_text("[]"), "not the description"),
        (
            lambda root: [
                (root / name / "a.jpg").write_bytes(b"")
                for name in "ab"
                if (root / name).mkdir() is None
            ],
            "no readable image",
        ),
        (lambda root: folders.class_folders(root, {"a": 3, "b": 3}) and (root / "c").mkdir(), "c"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, make, said):
    make(tmp_path)
    with pytest.raises(CasemateError, match=said) as error:
        look(tmp_path)
    assert "\n" not in str(error.value)


def test_unknown_places_and_files_are_refused(tmp_path):
    with pytest.raises(CasemateError, match="does not exist"):
        recognise(str(tmp_path / "nowhere"))
    with pytest.raises(CasemateError, match="name their folder"):
        recognise("cifar10")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(CasemateError, match="nor a Parquet"):
        recognise(str(tmp_path / "a.csv"))


def test_a_class_without_a_readable_image_is_refused(tmp_path):
    folders.class_folders(tmp_path, {"a": 3, "b": 3})
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "1.png").write_bytes(b"broken")
    with pytest.raises(CasemateError, match="class c has no readable image"):
        look(tmp_path)
