"""Corrupted test items: generated on the fly, or read from a published dataset.

A unit is a block of items under one corruption at all its severities (of a published dataset: at
one severity). All models see the same corrupted images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.core.errors import CasemateError, at_key
from components.core.units import Unit
from components.data.corruptions import corrupt
from components.data.corruptions.settings import Fidelity
from components.data.corruptions.stored import (
    IMAGENET_C,
    SIDE,
    image_ids,
    in_words,
    labels_among,
    open_variant,
    stored_variants,
)
from components.data.fitting import Fitting, to_channels
from components.data.places import Place, place_of
from components.data.sources.base import Entry, Source
from components.data.sources.corrupted import Variant
from components.evaluate.corruptions import (
    MISSING_CLASSES,
)
from components.evaluate.metrics import ALL
from components.evaluate.predictions import Predictions, joined
from components.evaluate.settings import CorruptionSuiteSettings, SubsetSettings
from components.evaluate.subsets import choose_items
from pipelines.runtime.progress import say
from pipelines.stages.evaluate.evaluation import Evaluation, blocks, units_of
from pipelines.stages.evaluate.results import (
    SuiteResult,
    in_order,
    rows_by_model,
    with_models,
)
from pipelines.stages.evaluate.suites.clean import clean_predictions
from pipelines.stages.evaluate.suites.corruption_numbers import Reporter
from pipelines.stages.evaluate.worker import EvaluateWorker, PlacesTask

Shape = tuple[int, int]  # height and width in pixels
PATH = "evaluate.corruptions.path"


@dataclass(frozen=True, slots=True)
class GeneratedTask(PlacesTask):
    """All models on these test items under one corruption."""

    places: tuple[int, ...]
    name: str
    severities: tuple[int, ...]
    fidelity: Fidelity
    textures: str | None

    def run(self, worker: EvaluateWorker) -> pa.Table:
        items = worker.items(self.places)
        images = _in_colour(items.images)
        tables = []
        for severity in self.severities:
            changed = corrupt(
                images.to(worker.device),
                name=self.name,
                severity=severity,
                seed=worker.config.seed,
                item_ids=items.item_ids,
                fidelity=self.fidelity,
                textures=self.textures,
            )
            fitted = _as_model_images(changed, channels=items.images.shape[1])
            variant = (self.name, severity)
            tables.append(_predictions(worker, variant, items.item_ids, items.labels, fitted))
        return pa.concat_tables(tables)


@dataclass(frozen=True, slots=True)
class StoredTask:
    """All models on images of a published dataset: numbers `start` to `stop` of those chosen."""

    source: str
    root: Place
    variant: Variant
    subset: SubsetSettings
    shape: Shape
    start: int
    stop: int

    def run(self, worker: EvaluateWorker) -> pa.Table:
        with at_key(PATH):
            listing = _listed(self.source, self.root, self.variant, self.subset, worker.config.seed)
            part = listing.chosen[self.start : self.stop]
            images = [self._image(listing.source, entry, worker) for _, entry in part]
        stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
        to_model = labels_among(self.source, worker.dataset.classes)
        labels = torch.tensor([to_model[entry.label] for _, entry in part])
        return _predictions(worker, self.variant, [name for name, _ in part], labels, stacked)

    @property
    def num_items(self) -> int:
        return self.stop - self.start

    def _image(self, source: Source, entry: Entry, worker: EvaluateWorker) -> NDArray[np.uint8]:
        pixels = source.decode(entry)
        if pixels.shape[:2] != self.shape:
            sizes = ["x".join(map(str, shape)) for shape in (pixels.shape[:2], self.shape)]
            remedy = f"is {sizes[0]} pixels, other images are {sizes[1]}"
            raise CasemateError(PATH, entry.item_id, remedy)
        fitting = Fitting(worker.dataset.height, "squash", worker.dataset.channels)
        return fitting.apply(pixels, item_id=entry.item_id)


def evaluate(evaluation: Evaluation) -> SuiteResult:
    """All models under every variant that can be generated or is there."""
    settings = evaluation.section.corruptions
    assert settings is not None
    published = None if settings.source == "generate" else Published.of(evaluation, settings)
    units = published.units() if published else generated_units(evaluation, settings)
    table = evaluation.run(units)
    found = {
        model: _by_variant(rows) for model, rows in rows_by_model(table, evaluation.models).items()
    }
    before = clean_predictions(evaluation.clean(), list(evaluation.models))
    flags = published.flags() if published else None
    reporter = Reporter(evaluation, settings, found, before, flags)
    return SuiteResult(
        rows=[row for model in found for row in reporter.rows(model)],
        predictions=in_order(table, "model", "corruption", "severity", "item_id"),
        headlines=[("corruptions, mean95", ALL, "mean95"), ("corruptions, mean75", ALL, "mean75")],
        num_items=max(len(one) for own in found.values() for one in own.values()),
        flags=[flag for variant in settings.variants() for flag in reporter.flags(variant)],
    )


def generated_units(evaluation: Evaluation, settings: CorruptionSuiteSettings) -> list[Unit]:
    """Every block of items under every corruption."""
    data = evaluation.dataset
    textures = settings.textures
    if textures is not None:
        textures = str(Path(textures).expanduser().absolute())
    severities = tuple(sorted(set(settings.severities)))
    found: list[Unit] = []
    for name in settings.chosen_names():
        own = textures if name == "frost" else None
        tasks = [
            (
                f"{name}, {len(block)} items",
                GeneratedTask(
                    block, name, severities, settings.fidelity_at(data.height, data.width), own
                ),
            )
            for block in blocks(evaluation.items.places)
        ]
        found += units_of(name, tasks)
    return found


@dataclass(frozen=True, slots=True)
class Listing:
    """A variant and its chosen images: the same ones in all variants of a whole dataset."""

    source: Source
    chosen: list[tuple[str, Entry]]
    num_classes: int  # that have an image


@dataclass(frozen=True, slots=True)
class Published:
    """A published dataset: the variants that are there, the size of images, missing classes."""

    settings: CorruptionSuiteSettings
    root: Place
    subset: SubsetSettings
    seed: int
    num_chosen: Mapping[Variant, int]
    shape: Shape
    lacks_classes: bool

    @classmethod
    def of(cls, evaluation: Evaluation, settings: CorruptionSuiteSettings) -> "Published":
        """Lists the images; missing variants are told."""
        assert settings.path is not None
        root = place_of(settings.path)
        subset, seed = evaluation.section.subset, evaluation.seed
        num_chosen: dict[Variant, int] = {}
        fewest, shape = len(evaluation.dataset.classes), None
        with at_key(PATH):
            present = set(stored_variants(settings.source, root))
            for variant in settings.variants():
                if variant in present:
                    listing = _listed(settings.source, root, variant, subset, seed)
                    num_chosen[variant] = len(listing.chosen)
                    fewest = min(fewest, listing.num_classes)
                    shape = shape or listing.source.decode(listing.chosen[0][1]).shape[:2]
            if shape is None:
                raise CasemateError(PATH, settings.path, f"lacks {in_words(settings.variants())}")
        if missing := [variant for variant in settings.variants() if variant not in present]:
            lacks = f"{settings.path} lacks {in_words(missing)}"
            say(f"{evaluation.step}: {lacks}; scores that need them are null")
        lacks_classes = fewest < len(evaluation.dataset.classes)
        return cls(settings, root, subset, seed, num_chosen, shape, lacks_classes)

    def units(self) -> list[Unit]:
        """Every block of images of every variant."""
        found: list[Unit] = []
        for variant, count in self.num_chosen.items():
            tasks = [
                (
                    f"{variant[0]}/{variant[1]}, {len(block)} images",
                    StoredTask(
                        self.settings.source, self.root, variant, self.subset, self.shape,
                        block[0], block[-1] + 1,
                    ),
                )
                for block in blocks(range(count))
            ]  # fmt: skip
            found += units_of(f"{variant[0]}-{variant[1]}", tasks)
        return found

    def flags(self) -> list[str]:
        """Why accuracies are not comparable with published ones."""
        is_small = self.settings.source == IMAGENET_C and self.shape != (SIDE, SIDE)
        found = ["nonstandard_resolution"] if is_small else []
        return [*found, *([MISSING_CLASSES] if self.lacks_classes else [])]


@lru_cache(maxsize=2)
def _listed(name: str, root: Place, variant: Variant, subset: SubsetSettings, seed: int) -> Listing:
    source = open_variant(name, root, variant, subset=True)
    entries = source.entries()
    by_id = dict(zip(image_ids(variant, entries), entries, strict=True))
    labels = [entry.label for entry in by_id.values()]
    chosen = choose_items(list(by_id), labels, subset, seed=seed)
    return Listing(source, [(image, by_id[image]) for image in chosen], len(set(labels)))


def _predictions(
    worker: EvaluateWorker,
    variant: Variant,
    item_ids: Sequence[str],
    labels: Tensor,
    images: Tensor,
) -> pa.Table:
    """The predictions of all models on uint8 images (N, C, H, W) of one variant."""
    x, y = worker.pixels(images), labels.to(worker.device)
    tables = with_models(
        (model, Predictions.of_logits(item_ids, y, worker.logits(model, x, item_ids)).table())
        for model in worker.models
    )
    name, severity = variant
    named = tables.add_column(1, "corruption", pa.array([name] * len(tables), pa.string()))
    return named.add_column(2, "severity", pa.array([severity] * len(tables), pa.int8()))


def _in_colour(images: Tensor) -> Tensor:
    """(N, H, W, 3) of uint8 (N, C, H, W); one channel is repeated."""
    coloured = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
    return coloured.permute(0, 2, 3, 1).contiguous()


def _as_model_images(images: Tensor, *, channels: int) -> Tensor:
    """(N, C, H, W) of uint8 (N, H, W, 3); to one channel by luma."""
    if channels == 3:
        return images.permute(0, 3, 1, 2)
    grey = [to_channels(image, channels=1) for image in images.cpu().numpy()]
    return torch.from_numpy(np.stack(grey)).permute(0, 3, 1, 2)


def _by_variant(rows: pa.Table) -> dict[Variant, Predictions]:
    """Predictions of one model by variant, each sorted by item id."""
    found = {}
    for key in rows.group_by(["corruption", "severity"]).aggregate([]).to_pylist():
        name, severity = key["corruption"], key["severity"]
        same = pc.and_(pc.equal(rows["corruption"], name), pc.equal(rows["severity"], severity))
        found[name, severity] = joined([Predictions.of_table(rows.filter(same))])
    return found
