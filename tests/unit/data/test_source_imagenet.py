"""ImageNet and ImageNet-100: labels by wnid, both validation layouts alike, published lists."""

import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from components.core.errors import CasemateError
from components.data.sources import imagenet as imagenet_module
from components.data.sources import open_source
from components.data.sources.base import UndecodableItemError
from components.data.sources.imagenet import ROBUSTBENCH_SHA256, names_sha256
from components.data.sources.names import imagenet100_synsets, imagenet_synsets

WNIDS = imagenet_synsets()
CAT, DOG, FISH = WNIDS[281], WNIDS[207], WNIDS[0]
VAL = {1: CAT, 2: FISH, 3: DOG, 4: CAT}  # number of the image -> class


def write_image(path: Path, seed: int = 0) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:  # PNG inside: what decides is the content, and it is lossless
        Image.fromarray(pixels).save(file, format="PNG")
    return pixels


def val_name(number: int) -> str:
    return f"ILSVRC2012_val_{number:08d}.JPEG"


@pytest.fixture
def train(tmp_path: Path) -> Path:
    root = tmp_path / "ilsvrc"
    for seed, (wnid, file) in enumerate([(CAT, "a"), (CAT, "b"), (DOG, "c"), (FISH, "d")]):
        write_image(root / "train" / wnid / f"{wnid}_{file}.JPEG", seed)
    return root


def flat_val(root: Path) -> Path:
    for number in VAL:
        write_image(root / "val" / val_name(number), 100 + number)
    val_map = root / "val.txt"
    val_map.write_text("".join(f"{val_name(n)} {wnid}\n" for n, wnid in VAL.items()))
    return val_map


def sorted_val(root: Path) -> None:
    for number, wnid in VAL.items():
        write_image(root / "val" / wnid / val_name(number), 100 + number)


def listing(source) -> list[tuple[str, int, str]]:
    return [(e.item_id, e.label, e.split_hint) for e in source.entries()]


# -- both layouts


def test_labels_are_positions_among_the_sorted_classes(train):
    sorted_val(train)
    source = open_source("imagenet", path=str(train), options={"subset": True})
    assert source.classes == (FISH, DOG, CAT)
    assert listing(source) == [
        (f"imagenet-train/{FISH}/{FISH}_d.JPEG", 0, "train"),
        (f"imagenet-train/{DOG}/{DOG}_c.JPEG", 1, "train"),
        (f"imagenet-train/{CAT}/{CAT}_a.JPEG", 2, "train"),
        (f"imagenet-train/{CAT}/{CAT}_b.JPEG", 2, "train"),
        ("imagenet-val/" + val_name(1), 2, "test"),
        ("imagenet-val/" + val_name(2), 0, "test"),
        ("imagenet-val/" + val_name(3), 1, "test"),
        ("imagenet-val/" + val_name(4), 2, "test"),
    ]
    assert not source.test_only


def test_flat_and_sorted_validation_images_are_the_same_items(train, tmp_path):
    val_map = flat_val(train)
    flat = open_source(
        "imagenet", path=str(train), options={"subset": True, "val_map": str(val_map)}
    )
    other = tmp_path / "other"
    sorted_val(other)
    apart = open_source("imagenet", path=str(other), options={"subset": True})
    assert apart.test_only
    in_flat = [e for e in flat.entries() if e.split_hint == "test"]
    assert [e.item_id for e in in_flat] == [e.item_id for e in apart.entries()]
    for one, two in zip(in_flat, apart.entries(), strict=True):
        assert flat.classes[one.label] == apart.classes[two.label]
        assert np.array_equal(flat.decode(one), apart.decode(two))
        number = int(one.item_id.removesuffix(".JPEG")[-8:])
        assert np.array_equal(flat.decode(one), write_image(tmp_path / "x.png", 100 + number))
    copy = pickle.loads(pickle.dumps(flat))
    assert np.array_equal(copy.decode(in_flat[0]), flat.decode(in_flat[0]))


def test_without_train_labels_stay_those_of_the_thousand(tmp_path):
    sorted_val(tmp_path)
    source = open_source("imagenet", path=str(tmp_path), options={"subset": True})
    assert source.classes == WNIDS
    assert [label for _, label, _ in listing(source)] == [281, 0, 207, 281]


def test_kaggle_table_and_plain_lines_say_the_same(train):
    val_map = flat_val(train)
    options = {"subset": True, "val_map": str(val_map)}
    plain = listing(open_source("imagenet", path=str(train), options=options))
    rows = [f"{val_name(n)[:-5]},{wnid} 1 2 30 40 {wnid} 5 6 7 8" for n, wnid in VAL.items()]
    val_map.write_text("\n".join(["ImageId,PredictionString", *reversed(rows)]))
    assert listing(open_source("imagenet", path=str(train), options=options)) == plain


def write_devkit(root: Path, order: list[str]) -> tuple[Path, Path]:
    """meta.mat and ground truth as the devkit has them; inner nodes of the tree follow."""
    from scipy.io import savemat

    rows = [(i, wnid, "words", "gloss", 0) for i, wnid in enumerate(order, start=1)]
    rows += [(1001, "n00001740", "entity", "what is", 2)]
    kinds = [(key, "O") for key in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")]
    (root / "data").mkdir()
    savemat(root / "data" / "meta.mat", {"synsets": np.array(rows, dtype=kinds)[:, None]})
    truth = root / "truth.txt"
    truth.write_text("".join(f"{order.index(wnid) + 1}\n" for wnid in VAL.values()))
    return root / "data" / "meta.mat", truth


def test_devkit_numbers_need_and_follow_the_devkit_order(train, tmp_path):
    plain = listing(
        open_source(
            "imagenet", path=str(train), options={"subset": True, "val_map": str(flat_val(train))}
        )
    )
    order = list(np.random.default_rng(0).permutation(WNIDS))
    meta, truth = write_devkit(tmp_path, order)
    names = tmp_path / "order.txt"
    names.write_text("\n".join(f"{wnid} {i} kit_fox" for i, wnid in enumerate(order, start=1)))
    for place in (meta, names):
        options = {"subset": True, "val_map": str(truth), "synset_order": str(place)}
        assert listing(open_source("imagenet", path=str(train), options=options)) == plain
    options = {"subset": True, "val_map": str(truth)}
    with pytest.raises(CasemateError, match=r"meta\.mat") as caught:
        open_source("imagenet", path=str(train), options=options).entries()
    assert caught.value.key == "data.options.synset_order"


def test_our_reading_of_the_devkit_is_torchvisions(tmp_path, monkeypatch):
    import torch
    from torchvision.datasets import imagenet as theirs

    from components.data.sources.imagenet_val import read_val_map

    kit = tmp_path / "ILSVRC2012_devkit_t12"
    kit.mkdir()
    meta, truth = write_devkit(kit, list(np.random.default_rng(1).permutation(WNIDS)))
    truth.rename(kit / "data" / "ILSVRC2012_validation_ground_truth.txt")
    with tarfile.open(tmp_path / "kit.tar.gz", "w:gz") as archive:
        archive.add(kit, arcname=kit.name)
    monkeypatch.setattr(theirs, "_verify_archive", lambda *args: None)  # ours is no published one
    theirs.parse_devkit_archive(tmp_path, "kit.tar.gz")
    _, expected = torch.load(tmp_path / "meta.bin", weights_only=True)
    truth = kit / "data" / "ILSVRC2012_validation_ground_truth.txt"
    assert list(read_val_map(truth, synset_order=meta).values()) == expected


# -- published lists


def test_imagenet100_is_the_published_list_and_leaves_other_classes_alone(tmp_path):
    wanted = imagenet100_synsets()
    assert (len(wanted), len(set(wanted))) == (100, 100)
    assert wanted[:3] == ("n01484850", "n01532829", "n01608432")
    assert wanted[-3:] == ("n07715103", "n07734744", "n07860988")
    for number, wnid in enumerate((*wanted, FISH)):
        for base in ("train", "val"):
            (tmp_path / base / wnid).mkdir(parents=True)
            (tmp_path / base / wnid / f"{number}.JPEG").touch()
    source = open_source("imagenet100", path=str(tmp_path))
    assert source.classes == wanted
    by_split = {s: [e for e in source.entries() if e.split_hint == s] for s in ("train", "test")}
    for entries in by_split.values():
        assert sorted(e.label for e in entries) == list(range(100))
        assert all(wanted[e.label] in e.locator for e in entries)
    (tmp_path / "train" / wanted[7] / "7.JPEG").unlink()
    (tmp_path / "train" / wanted[7]).rmdir()
    with pytest.raises(CasemateError, match=f"99 of 100 class folders, {wanted[7]}"):
        open_source("imagenet100", path=str(tmp_path))


def test_the_whole_of_imagenet_is_wanted(tmp_path):
    for wnid in WNIDS:
        for base in ("train", "val"):
            (tmp_path / base / wnid).mkdir(parents=True)
            (tmp_path / base / wnid / f"{wnid}.JPEG").touch()
    source = open_source("imagenet", path=str(tmp_path))
    assert source.classes == WNIDS
    labels = [e.label for e in source.entries()]
    assert labels == [*range(1000), *range(1000)]
    with pytest.raises(UndecodableItemError, match=WNIDS[0]):
        source.decode(source.entries()[0])
    (tmp_path / "train" / "n99999999").mkdir()
    with pytest.raises(CasemateError, match="n99999999 is not a class"):
        open_source("imagenet", path=str(tmp_path), options={"subset": True})


def test_bundled_robustbench_list_is_the_published_one():
    names = imagenet_module.read_test_ids("robustbench")
    assert len(set(names)) == 5000
    assert names_sha256(names) == ROBUSTBENCH_SHA256
    assert names_sha256(names[:-1]) != ROBUSTBENCH_SHA256


@pytest.mark.parametrize(("content", "message"), [(None, "not installed"), ("1 2 3", "damaged")])
def test_bundled_list_must_be_there_and_whole(tmp_path, monkeypatch, content, message):
    file = tmp_path / "robustbench_imagenet.txt"
    if content:
        file.write_text(content)
    monkeypatch.setattr(imagenet_module, "ROBUSTBENCH_FILE", file)
    with pytest.raises(CasemateError, match=message):
        imagenet_module.read_test_ids("robustbench")


def test_own_ids_restrict_the_test_split_and_are_remarked(train, tmp_path):
    sorted_val(train)
    ids = tmp_path / "ids.txt"
    ids.write_text(f"{CAT}/{val_name(4)}\n{DOG}/{val_name(3)}\n")
    options = {"subset": True, "test_ids": str(ids)}
    source = open_source("imagenet", path=str(train), options=options)
    assert [row for row in listing(source) if row[2] == "test"] == [
        ("imagenet-val/" + val_name(3), 1, "test"),
        ("imagenet-val/" + val_name(4), 2, "test"),
    ]
    assert "2 of 2 images, not RobustBench's list" in source.remarks["test_ids"]
    everything = open_source("imagenet", path=str(train), options={"subset": True})
    assert everything.remarks == {}
    ids.write_text(f"{val_name(4)} {val_name(77)}")
    with pytest.raises(CasemateError, match=f"1 of the images .*{val_name(77)}"):
        open_source("imagenet", path=str(train), options=options).entries()


def test_robustbench_images_are_found_and_remarked(train):
    sorted_val(train)
    names = imagenet_module.read_test_ids("robustbench")
    for name in names:
        (train / "val" / CAT / name).touch()
    options = {"subset": True, "test_ids": "robustbench"}
    source = open_source("imagenet", path=str(train), options=options)
    found = [e.item_id.split("/")[-1] for e in source.entries() if e.split_hint == "test"]
    assert sorted(found) == sorted(names)
    assert "5000 of 5000 images, RobustBench's list" in source.remarks["test_ids"]


def test_the_remark_counts_the_listed_images_of_these_classes(train, tmp_path):
    """FISH is no class here, so one of the listed images is no test item."""
    sorted_val(train)
    shutil.rmtree(train / "train" / FISH)
    ids = tmp_path / "ids.txt"
    ids.write_text(f"{val_name(1)} {val_name(2)} {val_name(3)}")
    options = {"subset": True, "test_ids": str(ids)}
    source = open_source("imagenet", path=str(train), options=options)
    assert sum(hint == "test" for _, _, hint in listing(source)) == 2
    assert source.remarks["test_ids"].startswith("2 of 3 images, not RobustBench's list")


# -- mistakes


def test_flat_validation_images_without_a_map(train):
    flat_val(train)
    with pytest.raises(CasemateError, match="val is a flat folder") as caught:
        open_source("imagenet", path=str(train), options={"subset": True})
    assert caught.value.key == "data.options.val_map"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (f"{val_name(1)} {CAT}\n", f"has no class for {val_name(2)}"),
        (f"{val_name(1)} cat\n", "not `<image> <wnid"),
        (f"{val_name(1)} n99999999\n", "not `<image> <wnid"),
        (f"{val_name(1)} {CAT}\n{val_name(1)} {DOG}\n", "two classes"),
    ],
)
def test_bad_val_map_is_explained(train, text, message):
    val_map = flat_val(train)
    val_map.write_text(text)
    options = {"subset": True, "val_map": str(val_map)}
    with pytest.raises(CasemateError, match=message) as caught:
        open_source("imagenet", path=str(train), options=options).entries()
    assert caught.value.key == "data.options.val_map"
    assert "val.txt" in str(caught.value)


def test_bad_devkit_files_are_explained(train, tmp_path):
    flat_val(train)
    order = list(reversed(WNIDS))
    meta, truth = write_devkit(tmp_path, order)
    options = {"subset": True, "val_map": str(truth), "synset_order": str(meta)}

    def error() -> str:
        with pytest.raises(CasemateError) as caught:
            open_source("imagenet", path=str(train), options=options).entries()
        return str(caught.value)

    truth.write_text("1\n1001\n1\n1\n")
    assert "class 1001 at line 2" in error()
    truth.write_text("1\n1\n1\n1\n")
    meta.write_bytes(meta.read_bytes()[:300])
    assert "not the meta.mat" in error()
    options["synset_order"] = str(tmp_path / "list.txt")
    (tmp_path / "list.txt").write_text("\n".join(WNIDS))
    assert "is sorted, but the devkit's numbers are not" in error()
    (tmp_path / "list.txt").write_text("\n".join(order[:-1]))
    assert "each of the 1000" in error()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has 3 of 1000 class folders"),
        ({"subset": True, "val_map": "x.txt"}, "would be ignored"),
        ({"subset": True, "synset_order": "meta.mat"}, "does not apply without"),
        ({"subset": True, "test_ids": "nowhere.txt"}, "not a readable list"),
    ],
)
def test_settings_that_cannot_be_meant(train, options, message):
    sorted_val(train)
    with pytest.raises(CasemateError, match=message):
        open_source("imagenet", path=str(train), options=options)


def test_missing_val_folder_is_named(train):
    with pytest.raises(CasemateError, match="lacks the folder val"):
        open_source("imagenet", path=str(train), options={"subset": True})


def test_val_without_any_image_of_the_classes(train):
    write_image(train / "val" / WNIDS[5] / val_name(1))
    source = open_source("imagenet", path=str(train), options={"subset": True})
    with pytest.raises(CasemateError, match="no image of these classes"):
        source.entries()


def test_the_same_validation_image_in_two_classes(train):
    sorted_val(train)
    write_image(train / "val" / DOG / val_name(1))
    source = open_source("imagenet", path=str(train), options={"subset": True})
    with pytest.raises(CasemateError, match="exists twice"):
        source.entries()
