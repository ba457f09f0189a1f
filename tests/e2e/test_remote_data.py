"""Raw images on an object store, prepared by Ray's workers into a local storage."""

import json

import numpy as np
import pytest
from PIL import Image

from components.data.fitting import Fitting
from components.data.shards import plan_shards, write_shard
from pipelines.recipe.schema.recipe import Recipe
from pipelines.stages.prepare import stage as prepare
from tests.e2e.cli import mistake_of, step_folder, write_recipe
from tests.object_server import object_server

pytestmark = pytest.mark.e2e


def write_raw(root):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / "images" / name).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "images" / name / f"{number}.png")
    made = rng.integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    np.savez_compressed(
        root / "made.npz", images=made, labels=np.arange(12) % 2, classes=np.array(["cat", "dog"])
    )


def shards_of_files(root, folder) -> dict[str, bytes]:
    """What the stage writes from files, by its own functions and without Ray."""
    data = recipe_of("local", root).data
    source, generated = prepare.open_sources(data)
    plans = plan_shards(prepare.list_splits(data, source, generated), shard_size=data.shard_size)
    fitting = Fitting(data.image_size, data.fit, data.channels, data.resize)
    jobs = prepare.open_jobs(data, source, generated, plans, fitting=fitting, folder=folder)
    for plan in plans:
        write_shard(jobs[plan.split], plan)
    return shard_bytes(folder)


def shard_bytes(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def recipe_of(name: str, root: object) -> Recipe:
    made = {"source": "npz", "path": f"{root}/made.npz"}
    data = {"source": "folder", "path": f"{root}/images", "synthetic": made, "shard_size": 7}
    return Recipe.model_validate({"name": name, "data": data})


def test_prepare_from_objects_gives_the_shards_of_files(tmp_path, cli):
    write_raw(tmp_path / "raw")
    (tmp_path / "local").mkdir()
    with object_server() as server:
        uri = server.upload(tmp_path / "raw", "set")
        recipe = write_recipe(tmp_path / "remote.yaml", recipe_of("remote", uri).resolved())
        result = cli("prepare", recipe, "--storage", tmp_path / "storage", env=server.env)
        assert result.code == 0, result.err
        folder = step_folder(tmp_path / "storage", "prepare")
        assert shard_bytes(folder) == shards_of_files(tmp_path / "raw", tmp_path / "local")
        assert len(shard_bytes(folder)) > 5
        document = json.loads((folder / "dataset.json").read_text())
        assert document["source"]["path"] == f"{uri}/images"

        lost = f"{uri}/nothing"
        line = mistake_of("prepare", recipe, "--storage", tmp_path, "--set", f"data.path={lost}")
        remedy = "holds no objects; correct the URI or upload the files there"
        assert line == f"data.path: {lost} {remedy}"
