"""Shifted datasets: accuracy on their images and on clean ones of the same classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.core.errors import CasemateError
from components.core.units import Unit
from components.data.fitting import Fitting
from components.data.prepared import PreparedDataset
from components.data.sources import open_source
from components.data.sources.base import Entry
from components.evaluate.metrics import MetricRow, rows_of
from components.evaluate.settings import PREPARED, ShiftSuiteSettings, SubsetSettings
from components.evaluate.shifts import ClassMap, class_map_of, measurements, shift_predictions
from components.evaluate.subsets import choose_items
from pipelines.recipe.evaluation import other_size
from pipelines.stages.evaluate.evaluation import Evaluation, blocks, resize_name, units_of
from pipelines.stages.evaluate.results import (
    SuiteResult,
    constant,
    in_order,
    rows_by_model,
    rows_where,
    verdict_comparisons,
    with_models,
)
from pipelines.stages.evaluate.steps import shifted_files
from pipelines.stages.evaluate.worker import EvaluateWorker, PlacesTask

SHIFTED, CLEAN = "shifted", "clean"  # values of the column `images`


class ShiftedItems:
    """Images of a shifted dataset, fitted to the models, and their labels in the dataset."""

    def __init__(self, settings: ShiftSuiteSettings, fitting: Fitting) -> None:
        self.settings, self.fitting = settings, fitting
        self.entries: list[Entry] = []
        if settings.source == PREPARED:
            assert settings.path is not None
            dataset = PreparedDataset.open(Path(settings.path).expanduser().absolute())
            self.shape = (dataset.channels, dataset.height, dataset.width)
            self.classes: Sequence[str] = dataset.classes
            self.split = dataset.on_demand("test")
            self.item_ids, self.labels = dataset.listing("test")
            return
        self.source = open_source(settings.source, path=settings.path, options=settings.options)
        self.classes = self.source.classes
        found = self.source.entries()
        self.entries = [entry for entry in found if entry.split_hint == "test"] or found
        self.item_ids = [entry.item_id for entry in self.entries]
        self.labels = [entry.label for entry in self.entries]

    def images(self, places: Sequence[int]) -> Tensor:
        """uint8 (N, C, H, W)."""
        if not self.entries:
            return self.split.rows(torch.tensor(places)).images
        chosen = [self.entries[place] for place in places]
        pixels = [self.fitting.apply(self.source.decode(e), item_id=e.item_id) for e in chosen]
        return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class ShiftTask(PlacesTask):
    """All models on these items of a shifted dataset."""

    name: str
    settings: ShiftSuiteSettings
    fitting: Fitting
    class_map: ClassMap
    places: tuple[int, ...]

    def run(self, worker: EvaluateWorker) -> pa.Table:
        items: ShiftedItems = worker.once(
            self.name, lambda: ShiftedItems(self.settings, self.fitting)
        )
        item_ids = [items.item_ids[place] for place in self.places]
        labels = torch.tensor([items.labels[place] for place in self.places])
        x = worker.pixels(items.images(self.places))
        tables = with_models(
            (
                model,
                shift_predictions(
                    item_ids, labels, worker.logits(model, x, item_ids), self.class_map
                ),
            )
            for model in worker.models
        )
        return _named(tables, self.name, SHIFTED)


@dataclass(frozen=True)
class CleanShiftTask(PlacesTask):
    """All models on these test items, with the classes of every shifted dataset."""

    places: tuple[int, ...]
    class_maps: Mapping[str, ClassMap]  # by shift

    def run(self, worker: EvaluateWorker) -> pa.Table:
        items = worker.items(self.places)
        x, tables = worker.pixels(items.images), []
        for model in worker.models:
            logits = worker.logits(model, x, items.item_ids)
            for name, class_map in self.class_maps.items():
                own = shift_predictions(items.item_ids, items.labels, logits, class_map.of_clean())
                tables.append(_named(with_models([(model, own)]), name, CLEAN))
        return pa.concat_tables(tables)


def _named(table: pa.Table, shift: str, images: str) -> pa.Table:
    return constant(constant(table, 1, "shift", shift), 2, "images", images)


def evaluate(evaluation: Evaluation) -> SuiteResult:
    """All models on every shifted dataset."""
    shifts = evaluation.section.shifts
    opened = {name: _opened(evaluation, name) for name in shifts}
    maps = {name: _class_map(evaluation, name, items) for name, items in opened.items()}
    units = [u for name in shifts for u in _units(evaluation, name, opened[name], maps[name])]
    tasks = [
        (f"{len(block)} clean items", CleanShiftTask(block, maps))
        for block in blocks(evaluation.items.places)
    ]
    table = evaluation.run([*units, *units_of("clean", tasks)])
    rows: list[MetricRow] = []
    for name, shift in shifts.items():
        rows += _rows(evaluation, name, shift, rows_where(table, "shift", name), maps[name])
    return SuiteResult(
        rows=rows,
        predictions=in_order(table, "model", "shift", "images", "item_id"),
        headlines=[(f"shift {name}, masked", name, "masked") for name in shifts],
        num_items=len(evaluation.items),
    )


def _fitting(evaluation: Evaluation, shift: ShiftSuiteSettings) -> Fitting:
    data, dataset = evaluation.origin, evaluation.dataset
    fit, resize = (shift.fit, shift.resize) if shift.fit else (data.fit, data.resize)
    return Fitting(dataset.height, fit, dataset.channels, resize)


def _opened(evaluation: Evaluation, name: str) -> ShiftedItems:
    """A shifted dataset whose images the models take."""
    shift, dataset = evaluation.section.shifts[name], evaluation.dataset
    key = f"evaluate.shifts.{name}"
    try:
        items = ShiftedItems(shift, _fitting(evaluation, shift))
    except CasemateError as error:
        inner = error.key.removeprefix("data.")
        raise CasemateError(f"{key}.{inner}", error.value, error.remedy) from error
    wanted = (dataset.channels, dataset.height, dataset.width)
    if shift.source == PREPARED and items.shape != wanted:
        raise CasemateError(f"{key}.path", shift.path, other_size(items.shape, wanted))
    return items


def _class_map(evaluation: Evaluation, name: str, items: ShiftedItems) -> ClassMap:
    shift, classes = evaluation.section.shifts[name], evaluation.dataset.classes
    try:
        return class_map_of(
            shift.source,
            items.classes,
            num_classes=len(classes),
            model_classes=classes,
            class_map=shift.class_map,
        )
    except CasemateError as error:
        inner = error.key.removeprefix("shifts")
        raise CasemateError(f"evaluate.shifts.{name}{inner}", error.value, error.remedy) from error


def _units(
    evaluation: Evaluation, name: str, items: ShiftedItems, class_map: ClassMap
) -> list[Unit]:
    """Blocks of the chosen items whose class the models have."""
    shift = evaluation.section.shifts[name]
    kept = (class_map.model_labels(items.labels) >= 0).tolist()
    places = {
        item: i for i, (item, keep) in enumerate(zip(items.item_ids, kept, strict=True)) if keep
    }
    subset = SubsetSettings(num_items=shift.num_items)
    labels = [items.labels[place] for place in places.values()]
    chosen = choose_items(list(places), labels, subset, seed=evaluation.seed)
    if not chosen:
        raise CasemateError(f"evaluate.shifts.{name}", "", "has no items of the models' classes")
    fitting = _fitting(evaluation, shift)
    tasks = [
        (f"{name}, {len(block)} items", ShiftTask(name, shift, fitting, class_map, block))
        for block in blocks([places[item] for item in chosen])
    ]
    return units_of(f"shift-{name}", tasks)


def _rows(
    evaluation: Evaluation,
    name: str,
    shift: ShiftSuiteSettings,
    table: pa.Table,
    class_map: ClassMap,
) -> list[MetricRow]:
    """The numbers of all models on one shifted dataset."""
    shifted = rows_by_model(rows_where(table, "images", SHIFTED), evaluation.models)
    clean = rows_by_model(rows_where(table, "images", CLEAN), evaluation.models)
    digest = str(shifted_files(f"evaluate.shifts.{name}.path", shift)["content"])
    fitting = _fitting(evaluation, shift)
    rows: list[MetricRow] = []
    for model in evaluation.models:
        subject = evaluation.subject(
            model,
            dataset=shift.source,
            dataset_digest=digest,
            resize="stored"
            if shift.source == PREPARED
            else resize_name(fitting.fit, fitting.resize, fitting.image_size),
        )
        numbers = measurements(shifted[model], clean[model], class_map, item=name)
        for metric, column in (("masked", "masked_prediction"), ("unmasked", "prediction")):
            verdicts = {other: _verdicts(own, column) for other, own in shifted.items()}
            numbers += verdict_comparisons(verdicts, model, item=f"{name}/{metric}")
        rows += rows_of(subject, evaluation.suite, numbers)
    return rows


def _verdicts(rows: pa.Table, column: str) -> NDArray[np.bool_]:
    """(N,) verdicts in the order of the item ids."""
    ordered = rows.sort_by("item_id")
    found: NDArray[np.bool_] = np.asarray(ordered[column]) == np.asarray(ordered["label"])
    return found
