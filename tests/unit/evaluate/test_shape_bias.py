"""Shape bias: the table of classes, decisions by hand, oracles, and the published file names."""

import math

import numpy as np
import pytest
import torch

from components.core.errors import CasemateError
from components.evaluate.shape_bias import (
    CLASS_INDICES,
    CLASSES,
    Stimulus,
    class_scores,
    decide,
    is_published_set,
    list_stimuli,
    measurements,
    parse_name,
)

CAT, ELEPHANT, DOG, OVEN = (CLASSES.index(name) for name in ("cat", "elephant", "dog", "oven"))


def published_stimuli():
    """1280 stimuli with the published counts: each shape five times with each texture."""
    return [
        Stimulus(f"{CLASSES[shape]}/{shape}-{texture}-{copy}", shape, texture)
        for shape in range(16)
        for texture in range(16)
        for copy in range(5)
    ]


def values(stimuli, decisions):
    found = measurements(stimuli, np.array(decisions))
    return {(m.item, m.metric): m.value for m in found}


def test_table_is_the_published_one():
    counts = {name: len(indices) for name, indices in CLASS_INDICES.items()}
    assert list(counts) == sorted(counts)
    assert counts == {
        "airplane": 1,
        "bear": 4,
        "bicycle": 2,
        "bird": 49,
        "boat": 5,
        "bottle": 7,
        "car": 3,
        "cat": 6,
        "chair": 4,
        "clock": 3,
        "dog": 109,
        "elephant": 2,
        "keyboard": 2,
        "knife": 1,
        "oven": 1,
        "truck": 8,
    }
    every = [index for indices in CLASS_INDICES.values() for index in indices]
    assert len(every) == len(set(every)) == 207
    assert CLASS_INDICES["cat"] == (281, 282, 283, 284, 285, 286)
    assert CLASS_INDICES["dog"][0] == 152
    assert CLASS_INDICES["dog"][-1] == 268
    assert 0 <= min(every) <= max(every) < 1000


@pytest.mark.parametrize("pooling", ["mean", "sum", "max"])
def test_scores_pool_probabilities_over_all_thousand(pooling):
    logits = 3 * torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    scores = class_scores(logits, pooling=pooling)
    for row in range(4):
        weights = [math.exp(value) for value in logits[row].tolist()]
        total = math.fsum(weights)
        for place, indices in enumerate(CLASS_INDICES.values()):
            own = [weights[index] / total for index in indices]
            expected = {"mean": math.fsum(own) / len(own), "sum": math.fsum(own), "max": max(own)}
            assert float(scores[row, place]) == pytest.approx(expected[pooling], rel=1e-9)


def test_poolings_decide_differently():
    """Two dogs of many against the only oven."""
    logits = torch.full((1, 1000), -9.0)
    logits[0, CLASS_INDICES["oven"][0]] = 2.0
    logits[0, list(CLASS_INDICES["dog"][:20])] = 1.0
    assert decide(logits, pooling="mean").tolist() == [OVEN]
    assert decide(logits, pooling="max").tolist() == [OVEN]
    assert decide(logits, pooling="sum").tolist() == [DOG]


def test_a_uniform_prediction_is_a_tie_of_all_means_and_the_first_wins():
    scores = class_scores(torch.full((1, 1000), 0.37), pooling="mean")
    assert len(scores.unique()) == 1
    assert decide(torch.zeros(2, 1000), pooling="mean").tolist() == [0, 0]
    assert decide(torch.zeros(1, 1000), pooling="sum").tolist() == [DOG]


def test_classes_outside_the_207_take_probability_and_no_decision():
    logits = torch.zeros(1, 1000)
    logits[0, 999] = 50  # softmax comes first: all means are tiny, the decision is among the 16
    logits[0, 281] = 1
    assert float(class_scores(logits, pooling="mean").max()) < 1e-15
    assert decide(logits, pooling="mean").tolist() == [CAT]


def test_oracles_have_bias_one_and_zero():
    stimuli = published_stimuli()
    assert is_published_set(stimuli)
    shapes = values(stimuli, [s.shape for s in stimuli])
    assert shapes["all", "shape_acc"] == 1
    assert shapes["all", "shape_acc_conflict"] == 1
    assert shapes["all", "texture_acc"] == 0
    assert shapes["all", "shape_bias"] == 1
    textures = values(stimuli, [s.texture for s in stimuli])
    assert textures["all", "shape_acc"] == 80 / 1280
    assert textures["all", "shape_acc_conflict"] == 0
    assert textures["all", "texture_acc"] == 1
    assert textures["all", "shape_bias"] == 0
    assert all(textures[name, "shape_bias"] == 0 for name in CLASSES)


def test_numbers_by_hand():
    cases = [  # shape, texture, decision
        (CAT, ELEPHANT, CAT),
        (CAT, ELEPHANT, ELEPHANT),
        (CAT, DOG, CAT),
        (CAT, DOG, OVEN),  # neither: not in the bias
        (DOG, CAT, CAT),
        (CAT, CAT, CAT),  # no conflict: only in shape_acc
        (OVEN, CAT, DOG),  # neither, and the only one of its shape
    ]
    stimuli = [
        Stimulus(str(place), shape, texture) for place, (shape, texture, _) in enumerate(cases)
    ]
    found = values(stimuli, [decision for *_, decision in cases])
    assert found["all", "shape_acc"] == 3 / 7
    assert found["all", "shape_acc_conflict"] == 2 / 6
    assert found["all", "texture_acc"] == 2 / 6
    assert found["all", "shape_bias"] == 2 / 4
    assert found["cat", "shape_bias"] == 2 / 3
    assert found["dog", "shape_bias"] == 0
    assert found["oven", "shape_bias"] is None
    assert found["car", "shape_bias"] is None
    rows = {(m.item, m.metric): m for m in measurements(stimuli, np.zeros(7, np.int64))}
    assert rows["all", "shape_bias"].flags == (
        "nonstandard_stimuli",
        "null: no image was decided for its shape or its texture",
    )
    assert rows["all", "shape_acc"].n == 7
    assert rows["all", "texture_acc"].n == 6


def test_names_are_parsed():
    found = parse_name("cat/cat7-elephant1.png")
    assert (found.shape, found.texture, found.is_conflict) == (CAT, ELEPHANT, True)
    assert not parse_name("oven/oven10-oven2.png").is_conflict


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("cat/cat7_elephant1.png", "is not named"),
        ("cat/cat7-elephant1.jpg", "is not named"),
        ("cat/cat-elephant1.png", "is not named"),
        ("cat/cat1-zebra1.png", "names 'zebra', not one of the 16"),
        ("dog/cat1-dog1.png", "folder of another shape"),
    ],
)
def test_other_names_are_refused(place, message):
    with pytest.raises(CasemateError, match=message):
        parse_name(place)


def test_folders_are_listed_in_order(tmp_path):
    for place in ("dog/dog1-cat2.png", "cat/cat2-dog1.png", "cat/cat1-oven1.png"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    (tmp_path / "cat" / ".DS_Store").touch()
    found = list_stimuli(tmp_path)
    assert [s.locator for s in found] == [
        "cat/cat1-oven1.png",
        "cat/cat2-dog1.png",
        "dog/dog1-cat2.png",
    ]
    assert not is_published_set(found)
    (tmp_path / "zebra").mkdir()
    with pytest.raises(CasemateError, match="not one of the 16 classes: zebra"):
        list_stimuli(tmp_path)


def test_missing_folders_and_other_models_are_refused(tmp_path):
    with pytest.raises(CasemateError, match="is not a folder"):
        list_stimuli(tmp_path / "none")
    with pytest.raises(CasemateError, match="has no stimuli"):
        list_stimuli(tmp_path)
    with pytest.raises(CasemateError, match="10 logits per image; the suite needs the 1000"):
        decide(torch.zeros(1, 10), pooling="mean")
    with pytest.raises(ValueError, match="1 stimuli, but 2"):
        measurements([Stimulus("a", 0, 1)], np.zeros(2, np.int64))
