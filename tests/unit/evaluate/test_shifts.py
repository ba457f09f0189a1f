"""Shifts: class lists of the datasets, masked and unmasked accuracy by hand, bad maps by name."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from components.core.errors import CasemateError
from components.core.statistics import difference
from components.data.sources import open_source
from components.data.sources.names import imagenet_synsets
from components.evaluate.shifts import (
    ClassMap,
    class_map_of,
    imagenet_indices,
    imagenet_map,
    measurements,
    named_map,
    shift_predictions,
)

WNIDS = imagenet_synsets()


def values(shifted, clean, class_map):
    return {m.metric: m.value for m in measurements(shifted, clean, class_map, item="set")}


def test_masks_are_the_published_ones():
    a, r = imagenet_indices("imagenet_a"), imagenet_indices("imagenet_r")
    for found, total, first in ((a, 102178, 6), (r, 86135, 1)):
        assert (len(found), sum(found), found[0], found[-1]) == (200, total, first, 988)
        assert list(found) == sorted(set(found))
    assert len(set(a) & set(r)) == 86
    data = Path(importlib.util.find_spec("timm").origin).parent / "data" / "_info"
    for name, found in (("a", a), ("r", r)):  # timm's other list, of numbers
        assert [
            int(n) for n in (data / f"imagenet_{name}_indices.txt").read_text().split()
        ] == list(found)
    for name in ("imagenet_v2", "imagenet_sketch"):
        assert imagenet_indices(name) == tuple(range(1000))


def test_another_list_is_refused(monkeypatch):
    from components.evaluate import shifts

    monkeypatch.setitem(shifts.IMAGENET_SETS, "imagenet_r", lambda: WNIDS[:200])
    with pytest.raises(ValueError, match="not the published one"):
        imagenet_indices("imagenet_r")


@pytest.mark.parametrize("name", ["imagenet_r", "imagenet_a", "imagenet_v2", "imagenet_sketch"])
def test_one_hot_oracle_is_right_masked_and_unmasked(name):
    class_map = imagenet_map(name, num_classes=1000)
    labels = torch.tensor(class_map.kept[::7])
    logits = torch.nn.functional.one_hot(labels, 1000).float()
    ids = [f"i{row}" for row in range(len(labels))]
    shifted = shift_predictions(ids, labels, logits, class_map)
    clean = shift_predictions(ids, labels, logits, class_map.of_clean())
    assert values(shifted, clean, class_map) == {
        **dict.fromkeys(["masked", "unmasked", "clean_masked", "clean_unmasked"], 1.0),
        **dict.fromkeys(["gap_masked", "gap_unmasked"], 0.0),
    }


def test_a_class_outside_the_mask_wins_only_unmasked():
    class_map = imagenet_map("imagenet_r", num_classes=1000)
    outside = next(c for c in range(1000) if c not in class_map.kept)
    labels = torch.tensor([class_map.kept[5], class_map.kept[6]])
    logits = torch.zeros(2, 1000)
    logits[:, outside] = 9
    logits[0, class_map.kept[5]] = 1  # row 1 is a tie among the 200: the lowest class
    rows = shift_predictions(["a", "b"], labels, logits, class_map).to_pylist()
    assert [row["prediction"] for row in rows] == [outside, outside]
    assert [row["masked_prediction"] for row in rows] == [class_map.kept[5], class_map.kept[0]]


def test_accuracies_and_gaps_by_hand():
    """Model classes 0..4; the dataset has classes b, d, e of the model in another order."""
    class_map = named_map(["e", "b", "dd"], list("abcde"), class_map={"dd": "d"})
    assert class_map.kept == (1, 3, 4)
    logits = torch.tensor(
        [
            [9.0, 0, 0, 0, 5],  # e: masked right, unmasked a
            [0, 7, 0, 0, 5],  # b: both right
            [0, 0, 0, 1, 5],  # dd: both wrong
            [0, 0, 8, 6, 5],  # dd: masked right, unmasked c
        ]
    )
    shifted = shift_predictions(list("wxyz"), torch.tensor([0, 1, 2, 2]), logits, class_map)
    assert shifted.column("label").to_pylist() == [4, 1, 3, 3]
    clean_logits = torch.eye(5)[[0, 1, 2, 3, 4, 0]]
    clean_labels = torch.tensor([0, 1, 2, 3, 4, 3])  # a and c are not of the set
    clean = shift_predictions(list("abcdef"), clean_labels, clean_logits, class_map.of_clean())
    assert clean.column("item_id").to_pylist() == ["b", "d", "e", "f"]
    assert clean.column("masked_prediction").to_pylist() == [1, 3, 4, 1]
    found = {m.metric: m for m in measurements(shifted, clean, class_map, item="set")}
    expected = {"masked": 0.75, "unmasked": 0.25, "clean_masked": 0.75, "clean_unmasked": 0.75}
    expected |= {"gap_masked": 0.0, "gap_unmasked": 0.5}
    assert {name: m.value for name, m in found.items()} == expected
    gap = difference(3, 1, n=4, n_before=4)
    assert (found["gap_unmasked"].lo95, found["gap_unmasked"].hi95) == (gap["low"], gap["high"])
    assert found["masked"].n == 4


def test_without_clean_images_the_gap_is_null_and_says_why():
    class_map = named_map(["a"], ["a", "b"], class_map={})
    shifted = shift_predictions(["i"], torch.tensor([0]), torch.tensor([[1.0, 0.0]]), class_map)
    found = {m.metric: m for m in measurements(shifted, None, class_map, item="set")}
    assert found["masked"].value == 1
    assert found["gap_masked"].value is None
    assert found["gap_masked"].flags == ("null: no clean images of these classes",)


def test_many_classes_may_be_one_and_some_left_out():
    named = {"tabby": "cat", "siamese": "cat", "monkey": None}
    class_map = named_map(["tabby", "siamese", "monkey", "dog"], ["dog", "cat"], class_map=named)
    assert class_map.model_labels([0, 1, 2, 3]).tolist() == [1, 1, -1, 0]
    shifted = shift_predictions(
        list("abcd"), torch.tensor([0, 1, 2, 3]), torch.eye(2)[[1, 0, 0, 0]], class_map
    )
    assert shifted.column("item_id").to_pylist() == ["a", "b", "d"]
    first = measurements(shifted, None, class_map, item="set")[0]
    assert (first.value, first.flags) == (pytest.approx(2 / 3), ("classes: 3 of 4",))


def test_models_of_some_imagenet_classes_need_their_wnids():
    with pytest.raises(CasemateError, match="100 classes are not the 1000 of ImageNet"):
        imagenet_map("imagenet_r", num_classes=100)
    own = [WNIDS[index] for index in (988, 3, 1, 0)]  # R has 988 and 1
    class_map = imagenet_map("imagenet_r", num_classes=4, wnids=own)
    assert class_map.kept == (0, 2)
    assert class_map.model_labels([988, 1, 2]).tolist() == [0, 2, -1]
    with pytest.raises(CasemateError, match="shares no class"):
        imagenet_map("imagenet_r", num_classes=1, wnids=[WNIDS[0]])
    with pytest.raises(CasemateError, match="cat, dog are not WordNet ids"):
        imagenet_map("imagenet_r", num_classes=2, wnids=["cat", "dog"])
    with pytest.raises(CasemateError, match="3 names of classes, but the model has 4"):
        imagenet_map("imagenet_r", num_classes=4, wnids=own[:3])


@pytest.mark.parametrize(
    ("dataset", "named", "message"),
    [
        (["a", "x", "y"], {}, "x, y have no class of the model"),
        (["a"], {"a": "z"}, "z are not classes of the model"),
        (["a"], {"q": "a"}, "q are not classes of the shifted dataset"),
        (["a"], {"a": None}, "every class is left out"),
        ([str(n) for n in range(9)], {}, "0, 1, 2, 3, 4 and 4 more have no class"),
    ],
)
def test_maps_that_do_not_fit_are_named(dataset, named, message):
    with pytest.raises(CasemateError, match=f"shifts.class_map: {message}"):
        named_map(dataset, ["a", "b"], class_map=named)


def test_wrong_labels_and_logits_are_named():
    class_map = ClassMap({0: 1}, 2)
    with pytest.raises(CasemateError, match="label 4 is not in the class map"):
        shift_predictions(["i"], torch.tensor([4]), torch.zeros(1, 2), class_map)
    with pytest.raises(CasemateError, match="3 logits per image, but the class map has 2"):
        shift_predictions(["i"], torch.tensor([0]), torch.zeros(1, 3), class_map)
    with pytest.raises(ValueError, match="some of the model's 2"):
        ClassMap({0: 2}, 2)


def test_the_source_decides_how_classes_are_found():
    def found(source, dataset, **model):
        return class_map_of(source, dataset, **{"class_map": {}, "model_classes": None, **model})

    known = found("imagenet_r", WNIDS, num_classes=1000)
    assert known == imagenet_map("imagenet_r", num_classes=1000)
    assert len(known.kept) == 200  # and not the 1000 names that the dataset lists
    own = found("folder", ["b"], num_classes=2, model_classes=["a", "b"])
    assert own == ClassMap({0: 1}, 2)
    with pytest.raises(CasemateError, match="cat would be ignored"):
        found("imagenet_a", WNIDS, num_classes=1000, class_map={"cat": "dog"})
    with pytest.raises(CasemateError, match="10 classes of the model have no names"):
        found("folder", ["b"], num_classes=10)
    with pytest.raises(CasemateError, match="2 names of classes, but the model has 3"):
        found("folder", ["b"], num_classes=3, model_classes=["a", "b"])


def write_images(root, folders):
    for place, name in enumerate(folders):
        (root / name).mkdir(parents=True)
        pixels = np.full((4, 4, 3), place, dtype=np.uint8)
        Image.fromarray(pixels).save(root / name / "0.png")


def test_folders_outside_the_classes_raise_with_their_names(tmp_path):
    outside = [WNIDS[i] for i in range(1000) if i not in imagenet_indices("imagenet_a")][:7]
    write_images(tmp_path, [WNIDS[6], *outside])
    with pytest.raises(CasemateError) as error:
        open_source("imagenet_a", path=str(tmp_path), options={"subset": True})
    assert ", ".join(outside[:5]) + " and 2 more" in str(error.value)


def test_labels_that_the_source_reads_fit_the_map(tmp_path):
    """V2 folder 10 is class 10, although it sorts before 9."""
    write_images(tmp_path, ["10", "9", "101"])
    entries = open_source("imagenet_v2", path=str(tmp_path), options={"subset": True}).entries()
    class_map = imagenet_map("imagenet_v2", num_classes=1000)
    for entry in entries:
        assert class_map.model_labels([entry.label]).tolist() == [int(entry.locator.split("/")[0])]
