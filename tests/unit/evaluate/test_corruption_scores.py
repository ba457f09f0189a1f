"""Means and errors on corruptions: AlexNet's own row, hand-computed models, missing parts."""

import pytest

from components.core.settings import SettingError
from components.data.sources.names import (
    BENCHMARK_CORRUPTIONS,
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    SEVERITIES,
)
from components.evaluate.corruptions import (
    ALEXNET,
    ALEXNET_CLEAN,
    corruption_scores,
    groups,
    not_comparable,
)
from components.evaluate.settings import CorruptionSuiteSettings


def accuracies(of) -> dict:
    """Accuracy of every variant, from its name and severity."""
    return {(name, level): of(name, level) for name in CORRUPTIONS for level in SEVERITIES}


def scores(accuracy, *, clean=0.8, incomparable=None):
    return corruption_scores(accuracy, clean=clean, incomparable=incomparable)


def test_alexnet_scores_one_hundred():
    """Severities spread around the mean: only the mean counts."""
    own = accuracies(lambda name, level: 1 - ALEXNET[name] + (level - 3) * 0.01)
    found = scores(own, clean=1 - ALEXNET_CLEAN)
    assert found["mce"].value == pytest.approx(100, abs=1e-9)
    assert found["relative_mce"].value == pytest.approx(100, abs=1e-9)
    assert all(found[f"ce_{name}"].value == pytest.approx(100) for name in CORRUPTIONS)
    assert tuple(ALEXNET) == CORRUPTIONS


def test_a_model_with_one_error_everywhere():
    found = scores(accuracies(lambda name, level: 0.6), clean=0.75)
    for name in ("mean75", "mean95", "mean_noise", "mean_extra"):
        assert found[name].value == pytest.approx(0.6)
    assert found["mean_error75"].value == pytest.approx(0.4)
    assert found["ce_fog"].value == pytest.approx(100 * 0.4 / 0.819324)
    inverse = sum(1 / ALEXNET[name] for name in BENCHMARK_CORRUPTIONS) / 15
    assert found["mce"].value == pytest.approx(100 * 0.4 * inverse)
    relative = sum(1 / (ALEXNET[name] - 0.43478) for name in BENCHMARK_CORRUPTIONS) / 15
    assert found["relative_mce"].value == pytest.approx(100 * 0.15 * relative)


def test_means_over_75_95_and_groups_fit_together():
    place = {name: index for index, name in enumerate(CORRUPTIONS)}
    found = scores(accuracies(lambda name, level: (place[name] * 5 + level) / 100))
    value = {name: score.value for name, score in found.items()}
    assert value["mean95"] == pytest.approx((75 * value["mean75"] + 20 * value["mean_extra"]) / 95)
    parts = 3 * value["mean_noise"] + 4 * sum(
        value[f"mean_{group}"] for group in ("blur", "weather", "digital")
    )
    assert value["mean75"] == pytest.approx(parts / 15)
    assert groups()["weather"] == ("snow", "frost", "fog", "brightness")
    assert groups()["extra"] == EXTRA_CORRUPTIONS


def test_a_missing_variant_empties_what_needs_it_and_nothing_else():
    partial = accuracies(lambda name, level: 0.5)
    del partial["spatter", 2]
    found = scores(partial)
    assert (found["mean95"].value, found["mean95"].reason) == (None, "lacks spatter/2")
    assert found["mean_extra"].value is None
    assert found["ce_spatter"].reason == "lacks spatter/2"
    assert found["mean75"].value == pytest.approx(0.5)
    assert found["mce"].value is not None
    del partial["fog", 5]
    found = scores(partial)
    assert (found["mce"].value, found["mce"].reason) == (None, "lacks fog/5")
    assert found["relative_mce"].reason == "lacks fog/5"
    assert found["mean_weather"].value is None
    assert found["mean_blur"].value == pytest.approx(0.5)
    nothing = scores({}, clean=None)
    assert all(score.value is None and score.reason for score in nothing.values())
    assert nothing["mean75"].reason.endswith("gaussian_noise/5, 70 more")


def test_without_clean_accuracy_there_is_no_relative_error():
    found = scores(accuracies(lambda name, level: 0.5), clean=None)
    assert found["relative_mce"].reason == "lacks the clean accuracy on the same images"
    assert found["mce"].value is not None


def test_what_alexnet_did_not_see_is_not_divided_by_its_errors():
    assert not_comparable([], imagenet=True) is None
    for flags, imagenet, word in (
        (["procedural_frost"], True, "procedural"),
        (["nonstandard_resolution"], True, "224"),
        ([], False, "1000 classes"),
    ):
        reason = not_comparable(flags, imagenet=imagenet)
        assert word in reason
        found = scores(accuracies(lambda name, level: 0.5), incomparable=reason)
        assert found["mce"].value is None
        assert found["relative_mce"].reason == reason
        assert found["ce_fog"].reason == reason
        assert found["mean95"].value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("accuracy", "clean", "message"),
    [
        ({("rain", 1): 0.5}, None, "rain/1 is not a variant"),
        ({("fog", 6): 0.5}, None, "fog/6 is not a variant"),
        ({("fog", 1): 50.0}, None, "fog/1 has 50.0, outside"),
        ({}, 76.1, "clean: 76.1"),
    ],
)
def test_percentages_and_unknown_variants_are_refused(accuracy, clean, message):
    with pytest.raises(ValueError, match=message):
        scores(accuracy, clean=clean)


def test_suite_settings_choose_variants_in_the_order_of_the_benchmark():
    assert len(CorruptionSuiteSettings().variants()) == 95
    assert len(CorruptionSuiteSettings(names="benchmark").variants()) == 75
    own = CorruptionSuiteSettings(names=("snow", "fog", "gaussian_noise"), severities=(5, 1))
    assert own.variants() == (
        ("gaussian_noise", 1), ("gaussian_noise", 5), ("snow", 1), ("snow", 5), ("fog", 1),
        ("fog", 5),
    )  # fmt: skip


def test_fidelity_follows_the_published_files():
    suite = CorruptionSuiteSettings()
    assert [suite.fidelity_at(side, side) for side in (32, 224)] == ["raw", "released"]
    assert CorruptionSuiteSettings(fidelity="raw").fidelity_at(224, 224) == "raw"


@pytest.mark.parametrize(
    ("values", "field", "remedy"),
    [
        ({"names": ("fogg",)}, "names", "did you mean 'fog'"),
        ({"names": ()}, "names", ""),
        ({"severities": (0,)}, "severities", "at least 1"),
        ({"severities": ()}, "severities", "needs 1 entries"),
        ({"source": "imagenet_c"}, "path", "is missing"),
        ({"path": "/data"}, "path", "would be ignored"),
        ({"source": "cifar10_c", "path": "x", "textures": "y"}, "textures", "would be ignored"),
        ({"source": "cifar10_c", "path": "x", "fidelity": "raw"}, "fidelity", "would be ignored"),
        ({"fidelity": "jpeg"}, "fidelity", "raw, released"),
    ],
)
def test_suite_settings_refuse_what_cannot_work(values, field, remedy):
    with pytest.raises(SettingError) as caught:
        CorruptionSuiteSettings(**values)
    (problem,) = caught.value.problems
    assert problem.field == field
    assert remedy in problem.remedy
