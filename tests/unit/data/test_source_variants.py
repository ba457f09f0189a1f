"""Test sets for ImageNet and CIFAR classifiers: labels of the original space, nothing to train."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from components.core.errors import CasemateError
from components.data.sources import open_source
from components.data.sources.names import (
    BENCHMARK_CORRUPTIONS,
    CIFAR10,
    CORRUPTIONS,
    imagenet_a_synsets,
    imagenet_r_synsets,
    imagenet_synsets,
)

WNIDS = imagenet_synsets()


def write_image(path: Path, seed: int = 0) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format="PNG")
    return pixels


# -- folders


def test_label_spaces_are_the_published_ones():
    """Sums and ends of the index lists in the datasets' own evaluation scripts."""
    place = {wnid: label for label, wnid in enumerate(WNIDS)}
    a = [place[wnid] for wnid in imagenet_a_synsets()]
    r = [place[wnid] for wnid in imagenet_r_synsets()]
    assert (len(a), sum(a), a[0], a[-1]) == (200, 102178, 6, 988)
    assert (len(r), sum(r), r[0], r[-1]) == (200, 86135, 1, 988)
    assert len(set(a) & set(r)) == 86
    assert list(WNIDS) == sorted(WNIDS)


@pytest.mark.parametrize(
    ("name", "wnids"),
    [
        ("imagenet_r", imagenet_r_synsets()),
        ("imagenet_a", imagenet_a_synsets()),
        ("imagenet_sketch", WNIDS),
    ],
)
def test_folders_by_wnid_keep_the_labels_of_the_thousand(tmp_path, name, wnids):
    for wnid in wnids:
        (tmp_path / wnid).mkdir()
        (tmp_path / wnid / "0.jpg").touch()
    pixels = write_image(tmp_path / wnids[-1] / "1.jpg")
    source = open_source(name, path=str(tmp_path))
    entries = source.entries()
    assert source.test_only
    assert source.classes == WNIDS
    assert {e.split_hint for e in entries} == {"test"}
    assert all(WNIDS[e.label] == e.locator.split("/")[0] for e in entries)
    assert len(entries) == len(wnids) + 1
    assert entries[-1].item_id == f"{name}-{wnids[-1]}/1.jpg"
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(copy.decode(entries[-1]), pixels)
    (tmp_path / wnids[3] / "0.jpg").unlink()
    with pytest.raises(CasemateError, match=f"{wnids[3]} holds no image"):
        source.entries()
    (tmp_path / wnids[3]).rmdir()
    with pytest.raises(CasemateError, match=f"{wnids[3]} is missing"):
        open_source(name, path=str(tmp_path))
    assert len(open_source(name, path=str(tmp_path), options={"subset": True}).entries()) == len(
        wnids
    )


def test_a_class_that_is_not_of_the_set_is_refused(tmp_path):
    foreign = next(wnid for wnid in WNIDS if wnid not in imagenet_r_synsets())
    write_image(tmp_path / foreign / "0.jpg")
    with pytest.raises(CasemateError, match=f"{foreign} is not a class"):
        open_source("imagenet_r", path=str(tmp_path), options={"subset": True})


def test_v2_folders_are_numbers_and_not_words(tmp_path):
    """Sorted as words, 10 comes before 2; then nearly all labels are wrong."""
    for label in range(1000):
        (tmp_path / str(label)).mkdir()
        (tmp_path / str(label) / "x.jpeg").touch()
    entries = open_source("imagenet_v2", path=str(tmp_path)).entries()
    assert [e.label for e in entries] == list(range(1000))
    assert all(e.locator == f"{e.label}/x.jpeg" for e in entries)
    write_image(tmp_path / "1000" / "x.jpeg")
    with pytest.raises(CasemateError, match="1000 is not a class"):
        open_source("imagenet_v2", path=str(tmp_path))


@pytest.mark.parametrize("group", ["", "noise/"])
def test_imagenet_c_by_corruption_and_severity(tmp_path, group):
    for level in (2, 3):
        for wnid in (WNIDS[9], WNIDS[700]):
            write_image(tmp_path / f"{group}shot_noise" / str(level) / wnid / "v.JPEG", level)
    options = {"corruption": "shot_noise", "severity": 3, "subset": True}
    source = open_source("imagenet_c", path=str(tmp_path), options=options)
    entries = source.entries()
    assert [(e.item_id, e.label, e.split_hint) for e in entries] == [
        (f"imagenet_c-{group}shot_noise/3/{WNIDS[9]}/v.JPEG", 9, "test"),
        (f"imagenet_c-{group}shot_noise/3/{WNIDS[700]}/v.JPEG", 700, "test"),
    ]
    assert np.array_equal(source.decode(entries[0]), write_image(tmp_path / "x.png", 3))
    for missing in ({"severity": "all"}, {"corruption": ["shot_noise", "fog"]}):
        with pytest.raises(CasemateError, match=r"lacks (shot_noise/1|fog/3)"):
            open_source("imagenet_c", path=str(tmp_path), options={**options, **missing})


# -- CIFAR-10-C


def write_cifar_c(root: Path, names: tuple[str, ...], *, per_level: int = 3) -> dict:
    rng = np.random.default_rng(0)
    rows = 5 * per_level
    arrays = {n: rng.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8) for n in names}
    for name, array in arrays.items():
        np.save(root / f"{name}.npy", array)
    np.save(root / "labels.npy", np.tile(np.arange(per_level, dtype=np.uint8) + 7, 5))
    return arrays


@pytest.mark.parametrize("severity", [1, 4, 5])
def test_severity_is_a_slice_of_the_rows(tmp_path, severity):
    arrays = write_cifar_c(tmp_path, ("fog",))
    options = {"corruption": "fog", "severity": severity}
    source = open_source("cifar10_c", path=str(tmp_path), options=options)
    entries = source.entries()
    assert source.test_only
    assert source.classes == CIFAR10
    assert [(e.item_id, e.label) for e in entries] == [
        (f"cifar10_c-fog-{severity}-{i:05d}", i + 7) for i in range(3)
    ]
    copy = pickle.loads(pickle.dumps(source))
    for index, entry in enumerate(entries):
        pixels = copy.decode(entry)
        assert np.array_equal(pixels, arrays["fog"][(severity - 1) * 3 + index])
        assert type(pixels) is np.ndarray  # no map escapes


def test_all_corruptions_are_asked_for_by_one_word(tmp_path):
    write_cifar_c(tmp_path, CORRUPTIONS, per_level=1)
    for word, names in (("benchmark", BENCHMARK_CORRUPTIONS), ("all", CORRUPTIONS)):
        options = {"corruption": word, "severity": "all"}
        entries = open_source("cifar10_c", path=str(tmp_path), options=options).entries()
        ids = [f"cifar10_c-{name}-{level}-00000" for name in names for level in range(1, 6)]
        assert [e.item_id for e in entries] == ids
    (tmp_path / "snow.npy").unlink()
    with pytest.raises(CasemateError, match="lacks snow/1, snow/2"):
        open_source(
            "cifar10_c", path=str(tmp_path), options={"corruption": "all", "severity": "all"}
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"severity": 1}, "corruption: None must be set"),
        ({"corruption": "fog"}, "severity: None must be set"),
        ({"corruption": "mist", "severity": 1}, "mist is unknown; choose"),
        ({"corruption": "fog", "severity": 6}, "neither 1 to 5"),
        ({"corruption": "fog", "severity": "2"}, "neither 1 to 5"),
        ({"corruption": "fog", "severity": True}, "must be a whole number"),
        ({"corruption": [], "severity": 1}, "is unknown"),
        ({"corruption": ["fog", "all"], "severity": 1}, "all is unknown"),
    ],
)
def test_wrong_corruption_options_are_explained(tmp_path, options, message):
    write_cifar_c(tmp_path, ("fog",))
    with pytest.raises(CasemateError, match=message):
        open_source("cifar10_c", path=str(tmp_path), options=options)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("labels", np.arange(15) % 11, "label 10 at 10, but there are 10 classes"),
        ("labels", np.arange(14) % 10, "severity after severity"),
        ("labels", np.linspace(0, 1, 15), "labels are a row of integers"),
        ("fog", np.zeros((15, 32, 32, 3)), "float64"),
        ("fog", np.zeros((12, 32, 32, 3), np.uint8), "expected uint8"),
        ("fog", b"\x93NUMPY but cut off", "is not a readable .npy"),
        ("labels", b"", "is not a readable .npy"),
    ],
)
def test_bad_cifar_c_files_are_named(tmp_path, file, content, message):
    write_cifar_c(tmp_path, ("fog",))
    path = tmp_path / f"{file}.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    options = {"corruption": "fog", "severity": 1}
    with pytest.raises(CasemateError, match=message) as caught:
        open_source("cifar10_c", path=str(tmp_path), options=options).entries()
    assert f"{file}.npy" in str(caught.value)
    assert "\n" not in str(caught.value)
