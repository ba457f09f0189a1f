"""Parquet files, the hub of Hugging Face, and whose split is whose."""

import io
import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from components.core.errors import CasemateError
from components.data.sources import huggingface, open_source
from components.data.sources.base import UndecodableItemError
from components.data.sources.splitting import split_hints


def pixels_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels_of(seed)).save(buffer, format="PNG")
    return buffer.getvalue()


def write_table(
    path: Path, labels: list, *, start: int = 0, struct: bool = False, names: list | None = None
) -> None:
    images: list[Any] = [png(start + i) for i in range(len(labels))]
    if struct:
        images = [{"bytes": content, "path": "x.png"} for content in images]
    table = pa.table({"image": images, "label": labels})
    if names:
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        note = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": note})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)


# -- splits


def test_usual_words_are_understood_and_foreign_ones_asked_about():
    assert split_hints(["train", "validation", "test"], None) == {
        "train": "train",
        "validation": "val",
        "test": "test",
    }
    assert split_hints(["data"], None) == {}
    with pytest.raises(CasemateError, match="not understood: unsupervised"):
        split_hints(["train", "unsupervised"], None)
    chosen = {"train": "train", "test": "validation"}
    assert split_hints(["train", "validation", "test"], chosen) == {
        "train": "train",
        "validation": "test",
    }


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"train": "learn"}, "learn does not exist; choose from test, train"),
        ({"learn": "train"}, "learn is not a split"),
        ({"train": "train", "test": "train"}, "a different source for each split"),
        ({}, "a different source for each split"),
    ],
)
def test_wrong_choices_of_splits(chosen, message):
    with pytest.raises(CasemateError, match=message):
        split_hints(["train", "test"], chosen)


# -- Parquet


def parquet_splits(root: Path, files: list[str], **options: Any) -> dict[str, str | None]:
    for number, file in enumerate(files):
        write_table(root / f"{file}.parquet", [0, 1], start=2 * number)
    entries = open_source("parquet", path=str(root), options=options).entries()
    return {e.locator.split(".parquet")[0]: e.split_hint for e in entries}


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train_0", "test_0"),
        ("train0", "test0"),
        ("cifar10-train", "cifar10-test"),
        ("cifar10.train.v2", "cifar10.test.v2"),
        ("Train", "TEST"),
        ("training", "testing"),
        ("my_train_data/0", "my_test_data/0"),
        ("dev/train", "dev/test"),  # the nearest word decides
    ],
)
def test_split_words_are_found_wherever_they_stand(tmp_path, train, test):
    assert parquet_splits(tmp_path, [train, test]) == {train: "train", test: "test"}


@pytest.mark.parametrize(
    ("files", "strange"),
    [
        (["trainset", "testset"], "testset, trainset"),
        (["cifar10_trainset_0", "cifar10_testset_0"], "testset, trainset"),
        (["trainset/0", "testset/0"], "testset, trainset"),
        (["cifar-train-test"], "cifar-train-test"),
        (["train", "extra"], "extra"),
    ],
)
def test_a_half_understood_split_is_asked_about(tmp_path, files, strange):
    with pytest.raises(CasemateError, match=f"must be set.*not understood: {strange}$") as caught:
        parquet_splits(tmp_path, files)
    assert caught.value.key == "data.options.splits"


def test_a_strange_name_can_be_chosen(tmp_path):
    chosen = {"train": "trainset", "test": "testset"}
    files = ["cifar10_trainset_0", "cifar10_testset_0"]
    assert parquet_splits(tmp_path, files, splits=chosen) == dict(
        zip(files, ["train", "test"], strict=True)
    )


def test_names_without_a_split_word_are_one_set(tmp_path):
    assert parquet_splits(tmp_path, ["part_0", "latest", "contest-1"]) == {
        "part_0": None,
        "latest": None,
        "contest-1": None,
    }


@pytest.mark.parametrize("others", [["dog", "cat"], ["cat"], ["cat", "dog", "elk"], None])
def test_class_names_must_agree_between_files(tmp_path, others):
    write_table(tmp_path / "train-0.parquet", [0, 0], names=["cat", "dog"])
    write_table(tmp_path / "test-0.parquet", [0, 0], names=others)
    with pytest.raises(CasemateError, match=r"class . .* and test-0\.parquet calls it") as caught:
        open_source("parquet", path=str(tmp_path))
    assert caught.value.key == "data.path"
    options = {"classes": ["a", "b"]}
    if others is None:  # one file is silent: what the user says holds for both
        source = open_source("parquet", path=str(tmp_path), options=options)
        assert source.classes == ("a", "b")
    else:
        with pytest.raises(CasemateError, match="write all files with the same classes"):
            open_source("parquet", path=str(tmp_path), options=options)


def test_numbers_in_one_file_and_names_in_another(tmp_path):
    write_table(tmp_path / "train-0.parquet", [0, 1])
    write_table(tmp_path / "test-0.parquet", ["a", "b"])
    with pytest.raises(CasemateError, match=r"test-0\.parquet has named labels, .*train-0"):
        open_source("parquet", path=str(tmp_path))
    options = {"classes": ["a", "b"]}
    entries = open_source("parquet", path=str(tmp_path), options=options).entries()
    assert [e.label for e in entries] == [0, 1, 0, 1]


@pytest.mark.parametrize("struct", [False, True])
def test_parquet_by_split_with_bytes_or_structs(tmp_path, struct):
    files = ["data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"]
    for number, file in enumerate(files):
        write_table(
            tmp_path / f"{file}.parquet",
            [0, 1, 2, 1, 0],
            start=10 * number,
            struct=struct,
            names=["ape", "bee", "cat"],
        )
    source = open_source("parquet", path=str(tmp_path))
    entries = source.entries()
    assert source.classes == ("ape", "bee", "cat")
    assert not source.test_only
    assert [e.split_hint for e in entries] == ["test"] * 5 + ["train"] * 10
    assert [e.label for e in entries] == [0, 1, 2, 1, 0] * 3
    assert len({e.item_id for e in entries}) == 15
    copy = pickle.loads(pickle.dumps(source))
    seeds = [*range(20, 25), *range(5), *range(10, 15)]
    for entry, seed in zip(entries, seeds, strict=True):
        assert np.array_equal(copy.decode(entry), pixels_of(seed))


def test_parquet_splits_by_folder_and_by_choice(tmp_path):
    for split in ("train", "validation", "test"):
        write_table(tmp_path / split / "0000.parquet", [-1, -1] if split == "test" else [0, 1])
    with pytest.raises(CasemateError, match="label -1 at 0"):
        open_source("parquet", path=str(tmp_path)).entries()
    options = {"splits": {"train": "train", "test": "validation"}}
    entries = open_source("parquet", path=str(tmp_path), options=options).entries()
    assert [(e.item_id, e.split_hint) for e in entries] == [
        ("parquet-train/0000.parquet-00000", "train"),
        ("parquet-train/0000.parquet-00001", "train"),
        ("parquet-validation/0000.parquet-00000", "test"),
        ("parquet-validation/0000.parquet-00001", "test"),
    ]


def test_one_parquet_file_with_named_labels(tmp_path):
    write_table(tmp_path / "birds.parquet", ["wren", "owl", "owl"])
    source = open_source("parquet", path=str(tmp_path / "birds.parquet"))
    assert source.classes == ("owl", "wren")
    assert [(e.label, e.split_hint) for e in source.entries()] == [(1, None), (0, None), (0, None)]


def test_parquet_of_test_items_alone(tmp_path):
    write_table(tmp_path / "test.parquet", [0, 1])
    assert open_source("parquet", path=str(tmp_path)).test_only


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([0, 1], {"image_column": "picture"}, "picture is not a column of .*; there are image"),
        ([0, 1], {"image_column": "label"}, "holds int64"),
        ([0.5, 1.5], {}, "is double"),
        ([0, None], {}, "1 gaps"),
        ([0, 2], {"classes": ["a", "b"]}, "label 2 at 1, but there are 2 classes"),
        (["a", "c"], {"classes": ["a", "b"]}, "label 'c' at 1, which is not a class"),
        ([0, 1], {"classes": ["a", "a"]}, "twice"),
        ([0, 1], {"classes": [True, False]}, "list of strings"),
    ],
)
def test_bad_parquet_is_explained(tmp_path, labels, options, message):
    write_table(tmp_path / "a.parquet", labels)
    with pytest.raises(CasemateError, match=message):
        open_source("parquet", path=str(tmp_path), options=options).entries()


def test_damaged_and_missing_parquet_are_named(tmp_path):
    with pytest.raises(CasemateError, match="neither a Parquet file"):
        open_source("parquet", path=str(tmp_path))
    write_table(tmp_path / "a.parquet", [0, 1])
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-4])
    with pytest.raises(CasemateError, match=r"a\.parquet is not a readable") as caught:
        open_source("parquet", path=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_one_undecodable_row_is_that_items_fault(tmp_path):
    table = pa.table({"image": [b"no image", None, png(5)], "label": [0, 1, 1]})
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_source("parquet", path=str(tmp_path))
    entries = source.entries()
    for entry in entries[:2]:
        with pytest.raises(UndecodableItemError, match=entry.item_id):
            source.decode(entry)
    assert np.array_equal(source.decode(entries[2]), pixels_of(5))


def test_parquet_replaced_between_listing_and_decoding_is_noticed(tmp_path):
    write_table(tmp_path / "a.parquet", [0, 1])
    source = open_source("parquet", path=str(tmp_path))
    entry = source.entries()[0]
    write_table(tmp_path / "a.parquet", [0, 1, 1], start=9)
    with pytest.raises(CasemateError, match="changed"):
        source.decode(entry)


# -- Hugging Face


@pytest.mark.parametrize("found", [None, types.ModuleType("datasets")])
def test_without_the_package_one_line_says_what_to_install(monkeypatch, found):
    """None makes the import fail as it does where the package is not installed; an empty module
    is what a folder called `datasets` beside the program looks like."""
    huggingface._load.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", found)
    with pytest.raises(CasemateError) as caught:
        open_source("hf:beans", path=None)
    assert str(caught.value) == (
        "data.source: hf:beans needs the package datasets; run: pip install 'casemate[hf]'"
    )


class FakeSplit:
    """As much of `datasets.Dataset` as the adapter touches."""

    def __init__(self, rows: list[dict], features: dict, raw: bool = False) -> None:
        self.rows, self.features, self.raw = rows, features, raw
        self._fingerprint = f"print-{len(rows)}"

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [row[key] for row in self.rows]
        assert self.raw, "images must be asked for undecoded"
        return self.rows[key]

    def cast_column(self, name: str, feature: Any) -> "FakeSplit":
        assert feature == ("Image", False)
        return FakeSplit(self.rows, self.features, raw=True)


@pytest.fixture
def hub(monkeypatch, tmp_path) -> dict:
    """A module `datasets` with one dataset; the calls it received are kept."""
    (tmp_path / "leaf.png").write_bytes(png(3))
    label = types.SimpleNamespace(names=["healthy", "rust"])
    images = [
        {"bytes": png(1), "path": None},
        {"bytes": None, "path": str(tmp_path / "leaf.png")},
        {"bytes": None, "path": None},
    ]
    rows = [{"image": image, "label": i % 2} for i, image in enumerate(images)]
    features = {"image": object(), "label": label}
    splits = {
        "test": FakeSplit(rows[:1], features),
        "train": FakeSplit(rows, features),
        "validation": FakeSplit(rows[1:2], features),
    }
    calls: dict = {"splits": splits}

    def load_dataset(path: str, name: str | None, *, revision: str | None, cache_dir: str | None):
        if path == "nowhere":
            raise ConnectionError("no route\nto the hub")
        calls["load"] = (path, name, revision, cache_dir)
        return splits

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    module.Image = lambda decode: ("Image", decode)
    monkeypatch.setitem(sys.modules, "datasets", module)
    for cached in (huggingface._load, huggingface._undecoded):
        cached.cache_clear()
    yield calls
    for cached in (huggingface._load, huggingface._undecoded):
        cached.cache_clear()


def test_hub_dataset_becomes_entries(hub, tmp_path):
    options = {"config": "small", "revision": "v1"}
    source = open_source("hf:someone/beans", path=str(tmp_path), options=options)
    assert hub["load"] == ("someone/beans", "small", "v1", str(tmp_path))
    assert source.classes == ("healthy", "rust")
    entries = source.entries()
    assert [(e.item_id, e.label, e.split_hint, e.version) for e in entries] == [
        ("hf-someone/beans-train-00000", 0, "train", "print-3"),
        ("hf-someone/beans-train-00001", 1, "train", "print-3"),
        ("hf-someone/beans-train-00002", 0, "train", "print-3"),
        ("hf-someone/beans-validation-00000", 1, "val", "print-1"),
        ("hf-someone/beans-test-00000", 0, "test", "print-1"),
    ]
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(copy.decode(entries[0]), pixels_of(1))
    assert np.array_equal(copy.decode(entries[1]), pixels_of(3))
    with pytest.raises(UndecodableItemError, match="train-00002 has neither"):
        copy.decode(entries[2])


def test_hub_dataset_without_class_names_and_with_chosen_splits(hub):
    hub["splits"]["train"].features["label"] = object()
    options = {"splits": {"test": "train"}}
    source = open_source("hf:beans", path=None, options=options)
    assert source.classes == ("0", "1")
    assert source.test_only
    assert {e.split_hint for e in source.entries()} == {"test"}


def test_hub_mistakes_are_one_line(hub):
    with pytest.raises(CasemateError, match=r"hf:nowhere cannot be loaded \(no route\)"):
        open_source("hf:nowhere", path=None)
    with pytest.raises(CasemateError, match="img is not a column of beans; there are image, label"):
        open_source("hf:beans", path=None, options={"image_column": "img"})
    hub["splits"]["train"].rows[0]["label"] = 2
    with pytest.raises(CasemateError, match="label 2 at 0, but there are 2 classes"):
        open_source("hf:beans", path=None).entries()
    hub["splits"]["train"].rows[0]["label"] = -1
    with pytest.raises(CasemateError, match="label -1 at 0"):
        open_source("hf:beans", path=None).entries()
