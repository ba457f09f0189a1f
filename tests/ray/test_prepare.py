"""Stage prepare on Ray Data: same bytes however work is laid out, resumable, clear on bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from components.core.errors import CasemateError
from components.data.prepared import PreparedDataset
from components.data.sources import open_source
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.storage import SCRATCH
from pipelines.stages.prepare import stage as prepare
from tests.serial_shards import shard_bytes, write_serially

pytestmark = pytest.mark.ray


def run_prepare(folder: Path, **data) -> PreparedDataset:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe.model_validate({"name": "test", "data": {**data, "split_seed": 7}})
    prepare.run(recipe, {}, StageDir(folder, "prepare", "", None))
    return PreparedDataset.open(folder)


def write_images(root: Path, *, per_class: int) -> None:
    rng = np.random.default_rng(0)
    for name in ("cat", "Hünd 2"):
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")


def test_workers_write_what_one_process_would(ray_session, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 6, 5, 3), dtype=np.uint8), np.arange(60) % 3
    path = tmp_path / "a file.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:9], y_test=y[:9], classes=np.array(list("abc")))
    data = {"source": "npz", "path": str(path), "image_size": 8, "limits": {"train": 30}}
    dataset = run_prepare(tmp_path / "by ray", **data, shard_size=8)

    serial = tmp_path / "serial"
    write_serially(open_source("npz", path=str(path)), serial, train=30)
    assert shard_bytes(tmp_path / "by ray") == shard_bytes(serial)
    assert dataset.splits == {"train": 30, "val": 6, "test": 9}

    train = dataset.load("train")
    for row, item_id in enumerate(train.item_ids):
        original = x[int(item_id.removeprefix("npz-train-"))]
        stored = train.images[row].permute(1, 2, 0).numpy()
        assert np.array_equal(stored[1:7, 1:6], original)  # centred in 8 x 8
    assert {p.name for p in (tmp_path / "by ray").iterdir()} == {
        SCRATCH,
        "dataset.json",
        *shard_bytes(serial),
    }
    other_layout = run_prepare(tmp_path / "large shards", **data, shard_size=1000)
    assert other_layout.digest == dataset.digest


def test_bad_image_fails_with_its_name_and_mending_it_resumes(ray_session, tmp_path):
    root, folder = tmp_path / "phötos here", tmp_path / "out"
    write_images(root, per_class=10)
    data = {"source": "folder", "path": str(root), "shard_size": 3}
    whole = run_prepare(tmp_path / "reference", **data)

    last = whole.load("test").item_ids[-1]  # planned last, so that other shards come first
    bad = root / last.removeprefix("folder-")
    content = bad.read_bytes()
    bad.write_bytes(content[:60])
    with pytest.raises(CasemateError, match="is not a readable image") as caught:
        run_prepare(folder, **data)
    assert (caught.value.key, caught.value.value) == ("data.path", str(bad))
    assert "Ray" not in str(caught.value)
    assert not (folder / "dataset.json").exists()

    records = folder.glob("*.record.json")  # written after their shard, so these are whole
    names = [path.name.removesuffix(".record.json") for path in records]
    kept = {name: (folder / name).stat().st_mtime_ns for name in names}
    assert kept
    bad.write_bytes(content)
    (folder / ".train-00000.parquet.dead.tmp").write_bytes(b"part of a killed start")
    resumed = run_prepare(folder, **data)
    assert {name: (folder / name).stat().st_mtime_ns for name in names} == kept
    assert resumed.digest == whole.digest
    assert shard_bytes(folder) == shard_bytes(tmp_path / "reference")
    assert [p.name for p in folder.iterdir() if p.suffix not in (".parquet", ".json")] == [SCRATCH]


def test_skipped_images_are_counted_and_named(ray_session, tmp_path):
    root = tmp_path / "images"
    write_images(root, per_class=10)
    (root / "cat" / "3.png").write_bytes(b"no image")
    data = {"source": "folder", "path": str(root), "on_error": "skip"}
    dataset = run_prepare(tmp_path / "out", **data)
    assert sum(dataset.splits.values()) == 19
    page = json.loads((tmp_path / "out" / "dataset.json").read_text(encoding="utf-8"))
    assert [item["item_id"] for item in page["skipped"]] == ["folder-cat/3.png"]

    for path in (root / "cat").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(CasemateError, match="class cat has no training item"):
        run_prepare(tmp_path / "empty class", **data)


def test_embedded_digits_travel_with_their_pixels(ray_session, tmp_path):
    dataset = run_prepare(
        tmp_path / "out", source="digits", channels=3, limits={"train": 50, "val": 10, "test": 20}
    )
    assert dataset.splits == {"train": 50, "val": 10, "test": 20}
    assert (dataset.channels, dataset.height, dataset.width) == (3, 8, 8)
    source = open_source("digits", path=None)
    by_id = {entry.item_id: entry for entry in source.entries()}
    split = dataset.load("test")
    for item_id, image, label in zip(split.item_ids, split.images, split.labels, strict=True):
        assert np.array_equal(image[1].numpy(), source.decode(by_id[item_id])[..., 0])
        assert label == by_id[item_id].label
