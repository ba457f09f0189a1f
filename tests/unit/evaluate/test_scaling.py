"""Scaling fits: the published tables' slopes, regression by another library, and missing lines."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from components.core.errors import CasemateError
from components.evaluate.metrics import MetricRow
from components.evaluate.scaling import ScalingPoint, fit_line, scaling_fits

PARAMS = {"B": 86, "L": 307, "H": 632, "50x1": 23, "101x1": 45, "50x3": 207, "101x3": 401}
PARAMS["152x4"] = 965
# Bhojanapalli et al. 2021, Table 3: accuracy in percent on ILSVRC, C, R and A.
PRETRAIN = ("jft", "21k")
TABLE = {  # models of each size, by pretraining
    "50x1": ([(79.00, 51.26, 35.52, 11.35)], [(80.10, 52.97, 26.82, 9.92)]),
    "101x1": ([(81.60, 59.02, 45.45, 18.77)], [(82.40, 58.08, 30.37, 15.73)]),
    "50x3": ([(84.90, 64.16, 55.41, 31.15)], [(84.10, 59.87, 34.04, 20.40)]),
    "101x3": ([(86.30, 69.15, 62.64, 40.21)], [(84.50, 63.07, 35.93, 24.97)]),
    "152x4": ([(87.30, 73.41, 68.52, 51.23)], [(84.80, 65.31, 39.67, 30.01)]),
    "B": (
        [(80.72, 62.76, 43.17, 12.07), (84.14, 67.70, 53.02, 25.49)],
        [(81.27, 62.79, 31.79, 16.29), (83.98, 65.83, 37.99, 26.65)],
    ),
    "L": (
        [(84.40, 70.94, 55.38, 22.81), (87.13, 76.08, 65.28, 44.00)],
        [(81.03, 65.05, 34.33, 19.04), (85.12, 70.03, 40.64, 28.12)],
    ),
    "H": ([(88.33, 78.74, 69.91, 55.85)], [(85.11, 71.13, 39.99, 31.00)]),
}
SLOPES = {
    ("jft", "vit"): (-0.192, -0.236, -0.254, -0.262),
    ("jft", "resnet"): (-0.135, -0.152, -0.185, -0.153),
    ("21k", "vit"): (-0.060, -0.097, -0.038, -0.051),
    ("21k", "resnet"): (-0.069, -0.074, -0.048, -0.063),
}
SUITES = ("clean", "corruptions", "imagenet_r", "imagenet_a")


def table_rows():
    return [
        row(
            model=f"{size}-{number}-{pretrain}",
            family="vit" if size in "BLH" else "resnet",
            pretrain=pretrain,
            params_m=float(PARAMS[size]),
            suite=suite,
            value=percent / 100,
        )
        for size, groups in TABLE.items()
        for pretrain, models in zip(PRETRAIN, groups, strict=True)
        for number, accuracies in enumerate(models)
        for suite, percent in zip(SUITES, accuracies, strict=True)
    ]


def row(**changes):
    same = {
        "model": "m",
        "model_digest": "d",
        "family": "vit",
        "params_m": 10.0,
        "dataset": "imagenet",
        "dataset_digest": "e",
        "seed": 0,
        "suite": "clean",
        "item": "all",
        "metric": "accuracy",
        "value": 0.5,
    }
    return MetricRow(**{**same, **changes})


@pytest.mark.parametrize("place", range(4))
def test_published_tables_give_the_known_slopes(place):
    fits = scaling_fits(table_rows(), suite=SUITES[place], item="all", metric="accuracy")
    assert [(fit.pretrain, fit.family) for fit in fits] == [
        ("21k", "resnet"),
        ("jft", "resnet"),
        ("21k", "vit"),
        ("jft", "vit"),
    ]
    for fit in fits:
        assert fit.slope == pytest.approx(SLOPES[fit.pretrain, fit.family][place], abs=5e-4)
        assert len(fit.points) == 5


def points(seed=0, num=6):
    rng = np.random.default_rng(seed)
    params = 10 ** rng.uniform(0, 3, num)
    errors = 10 ** (-0.3 - 0.2 * np.log10(params) + rng.normal(0, 0.05, num))
    return [
        ScalingPoint(f"m{i}", float(p), float(e))
        for i, (p, e) in enumerate(zip(params, errors, strict=True))
    ]


@pytest.mark.parametrize("num", [3, 6])
def test_line_and_intervals_are_those_of_linear_regression(num):
    given = points(num, num)
    x, y = [np.log10([getattr(p, name) for p in given]) for name in ("params_m", "error")]
    expected = stats.linregress(x, y)
    t = stats.t.ppf(0.975, num - 2)
    found = fit_line(given, family="vit")
    assert found.slope == pytest.approx(expected.slope)
    assert found.intercept == pytest.approx(expected.intercept)
    assert found.slope_interval == pytest.approx(
        (expected.slope - t * expected.stderr, expected.slope + t * expected.stderr)
    )
    half = t * expected.intercept_stderr
    assert found.intercept_interval == pytest.approx(
        (expected.intercept - half, expected.intercept + half)
    )


def test_intervals_cover_the_true_slope_in_95_percent():
    fits = [fit_line(points(seed, 5), family="vit") for seed in range(400)]
    covered = sum(low <= -0.2 <= high for low, high in (fit.slope_interval for fit in fits))
    assert abs(covered - 380) < 5 * math.sqrt(400 * 0.05 * 0.95)


def test_groups_without_a_line_say_why():
    two = fit_line(points()[:2], family="vit")
    assert (two.slope, two.why_not) == (None, "2 models; a line needs 3")
    assert len(two.points) == 2
    same = fit_line([replace(p, params_m=5.0) for p in points()], family="vit")
    assert same.why_not == "all models have the same number of parameters"
    perfect = fit_line([*points()[:2], ScalingPoint("best", 3.0, 0.0)], family="vit")
    assert perfect.why_not == "best has no errors: the logarithm of 0 is undefined"


def test_other_rows_do_not_count_and_mixtures_are_refused():
    models = [row(model=f"m{i}", params_m=10.0**i, value=0.1 * i) for i in (1, 2, 3)]
    noise = [
        row(model="x", metric="ece"),
        row(model="y", family=None),
        row(model="z", params_m=None),
        row(model="l", level=3.0),
        row(model="n", value=None, flags=("null: missing",)),
    ]

    def fits(rows):
        return scaling_fits(rows, suite="clean", item="all", metric="accuracy")

    (found,) = fits([*models, *noise, models[0]])  # the same row of two files is one model
    assert [point.model for point in found.points] == ["m1", "m2", "m3"]
    with pytest.raises(CasemateError, match="m1 has two values"):
        fits([*models, replace(models[0], value=0.3)])
    with pytest.raises(CasemateError, match="differ in resize"):
        fits(
            [replace(models[0], resize="timm"), *(replace(m, resize="squash") for m in models[1:])]
        )
    with pytest.raises(CasemateError, match="differ in dataset_digest"):
        fits([*models, row(model="other", dataset_digest="f")])
    assert fits(noise[:1]) == []
