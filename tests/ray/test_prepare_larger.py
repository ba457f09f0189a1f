"""Prepare and stream beyond the plain case: larger images, generated ones, little memory."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from components.core.errors import CasemateError
from components.data.fitting import Fitting
from components.data.prepared import PreparedDataset
from components.data.sources import open_source
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.streams import Batch, dataset_statistics, ordered_ray_data, read_split
from pipelines.stages.prepare import stage as prepare
from pipelines.stages.prepare.stage import SYNTHETIC
from tests.e2e.cli import wait_until
from tests.ray.test_prepare import shard_bytes

pytestmark = pytest.mark.ray
ROOT = Path(__file__).resolve().parents[2]


def run_prepare(folder: Path, **data) -> PreparedDataset:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe.model_validate({"name": "test", "data": {**data, "split_seed": 7}})
    prepare.run(recipe, {}, StageDir(folder, "prepare", "", None))
    return PreparedDataset.open(folder)


def random_images(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def with_generated(tmp_path) -> dict[str, object]:
    """Sixty wide images of three classes, and a hundred generated ones without class names."""
    real, made, labels = tmp_path / "real.npz", tmp_path / "made.npz", np.arange(60) % 3
    names = np.array(["a", "b", "c"])
    np.savez(real, images=random_images(60, 20, 30, 3, seed=0), labels=labels, classes=names)
    np.savez(made, image=random_images(100, 24, 24, 3, seed=1), label=np.arange(100) % 3)
    return {
        "source": "npz",
        "path": str(real),
        "image_size": 8,
        "fit": "crop",
        "resize": 10,
        "train_size": 12,
        "synthetic": {"source": "npz", "path": str(made)},
        "limits": {SYNTHETIC: 90},
        "shard_size": 16,
    }


def test_training_images_are_stored_larger_and_joined_by_generated_ones(
    ray_session, tmp_path, with_generated
):
    dataset = run_prepare(tmp_path / "out", **with_generated)
    assert dataset.splits == {"train": 42, "val": 6, "test": 12, SYNTHETIC: 90}
    small, large = (8, 8), (12, 12)
    assert dataset.sides == {"train": large, "val": small, "test": small, SYNTHETIC: large}
    assert (dataset.height, dataset.width) == small

    origins = {
        "train": (open_source("npz", path=with_generated["path"]), Fitting(12, "crop")),
        "test": (open_source("npz", path=with_generated["path"]), Fitting(8, "crop", None, 10)),
        SYNTHETIC: (
            open_source("npz", path=with_generated["synthetic"]["path"]),
            Fitting(12, "crop"),
        ),
    }
    for split, (source, fitting) in origins.items():
        stored = dataset.load(split)
        by_id = {entry.item_id: entry for entry in source.entries()}
        for row, item_id in enumerate(stored.item_ids):
            entry = by_id[item_id.removeprefix(f"{SYNTHETIC}-")]
            expected = fitting.apply(source.decode(entry), item_id=item_id)
            assert np.array_equal(stored.images[row].permute(1, 2, 0).numpy(), expected)
            assert stored.labels[row] == entry.label
    made = dataset.load(SYNTHETIC)
    assert np.bincount(made.labels).tolist() == [30, 30, 30]
    assert not set(made.item_ids) & set(dataset.load("train").item_ids)

    check_streams(tmp_path / "out", dataset)
    for shard_size in (1000, 7):
        again = run_prepare(
            tmp_path / f"by {shard_size}", **with_generated | {"shard_size": shard_size}
        )
        assert again.digest == dataset.digest
        assert dataset_statistics(tmp_path / f"by {shard_size}", "train") == dataset_statistics(
            tmp_path / "out", "train"
        )


def image_batches(folder: Path, split: str, *, batch_size: int) -> Iterator[Batch]:
    """Batches of a split in stored order."""
    with ordered_ray_data():
        yield from read_split(folder, split).iter_batches(batch_size=batch_size)


def check_streams(folder: Path, dataset: PreparedDataset) -> None:
    """Streams give every item once in stored order, and exact statistics."""
    whole = dataset.load("train")
    batches = list(image_batches(folder, "train", batch_size=10))
    assert [len(batch["label"]) for batch in batches] == [10, 10, 10, 10, 2]
    assert [i for batch in batches for i in batch["item_id"]] == list(whole.item_ids)
    assert np.array_equal(np.concatenate([b["image"] for b in batches]), whole.images.numpy())
    assert np.array_equal(np.concatenate([b["label"] for b in batches]), whole.labels.numpy())
    found = dataset_statistics(folder, "train")
    pixels = whole.images.numpy().astype(np.float64) / 255
    assert found["num_items"] == 42
    assert list(found["class_counts"].items()) == [("a", 14), ("b", 14), ("c", 14)]
    assert found["channel_mean"] == pytest.approx(pixels.mean(axis=(0, 2, 3)), abs=1e-12)
    assert found["channel_std"] == pytest.approx(pixels.std(axis=(0, 2, 3)), abs=1e-12)

    shard = folder / "train-00001.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CasemateError, match=r"train-00001\.parquet is damaged") as caught:
        dataset_statistics(folder, "train")
    assert "\n" not in str(caught.value)  # one line, whatever Ray made of it on the way
    shard.write_bytes(content)
    with pytest.raises(CasemateError, match="dev is not one of train, val, test, synthetic"):
        dataset_statistics(folder, "dev")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fit": "pad", "resize": None, "image_size": 64, "train_size": 64},
            r"data\.train_size: 64 needs data\.fit",
        ),
        ({"train_size": 7}, r"data\.train_size: 7 is below data\.image_size 8"),
        ({"synthetic": {"source": "digits"}}, r"data\.synthetic\.source: digits has 10 classes"),
    ],
)
def test_what_does_not_fit_together_is_named(
    ray_session, tmp_path, with_generated, changes, message
):
    with pytest.raises(CasemateError, match=message):
        run_prepare(tmp_path / "out", **with_generated | {"limits": {}} | changes)
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_generated_images_of_other_channels_are_named(ray_session, tmp_path, with_generated):
    grey = tmp_path / "grey.npz"
    np.savez(grey, image=random_images(20, 24, 24, seed=1), label=np.arange(20) % 3)
    data = with_generated | {"synthetic": {"source": "npz", "path": str(grey)}, "limits": {}}
    with pytest.raises(CasemateError, match=r"synthetic-npz-\d+ has 1 channels") as caught:
        run_prepare(tmp_path / "out", **data)
    assert caught.value.key == "data.channels"
    assert run_prepare(tmp_path / "grey", **data, channels=3).channels == 3


def test_sources_for_evaluation_alone_can_be_prepared(ray_session, tmp_path):
    root = tmp_path / "v2"
    for label in (0, 2, 10):
        (root / str(label)).mkdir(parents=True)
        for number in range(2):
            image = Image.fromarray(random_images(10, 14, 3, seed=label + number))
            image.save(root / str(label) / f"{number}.jpeg")
    data = {"source": "imagenet_v2", "path": str(root), "image_size": 8, "fit": "crop"}
    data["options"] = {"subset": True}
    dataset = run_prepare(tmp_path / "out", **data)
    assert dataset.splits == {"train": 0, "val": 0, "test": 6}
    assert sorted(dataset.load("test").labels.tolist()) == [0, 0, 2, 2, 10, 10]
    with pytest.raises(CasemateError, match=r"data\.train_size: 9 does not apply"):
        run_prepare(tmp_path / "larger", **data, train_size=9)


# -- little memory

SIDE, NUM_IMAGES = 448, 500  # decoded: 301 MB
STORE_MB = 80  # the least that Ray accepts is 75

SCRIPT = """
import json, sys
from pathlib import Path

import ray
from ray._private.internal_api import memory_summary

from pipelines.runtime.cluster import ray_cluster
from pipelines.runtime.streams import dataset_statistics
from pipelines.recipe.schema.place import ClusterSection
from tests.ray.test_prepare_larger import image_batches, run_prepare

root, data = Path(sys.argv[1]), json.loads(sys.argv[2])
with ray_cluster(ClusterSection(num_cpus=2, object_store_mb=int(sys.argv[3]))):
    run_prepare(root, **data)
    ids, num_bytes = [], 0
    for batch in image_batches(root, "train", batch_size=16):
        ids += batch["item_id"].tolist()
        num_bytes += batch["image"].nbytes
    statistics = dataset_statistics(root, "train")
    address = ray.get_runtime_context().gcs_address
    summary = memory_summary(address, stats_only=True)
print(json.dumps([ids, num_bytes, statistics, summary]))
"""


def kill_when_two_shards_are_done(command: list[str], out: Path, **place) -> dict[str, int]:
    """SIGKILL in the middle; the shards that were finished, and when they were written."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **place
    )
    try:
        wait_until(lambda: len(list(out.glob("*.record.json"))) >= 2 or process.poll() is not None)
        assert process.poll() is None, "ended before it could be killed"
    finally:
        process.kill()
        process.wait()
    assert not (out / "dataset.json").exists()
    records = out.glob("*.record.json")  # written after their shard, so these are whole
    names = [path.name.removesuffix(".record.json") for path in records]
    return {name: (out / name).stat().st_mtime_ns for name in names}


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_dataset_several_times_the_object_store_is_prepared_and_streamed(tmp_path):
    """In a process of its own, because the session's Ray has a larger store; and killed once."""
    root, out = tmp_path / "images", tmp_path / "out"
    for label in range(2):
        (root / str(label)).mkdir(parents=True)
        for number in range(NUM_IMAGES // 2):
            colour = (label * 200, number % 256, number // 256)
            Image.new("RGB", (4, 4), colour).save(root / str(label) / f"{number:04d}.png")
    data = {
        "source": "folder",
        "path": str(root),
        "image_size": SIDE,
        "fit": "resize",
        "shard_size": 64,
        "val_fraction": 0.01,
        "test_fraction": 0.01,
    }
    command = [sys.executable, "-c", SCRIPT, str(out), json.dumps(data), str(STORE_MB)]
    place = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    kept = kill_when_two_shards_are_done(command, out, **place)
    found = subprocess.run(command, capture_output=True, text=True, check=False, **place)
    assert found.returncode == 0, found.stderr
    ids, num_bytes, statistics, summary = json.loads(found.stdout)
    assert "Spilled" not in summary, summary  # nothing had to leave memory
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    dataset = PreparedDataset.open(out)
    assert num_bytes == dataset.splits["train"] * SIDE * SIDE * 3 > 3 * STORE_MB * 2**20
    assert ids == [
        i for s in range(0, len(ids), 64) for i in dataset.lazy("train").span(s, s + 64).item_ids
    ]
    numbers = [int(i.split("/")[1][:4]) for i in ids]
    labels = [int(i.split("/")[0].removeprefix("folder-")) for i in ids]
    colours = np.array([[200 * k, n % 256, n // 256] for k, n in zip(labels, numbers, strict=True)])
    assert statistics["channel_mean"] == pytest.approx(colours.mean(axis=0) / 255, abs=1e-12)
    assert statistics["channel_std"] == pytest.approx(colours.std(axis=0) / 255, abs=1e-12)
    assert len(shard_bytes(out)) == 10
