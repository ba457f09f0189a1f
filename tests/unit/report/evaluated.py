"""A made-up evaluation: real measurements of invented verdicts, for the chapters to show."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from components.attacks.settings import SpatialSettings
from components.attacks.spatial import grid_poses
from components.core.statistics import mean_interval
from components.core.tables import write_table
from components.data.corruptions.settings import CORRUPTIONS
from components.data.sources.names import SEVERITIES
from components.evaluate import calibration, predictions, shape_bias, shifts, spatial, transfer
from components.evaluate.corruptions import corruption_scores, not_comparable
from components.evaluate.metrics import (
    Measurement,
    MetricRow,
    Subject,
    null,
    rows_of,
    share,
    write_metrics,
)
from components.evaluate.predictions import Predictions
from components.evaluate.settings import TransferSuiteSettings

CLASSES = ("airplane", "bear", "cat", "dog")
NUM_ITEMS = 40
GRID = SpatialSettings(max_shift=2.0, num_shifts=3, max_angle=30.0, num_angles=5)
MODELS = {
    "vit-b": ("vit", 86.0, 0.86),
    "vit-l": ("vit", 307.0, 0.9),
    "rn-50": ("resnet", 25.5, 0.8),
}
SIZES = {"vit-b": (3, 8, 8), "vit-l": (3, 8, 8), "rn-50": (3, 16, 16)}


def generator(*words: object) -> np.random.Generator:
    """Random numbers that depend on these words alone."""
    return np.random.default_rng([sum(map(ord, str(word))) for word in words])


def held(rate: float, num_items: int, *words: object) -> np.ndarray:
    return generator(rate, *words).random(num_items) < rate


def subject(model: str, **changes: object) -> Subject:
    family, params, _ = MODELS[model]
    values = {
        "model": model, "model_digest": f"{model:0<64}", "family": family, "arch": f"{family}_arch",
        "params_m": params, "gmacs": params / 5, "pretrain": "in21k", "recipe": "made-up",
        "dataset": "made", "dataset_digest": "d" * 64, "seed": 7, "resize": "squash",
        "fidelity": None,
    }  # fmt: skip
    return Subject(**{**values, **changes})


def predicted(model: str) -> Predictions:
    labels = np.arange(NUM_ITEMS) % len(CLASSES)
    right = held(MODELS[model][2], NUM_ITEMS, model)
    guesses = np.where(right, labels, (labels + 1) % len(CLASSES))
    confidence = generator(model, "sure").uniform(0.3, 1, NUM_ITEMS)
    ids = tuple(f"made-{i:03d}" for i in range(NUM_ITEMS))
    return Predictions(ids, labels, guesses, right | held(0.5, NUM_ITEMS, "top"), confidence)


def clean_measurements(model: str) -> list[Measurement]:
    found = predicted(model)
    rows = predictions.accuracy_measurements(found, item="all")
    rows += calibration.measurements(found, item="all", num_bins=10)
    rows += predictions.class_accuracy(found, (*CLASSES, "never"))
    for rival in MODELS:
        if rival != model:
            rows += predictions.comparison_measurements(
                found, predicted(rival), rival=rival, item="all"
            )
    return rows


def corruption_measurements(model: str, names: Iterable[str]) -> list[Measurement]:
    accuracy, verdicts, rows = {}, [], []
    for name in names:
        for level in SEVERITIES:
            right = held(MODELS[model][2] - 0.1 * level, NUM_ITEMS, model, name)
            one = share(right, item=name, level=level, flags=("procedural_frost",))
            accuracy[name, level] = one.value
            verdicts.append(right)
            rows.append(one)
    why = not_comparable(("procedural_frost",), imagenet=True)
    scores = corruption_scores(accuracy, clean=MODELS[model][2], incomparable=why)
    for name, score in scores.items():
        if score.value is None:
            rows.append(null(item="all", metric=name, why=score.reason))
            continue
        low, high = mean_interval(np.mean(verdicts, axis=0)) if name == "mean75" else (None, None)
        one = Measurement(
            item="all", metric=name, value=score.value, n=NUM_ITEMS, lo95=low, hi95=high
        )
        rows.append(one)
    return rows


def shift_measurements(model: str) -> list[Measurement]:
    def table(rate: float, word: str) -> pa.Table:
        labels = np.arange(NUM_ITEMS) % 3
        masked = np.where(held(rate, NUM_ITEMS, model, word), labels, 3)
        every = np.where(held(rate - 0.1, NUM_ITEMS, model, word), labels, 3)
        ids = [f"{word}-{i}" for i in range(NUM_ITEMS)]
        return pa.table([ids, labels, masked, every], schema=shifts.SCHEMA)

    kept = shifts.named_map(CLASSES, CLASSES, class_map={"dog": None})
    rate = MODELS[model][2]
    found = shifts.measurements(table(rate - 0.3, "r"), table(rate, "c"), kept, item="renditions")
    return found + shifts.measurements(table(rate - 0.5, "a"), None, kept, item="hard")


def shape_measurements(model: str) -> list[Measurement]:
    stimuli = [shape_bias.Stimulus(f"{i}", i % 16, (i % 16 + i // 16) % 16) for i in range(4 * 16)]
    by_shape = held(0.5, len(stimuli), model, "shape")
    decisions = np.array(
        [s.shape if own else s.texture for s, own in zip(stimuli, by_shape, strict=True)]
    )
    decisions[::5] = 3
    return shape_bias.measurements(stimuli, decisions)


def transfer_measurements() -> dict[str, list[Measurement]]:
    how, labels, rows = TransferSuiteSettings(), np.arange(NUM_ITEMS) % len(CLASSES), []

    def add(attack: str, source: str | None, target: str, rate: float) -> None:
        right = held(rate, NUM_ITEMS, attack, source, target)
        for i in range(NUM_ITEMS):
            guess = int(labels[i]) if right[i] else 9
            rows.append((f"made-{i:03d}", int(labels[i]), attack, source, target, guess))

    for target in MODELS:
        add("clean", None, target, MODELS[target][2])
        for source in MODELS:
            for attack, own in (("fgsm", 0.3), ("pgd", 0.1)):
                if SIZES[source] == SIZES[target]:
                    add(attack, source, target, own if source == target else 0.7)
    columns = [
        pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), transfer.SCHEMA, strict=True)
    ]
    table = pa.Table.from_arrays(columns, schema=transfer.SCHEMA)
    return transfer.measurements(table, SIZES, how)


def spatial_results(model: str, *, full: bool) -> pa.Table:
    poses = grid_poses(GRID)
    failed = generator(model, "pose").random((NUM_ITEMS, len(poses))) < 0.03
    failed |= (
        np.array([abs(p.angle) > 20 and p.right > 0 for p in poses])
        & (np.arange(NUM_ITEMS) % 3 == 0)[:, None]
    )
    right = ~failed[:, len(poses) // 2]
    rows = [
        {
            "item_id": f"made-{i:03d}", "label": i % len(CLASSES), "clean_correct": bool(right[i]),
            "survived": not failed[i].any(), "first_fail": -1, "num_queries": len(poses),
            **({"worst_loss": 1.0, "worst_cell": int(failed[i].argmax()),
                "failures": np.packbits(failed[i]).tobytes()} if full else {}),
        }
        for i in range(NUM_ITEMS)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=spatial.SCHEMA)


@cache
def made_rows(*, full: bool = True) -> tuple[MetricRow, ...]:
    """The rows of all suites for three models."""
    rows, between = [], transfer_measurements()
    for model in MODELS:
        names = [n for n in CORRUPTIONS if n != "spatter"] if model == "rn-50" else CORRUPTIONS
        measured = {
            "clean": clean_measurements(model),
            "corruptions": corruption_measurements(model, names),
            "shifts": shift_measurements(model),
            "shape_bias": shape_measurements(model),
            "transfer": between[model],
            "spatial": spatial.measurements(spatial_results(model, full=full), GRID),
        }
        for suite, found in measured.items():
            fidelity = "released" if suite == "corruptions" else None
            rows += rows_of(subject(model, fidelity=fidelity), suite, found)
    return tuple(rows)


@cache
def made_failures() -> dict[str, pa.Table]:
    """The failure maps of all models."""
    return {m: spatial.failure_map(spatial_results(m, full=True), GRID) for m in MODELS}


def write_evaluation(root: Path) -> dict[str, Path]:
    """The finished steps of all suites, by name."""
    found = {}
    for suite in sorted({row.suite for row in made_rows()}):
        folder = root / f"evaluate.{suite}-0"
        folder.mkdir(parents=True)
        own = [row for row in made_rows() if row.suite == suite]
        write_metrics(folder / "metrics.parquet", own)
        found[f"evaluate.{suite}"] = folder
    tables = [
        table.append_column("model", pa.array([model] * len(table)))
        for model, table in made_failures().items()
    ]
    write_table(found["evaluate.spatial"] / "failure_map.parquet", pa.concat_tables(tables))
    return found
