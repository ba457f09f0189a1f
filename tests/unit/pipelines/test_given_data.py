"""What commands without a recipe take from the data, before anything is prepared."""

from functools import partial

import pytest
import torch

from components.core.errors import CasemateError
from pipelines.cli.given_data import SIZES, sizes_of
from tests import image_folders as folders
from tests.e2e.cli import mistake_of
from tests.model_places import trained_network


def read(source, path=None, overrides=(), wanted=SIZES):
    data = {"source": source, "path": None if path is None else str(path), "fit": "pad"}
    found = sizes_of(data, None, overrides=overrides, wanted=wanted)
    return found.image_size, found.channels, found.num_classes


def test_sizes_are_those_of_the_images_where_they_agree(tmp_path):
    assert read("folder", folders.flat(tmp_path / "a")) == (32, 3, 4)
    grey = folders.class_folders(tmp_path / "b", {"x": 2, "y": 2}, height=8, width=8, channels=1)
    assert read("folder", grey) == (8, 1, 2)
    long = folders.class_folders(tmp_path / "c", {"x": 2, "y": 2, "z": 1}, height=8, width=9)
    assert read("folder", long) == (None, 3, 3)
    folders.save(grey / "x" / "colour.png", folders.pixels(0, 1, 8, 8))
    assert read("folder", grey) == (8, None, 2)
    assert read("digits") == (8, 1, 10)


def test_keys_that_are_set_count_and_nothing_else_is_looked_for(tmp_path):
    path = folders.flat(tmp_path / "a")
    assert read("folder", path, ["data.image_size=24", "data.channels=1"]) == (24, 1, 4)
    assert read("folder", path, wanted=()) == (None, None, None)
    assert read("folder", path, wanted=("num_classes",)) == (None, None, 4)


def test_a_side_that_cannot_be_known_is_asked_for(tmp_path):
    net = trained_network(tmp_path)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    long = folders.class_folders(tmp_path / "c", {"x": 2, "y": 2}, height=8, width=9)
    code = ("--model", f"python:{tmp_path / 'digit_net.py'}:build", "--eps", 0.1)
    attack = partial(mistake_of, "attack", *code, "--data", "folder")
    asked = "--image-size: is missing: the side of the images in pixels"
    assert attack("--data-path", long) == asked
    assert attack("--data-path", tmp_path / "no").startswith(f"--data-path: {tmp_path / 'no'}")


def test_wrong_options_of_a_source_are_refused_by_their_key(tmp_path):
    with pytest.raises(CasemateError, match=r"^data\.options\.no"):
        read("folder", folders.flat(tmp_path / "a"), ["data.options.no=1"])
