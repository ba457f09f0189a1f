"""Generated training images join the classes and the size of the dataset, or are refused."""

from pathlib import Path

import numpy as np
import pytest

from components.core.errors import CasemateError
from components.data.fitting import Fitting
from components.data.settings import DataSettings
from components.data.shards import ShardRecord, plan_shards
from components.data.sources.labels import match_classes
from pipelines.recipe.schema.recipe import Recipe
from pipelines.stages.prepare import stage as prepare


def write(path: Path, *, names: list[str] | None, num_classes: int, side: int = 8) -> str:
    labels = np.arange(10 * num_classes) % num_classes
    images = np.zeros((len(labels), side, side, 3), np.uint8) + labels[:, None, None, None] * 10
    named = {} if names is None else {"classes": np.array(names)}
    np.savez(path, images=images.astype(np.uint8), labels=labels, **named)
    return str(path)


def section(real: str, made: str, **changes) -> DataSettings:
    data = {"source": "npz", "path": real, "synthetic": {"source": "npz", "path": made}, **changes}
    return Recipe.model_validate({"name": "test", "data": data}).data


def generated_classes(data: DataSettings) -> set[tuple[str, str]]:
    """(class as generated, class in the dataset) of all generated items."""
    source, generated = prepare.open_sources(data)
    assert generated is not None
    theirs = {e.item_id: generated.classes[e.label] for e in generated.entries()}
    entries = prepare.list_splits(data, source, generated)[prepare.SYNTHETIC]
    return {
        (theirs[e.item_id.removeprefix("synthetic-")], source.classes[e.label]) for e in entries
    }


def test_named_classes_are_matched_by_name(tmp_path):
    real = write(tmp_path / "real.npz", names=["ant", "bee", "cat"], num_classes=3)
    made = write(tmp_path / "made.npz", names=["cat", "ant"], num_classes=2)
    assert generated_classes(section(real, made)) == {("cat", "cat"), ("ant", "ant")}


def test_plain_numbers_are_positions(tmp_path):
    real = write(tmp_path / "real.npz", names=["ant", "bee", "cat"], num_classes=3)
    made = write(tmp_path / "made.npz", names=None, num_classes=2)
    assert generated_classes(section(real, made)) == {("0", "ant"), ("1", "bee")}


def test_numbers_mean_themselves_in_whatever_order_folders_list_them():
    names = tuple(sorted(str(number) for number in range(12)))  # "10" comes before "2"
    classes = tuple("abcdefghijkl")
    assert match_classes(names, classes=classes, key="k") == [int(name) for name in names]
    assert match_classes(names, classes=names, key="k") == list(range(12))


def test_an_unknown_name_is_refused(tmp_path):
    real = write(tmp_path / "real.npz", names=["ant", "bee"], num_classes=2)
    made = write(tmp_path / "made.npz", names=["ant", "wasp"], num_classes=2)
    with pytest.raises(CasemateError, match="class wasp is not one of the 2: ant, bee") as caught:
        prepare.open_sources(section(real, made))
    assert caught.value.key == "data.synthetic.source"


def open_jobs(data: DataSettings, folder: Path):
    source, generated = prepare.open_sources(data)
    plans = plan_shards(prepare.list_splits(data, source, generated), shard_size=100)
    fitting = Fitting(data.image_size, data.fit, data.channels, data.resize)
    return prepare.open_jobs(data, source, generated, plans, fitting=fitting, folder=folder)


def test_generated_images_of_another_size_are_named(tmp_path):
    real = write(tmp_path / "real.npz", names=None, num_classes=2)
    made = write(tmp_path / "made.npz", names=None, num_classes=2, side=12)
    with pytest.raises(CasemateError, match=r"synthetic-npz-\d+ is 12x12 while npz-\d+ is 8x8"):
        open_jobs(section(real, made), tmp_path)
    jobs = open_jobs(section(real, made, image_size=16), tmp_path)
    assert {job.shape for job in jobs.values()} == {(16, 16, 3)}


def test_a_split_whose_images_were_all_skipped_is_named():
    whole = [ShardRecord(f"{s}.parquet", s, "", ["d"], [0]) for s in ("train", "val", "test")]
    prepare._check_after_skipping(whole, classes=("a",))
    skipped = [*whole[:2], ShardRecord("test.parquet", "test", "", [], [])]
    with pytest.raises(CasemateError, match="the test split is empty"):
        prepare._check_after_skipping(skipped, classes=("a",))
