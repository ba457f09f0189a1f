"""Datasets and architectures as users meet them: the two lists, a made ImageNet, wrong files."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.e2e.cli import TINY, call, step_folder, tiny_recipe
from tests.e2e.test_bad_input import assert_refused

pytestmark = pytest.mark.e2e

PAPERS = {  # millions of parameters as the papers print them
    "deit_small_patch16_224": 22.05,
    "cait_s12_224": 25.61,
    "xcit_nano_12_p16_224": 3.05,
    "xcit_small_12_p16_224": 26.25,
    "xcit_medium_12_p16_224": 46.40,
    "xcit_large_12_p16_224": 103.79,
}


def picture(path, shade, side=12):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (shade, 255 - shade, 7)).save(path)


def test_models_lists_the_architectures_of_the_papers():
    rows = {row["name"]: row for row in call("models", "--json").json}
    for name, millions in PAPERS.items():
        assert rows[name]["params"] == pytest.approx(millions * 1e6, abs=5e3)
        assert isinstance(rows[name]["params"], int)
    assert all(row["flops"] > 0 and row["image_size"] in (32, 224, 512) for row in rows.values())


def test_models_answers_a_name_that_timm_knows_and_refuses_another():
    (row,) = call("models", "resnet34", "--json").json
    assert row["params"] == 21_797_672  # as torchvision's documentation of the same network says
    assert_refused(call("models", "mobilnet"), "mobilnet")


def test_data_lists_sources_and_shows_one():
    rows = {row["name"]: row for row in call("data", "--json").json}
    assert rows["imagenet_v2"]["test_only"]
    assert rows["cifar10"]["num_items"] == 60_000
    assert "data.options.val_map" in call("data", "imagenet").out
    assert_refused(call("data", "imagenett"), "imagenette")


@pytest.mark.usefixtures("ray_session")
def test_data_counts_a_prepared_dataset(finished_flow):
    held = call("data", step_folder(finished_flow, "prepare"), "--json").json
    counts = held["splits"]["train"]["class_counts"]
    assert sum(counts.values()) == held["splits"]["train"]["num_items"] == 1000
    assert 0.2 < held["splits"]["train"]["channel_mean"][0] < 0.4


def imagenet(root):
    """Two classes of ImageNet, its validation images in one flat folder."""
    for i, wnid in enumerate(("n01440764", "n01443537")):
        for j in range(10):
            picture(root / "train" / wnid / f"{wnid}_{j}.JPEG", 40 * i + j)
    for n in range(1, 5):
        picture(root / "val" / f"ILSVRC2012_val_{n:08d}.JPEG", n)
    return root


def imagenet_recipe(path, root, **data):
    values = {"source": "imagenet", "path": str(root), "image_size": 8, "fit": "crop", **data}
    return tiny_recipe(path, data=values, train=None, attack={}, certify={})


@pytest.mark.usefixtures("ray_session")
def test_a_made_imagenet_is_prepared_with_larger_training_images(tmp_path):
    root = imagenet(tmp_path / "in")
    lines = [f"ILSVRC2012_val_{n:08d}.JPEG n0144{['0764', '3537'][n % 2]}" for n in range(1, 5)]
    (tmp_path / "map.txt").write_text("\n".join(lines))
    options = {"val_map": str(tmp_path / "map.txt"), "subset": True}
    recipe = imagenet_recipe(tmp_path / "r.yaml", root, options=options, train_size=10)
    result = call("prepare", recipe, "--storage", tmp_path / "s")
    assert result.code == 0, result.err
    page = json.loads((step_folder(tmp_path / "s", "prepare") / "dataset.json").read_text())
    assert page["classes"] == ["n01440764", "n01443537"]
    assert page["splits"]["test"]["num_items"] == 4
    assert (page["splits"]["train"]["height"], page["height"]) == (10, 8)


@pytest.mark.usefixtures("ray_session")
def test_wrong_files_are_one_line(tmp_path):
    root = imagenet(tmp_path / "in")
    no_map = imagenet_recipe(tmp_path / "a.yaml", root, options={"subset": True})
    assert_refused(call("prepare", no_map, "--storage", tmp_path / "s"), "val_map")

    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03\0\0")
    data = {"source": "mnist", "path": str(tmp_path / "mnist")}
    torn = tiny_recipe(tmp_path / "b.yaml", data=data)
    assert_refused(call("prepare", torn, "--storage", tmp_path / "s"), "data.path", "mnist")

    archive = tmp_path / "wrong.npz"
    np.savez(
        archive,
        images=np.zeros((6, 8, 8), np.uint8),
        labels=np.array([0, 1, 0, 1, 0, 7]),
        classes=np.array(["zero", "one"]),
    )
    far = tiny_recipe(tmp_path / "c.yaml", data={"source": "npz", "path": str(archive)})
    assert_refused(call("prepare", far, "--storage", tmp_path / "s"), "label 7", "2 classes")

    odd = {**TINY["data"], "image_size": 9}
    size = tiny_recipe(tmp_path / "d.yaml", data=odd)
    refused = call("train", size, "--storage", tmp_path / "s")
    assert_refused(refused, "model.options.patch_size", "9")
