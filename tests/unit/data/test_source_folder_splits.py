"""Folders of splits: every usual word is understood, and what is not is never taken for a class."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from components.core.errors import CasemateError
from components.data.sources import open_source


def write_images(root: Path, *folders: str) -> None:
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(root / folder / "0.png")


def write_splits(root: Path, *splits: str) -> None:
    write_images(root, *(f"{split}/{name}" for split in splits for name in ("cat", "dog")))


@pytest.mark.parametrize(
    ("folders", "hints"),
    [
        (["train", "valid", "test"], ["train", "val", "test"]),
        (["train", "validation"], ["train", "val"]),
        (["Train", "dev", "TEST"], ["train", "val", "test"]),
        (["training", "testing"], ["train", "test"]),
        (["train"], ["train"]),
        (["test"], ["test"]),
    ],
)
def test_usual_words_are_splits(tmp_path, folders, hints):
    write_splits(tmp_path, *folders)
    source = open_source("folder", path=str(tmp_path))
    assert source.classes == ("cat", "dog")
    assert [(e.item_id, e.label, e.split_hint) for e in source.entries()] == [
        (f"folder-{folder}/{name}/0.png", label, hint)
        for folder, hint in zip(folders, hints, strict=True)
        for label, name in enumerate(("cat", "dog"))
    ]
    assert source.test_only == (hints == ["test"])


def test_splits_without_one_to_train_on_are_refused(tmp_path):
    write_splits(tmp_path, "val", "test")
    with pytest.raises(CasemateError, match="has val, test but nothing to train on"):
        open_source("folder", path=str(tmp_path))


def test_a_folder_beside_the_splits_is_asked_about_and_can_be_left_out(tmp_path):
    write_splits(tmp_path, "train", "test", "extra")
    with pytest.raises(CasemateError, match="not understood: extra") as caught:
        open_source("folder", path=str(tmp_path))
    assert caught.value.key == "data.options.splits"
    options = {"splits": {"train": "train", "val": "extra"}}
    entries = open_source("folder", path=str(tmp_path), options=options).entries()
    assert {(e.locator.split("/")[0], e.split_hint) for e in entries} == {
        ("train", "train"),
        ("extra", "val"),
    }


@pytest.mark.parametrize(
    ("folders", "wrong"),
    [
        (["train/cat", "train/dog", "test"], "test"),  # images without labels
        (["train", "test"], "test"),
        (["train"], "train"),
        (["car", "test", "train"], "test"),  # one class may bear such a name, not two
    ],
)
def test_a_split_word_over_plain_images_is_no_split(tmp_path, folders, wrong):
    write_images(tmp_path, *folders)
    with pytest.raises(CasemateError, match=f"/{wrong} holds images; a split holds class folders"):
        open_source("folder", path=str(tmp_path))


@pytest.mark.parametrize("top", ["", "train/"])
def test_a_class_that_holds_folders_only_is_none(tmp_path, top):
    write_images(tmp_path, f"{top}cats/tabby", f"{top}cats/tiger", f"{top}dogs")
    source = open_source("folder", path=str(tmp_path))
    with pytest.raises(CasemateError, match="cats is not a class: it holds folders of images"):
        source.entries()
