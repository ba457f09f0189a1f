"""CIFAR from its python batches: the published layout, old pickles, and nothing that runs code."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from components.core.errors import CasemateError
from components.data.sources import open_source


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


CIFAR10_NAMES = ["aeroplane", *(f"class {number}" for number in range(1, 10))]


def write_cifar10(root: Path, *, protocol: int = 2) -> np.ndarray:
    """Six tiny batches in the published layout; returns (12, 32, 32, 3), two images per batch."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    images = random_pixels(12, 32, 32, 3)
    files = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for number, file in enumerate(files):
        pair = images[2 * number : 2 * number + 2]
        batch = {
            "batch_label": file,
            "labels": [number % 2, 1 - number % 2],
            "data": pair.transpose(0, 3, 1, 2).reshape(2, 3072),
            "filenames": ["x.png", "y.png"],
        }
        (folder / file).write_bytes(pickle.dumps(batch, protocol=protocol))
    meta = {"label_names": CIFAR10_NAMES, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=protocol))
    return images


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_cifar10_batches(tmp_path, protocol):
    images = write_cifar10(tmp_path, protocol=protocol)
    source = open_source("torchvision:cifar10", path=str(tmp_path))
    entries = source.entries()
    assert source.classes == tuple(CIFAR10_NAMES)
    assert [e.split_hint for e in entries] == ["train"] * 10 + ["test"] * 2
    assert (entries[9].item_id, entries[10].item_id) == (
        "cifar10-train-00009",
        "cifar10-test-00000",
    )
    assert [e.label for e in entries[:4]] == [0, 1, 1, 0]
    for index in (0, 7, 11):
        assert np.array_equal(source.decode(entries[index]), images[index])


def test_cifar_reads_pickles_of_python_2(tmp_path):
    """Python 2 wrote str as bytes and numpy under its old module name; this is such a stream."""
    write_cifar10(tmp_path)
    data = random_pixels(1, 3072, seed=5)
    stream = (
        b"(dp0\nS'data'\ncnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
        b"(I1\n(I1\nI3072\ntcnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\n"
        b"T\x00\x0c\x00\x00" + data.tobytes() + b"tbsS'labels'\n(lI1\nas."
    )
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(stream)
    source = open_source("torchvision:cifar10", path=str(tmp_path))
    entry = source.entries()[-1]
    assert (entry.item_id, entry.label) == ("cifar10-test-00000", 1)
    assert np.array_equal(source.decode(entry).transpose(2, 0, 1).reshape(1, -1), data)


def test_cifar100_uses_fine_labels(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    batch = {"data": random_pixels(2, 3072), "fine_labels": [1, 2], "coarse_labels": [0, 0]}
    for file in ("train", "test"):
        (folder / file).write_bytes(pickle.dumps(batch, protocol=2))
    names = [f"fine {number}" for number in range(100)]
    meta = {"fine_label_names": names, "coarse_label_names": ["w"]}
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    source = open_source("torchvision:cifar100", path=str(tmp_path))
    assert source.classes == tuple(names)
    assert [(e.item_id, e.label) for e in source.entries()[1:3]] == [
        ("cifar100-train-00001", 2),
        ("cifar100-test-00000", 1),
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (CIFAR10_NAMES[:9], "names 9 classes; cifar10 has 10"),
        ([*CIFAR10_NAMES[:9], "aeroplane"], "names a class twice"),
        ([], "no list of names"),
    ],
)
def test_cifar_has_its_number_of_distinct_names(tmp_path, names, message):
    write_cifar10(tmp_path)
    meta = tmp_path / "cifar-10-batches-py" / "batches.meta"
    meta.write_bytes(pickle.dumps({"label_names": names}))
    with pytest.raises(CasemateError, match=f"batches.meta.*{message}"):
        open_source("cifar10", path=str(tmp_path))


def test_the_unpacked_cifar_folder_itself_is_taken_too(tmp_path):
    write_cifar10(tmp_path)
    inner = tmp_path / "cifar-10-batches-py"
    entries = open_source("cifar10", path=str(inner)).entries()
    assert entries == open_source("cifar10", path=str(tmp_path)).entries()
    (inner / "test_batch").unlink()
    with pytest.raises(CasemateError, match="cifar-10-batches-py lacks the file test_batch"):
        open_source("cifar10", path=str(inner))


def test_missing_cifar_file_is_named(tmp_path):
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(CasemateError, match="cifar-10-batches-py/data_batch_4") as caught:
        open_source("torchvision:cifar10", path=str(tmp_path))
    assert caught.value.key == "data.path"


class Intruder:
    def __reduce__(self):
        return (Path.touch, (Path("intruder-was-here"),))


def test_cifar_pickle_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_cifar10(tmp_path)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    batch.write_bytes(pickle.dumps({"data": Intruder(), "labels": []}))
    source = open_source("torchvision:cifar10", path=str(tmp_path))
    with pytest.raises(CasemateError, match="data_batch_1 is not a plain CIFAR batch"):
        source.entries()
    assert not (tmp_path / "intruder-was-here").exists()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"data": random_pixels(2, 3000), "labels": [0, 1]}, "3072"),
        ({"data": random_pixels(2, 3072), "labels": [0, 10]}, "label 10 at 1"),
        ({"data": random_pixels(2, 3072), "labels": [0]}, "1 labels for 2 images"),
        ([1, 2], "no dictionary"),
    ],
)
def test_bad_cifar_batch_is_explained(tmp_path, batch, message):
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(CasemateError, match=message):
        open_source("torchvision:cifar10", path=str(tmp_path)).entries()
