"""Arrays in files: IDX, and the two further layouts of npz."""

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from components.core.errors import CasemateError
from components.data.sources import npz, open_source
from components.data.sources.names import CIFAR10, CIFAR100


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# -- IDX


def idx_bytes(values: np.ndarray) -> bytes:
    """The format as its author describes it: magic, big-endian sizes, bytes."""
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_idx(root: Path, *, packed: bool = False, dot: bool = False) -> dict[str, np.ndarray]:
    root.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for seed, (prefix, count) in enumerate([("train", 5), ("t10k", 3)]):
        arrays[f"{prefix}-images-idx3-ubyte"] = random_pixels(count, 28, 28, seed=seed)
        arrays[f"{prefix}-labels-idx1-ubyte"] = np.arange(count, dtype=np.uint8) + 4
    for name, values in arrays.items():
        content = idx_bytes(values)
        if packed:
            (root / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (root / (name.replace("-idx", ".idx") if dot else name)).write_bytes(content)
    return arrays


@pytest.mark.parametrize("form", ["plain", "packed", "dot", "torchvision"])
@pytest.mark.parametrize(("name", "tree"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_idx_files_in_every_form(tmp_path, name, tree, form):
    home = tmp_path / tree / "raw" if form == "torchvision" else tmp_path
    arrays = write_idx(home, packed=form == "packed", dot=form == "dot")
    source = open_source(name, path=str(tmp_path))
    entries = source.entries()
    assert [(e.item_id, e.label, e.split_hint) for e in entries[3:6]] == [
        (f"{name}-train-00003", 7, "train"),
        (f"{name}-train-00004", 8, "train"),
        (f"{name}-test-00000", 4, "test"),
    ]
    images = np.concatenate([arrays[f"{p}-images-idx3-ubyte"] for p in ("train", "t10k")])
    copy = pickle.loads(pickle.dumps(source))
    for entry, image in zip(entries, images, strict=True):
        assert np.array_equal(copy.decode(entry), image[..., None])
    assert len(source.classes) == 10


def test_idx_agrees_with_torchvision(tmp_path):
    from torchvision.datasets import MNIST

    write_idx(tmp_path / "MNIST" / "raw")
    source = open_source("mnist", path=str(tmp_path))
    for split, train in (("train", True), ("test", False)):
        theirs = MNIST(tmp_path, train=train)
        ours = [e for e in source.entries() if e.split_hint == split]
        assert [e.label for e in ours] == theirs.targets.tolist()
        stack = np.stack([source.decode(e)[..., 0] for e in ours])
        assert np.array_equal(stack, theirs.data.numpy())


LABELS, IMAGES = "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (LABELS, idx_bytes(np.array([0, 1, 10, 2, 3], np.uint8)), "label 10 at 2"),
        (LABELS, idx_bytes(np.arange(4, dtype=np.uint8)), "5 images for 4 labels"),
        (LABELS, b"", "starts with nothing"),
        (LABELS, b"\x00\x00\x0d\x01\x00\x00\x00\x05", "starts with 00000d01"),
        (LABELS, idx_bytes(np.arange(5, dtype=np.uint8))[:-1], "4 bytes for 5 values"),
        (IMAGES, b"\x00\x00\x08\x03\x00\x00", "not a readable IDX"),
        (f"{IMAGES}.gz", b"not gzip at all", "not a readable IDX"),
        (
            f"{IMAGES}.gz",
            gzip.compress(idx_bytes(random_pixels(3, 8, 8)), mtime=0)[:9],
            "not a readable IDX",
        ),
    ],
)
def test_bad_idx_files_are_named(tmp_path, file, content, message):
    write_idx(tmp_path)
    (tmp_path / file.removesuffix(".gz")).unlink()
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CasemateError, match=message) as caught:
        open_source("mnist", path=str(tmp_path)).entries()
    assert str(tmp_path) in str(caught.value)


def test_truncated_images_are_noticed_when_they_are_read(tmp_path):
    write_idx(tmp_path)
    path = tmp_path / IMAGES
    path.write_bytes(path.read_bytes()[:-5])
    source = open_source("mnist", path=str(tmp_path))
    with pytest.raises(CasemateError, match="2347 bytes for 3x28x28 values"):
        source.decode(source.entries()[-1])


def test_missing_idx_file_is_named(tmp_path):
    write_idx(tmp_path)
    (tmp_path / IMAGES).unlink()
    with pytest.raises(CasemateError, match=f"lacks the file {IMAGES}"):
        open_source("mnist", path=str(tmp_path))


# -- npz of generated images and of CIFAR


def test_npz_keys_of_generated_images(tmp_path):
    x = random_pixels(4, 8, 8, 3)
    np.savez(tmp_path / "ddpm.npz", image=x, label=np.array([2, 0, 1, 2], dtype=np.int64))
    source = open_source("npz", path=str(tmp_path / "ddpm.npz"))
    entries = source.entries()
    assert [(e.item_id, e.label, e.split_hint) for e in entries[:2]] == [
        ("npz-00000", 2, None),
        ("npz-00001", 0, None),
    ]
    assert source.classes == ("0", "1", "2")
    assert np.array_equal(source.decode(entries[3]), x[3])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_large_members_are_mapped_and_give_the_same_pixels(tmp_path, monkeypatch, save, order):
    monkeypatch.setattr(npz, "MAP_FROM", 1)
    x = np.asarray(random_pixels(6, 8, 9, 3), order=order)
    save(tmp_path / "a.npz", labels=np.arange(6), images=x, padding=np.zeros(7))
    source = open_source("npz", path=str(tmp_path / "a.npz"))
    for entry, image in zip(source.entries(), x, strict=True):
        pixels = source.decode(entry)
        assert np.array_equal(pixels, image)
        assert type(pixels) is np.ndarray
    kept = npz._read_images(source.path, source.version, "images")
    assert isinstance(kept, np.memmap) == (save is np.savez)  # packed bytes cannot be mapped


@pytest.mark.parametrize(("name", "classes"), [("cifar10", CIFAR10), ("cifar100", CIFAR100)])
def test_cifar_from_npz_has_the_ids_and_classes_of_the_batches(tmp_path, name, classes):
    x, y = random_pixels(3, 32, 32, 3), np.array([1, 0, 9])
    np.savez(tmp_path / "c.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[2:])
    source = open_source(name, path=str(tmp_path / "c.npz"))
    assert source.classes == classes
    assert [(e.item_id, e.label) for e in source.entries()[2:]] == [
        (f"{name}-train-00002", 9),
        (f"{name}-test-00000", 9),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_test": np.array([10])}, "label 10 at 0, but there are 10 classes"),
        ({"classes": np.array(["a", "b"])}, r"label 9 at 2|names 2 classes"),
        ({"classes": np.array([str(i) for i in range(11)])}, "names 11 classes; cifar10 has 10"),
        ({"x_test": random_pixels(1, 28, 28)}, r"holds images of \(28, 28\); cifar10 has"),
    ],
)
def test_npz_that_is_not_cifar(tmp_path, change, message):
    x, y = random_pixels(3, 32, 32, 3), np.array([1, 0, 9])
    arrays = {"x_train": x, "y_train": y, "x_test": x[:1], "y_test": y[2:]}
    np.savez(tmp_path / "c.npz", **{**arrays, **change})
    with pytest.raises(CasemateError, match=message):
        open_source("cifar10", path=str(tmp_path / "c.npz"))


def test_cifar_names_are_sorted_as_published():
    assert (len(CIFAR100), len(set(CIFAR100))) == (100, 100)
    assert list(CIFAR100) == sorted(CIFAR100)
    assert list(CIFAR10) == sorted(CIFAR10)
