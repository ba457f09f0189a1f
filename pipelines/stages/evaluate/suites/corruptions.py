"""Corrupted test items: generated on the fly, or read from a published dataset.

A unit is a block of items under one corruption at all its severities (of a published dataset: at
one severity). All models see the same corrupted images.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.core.errors import CasemateError, at_key
from components.core.statistics import mean_interval
from components.core.units import Unit
from components.data.corruptions import corrupt
from components.data.corruptions.settings import Fidelity, flags_of
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
from components.data.sources.base import Entry, Source
from components.data.sources.corrupted import Variant
from components.data.sources.names import imagenet_synsets
from components.evaluate.corruptions import (
    MISSING_CLASSES,
    corruption_scores,
    not_comparable,
    variants_of_score,
)
from components.evaluate.metrics import ALL, Measurement, MetricRow, Subject, null, rows_of
from components.evaluate.predictions import Predictions, accuracy_measurements, joined
from components.evaluate.settings import CorruptionSuiteSettings, SubsetSettings
from components.evaluate.subsets import choose_items
from pipelines.runtime.progress import say
from pipelines.stages.evaluate.evaluation import Evaluation, blocks, units_of
from pipelines.stages.evaluate.results import (
    SuiteResult,
    comparisons,
    in_order,
    rows_by_model,
    with_models,
)
from pipelines.stages.evaluate.steps import corruption_files
from pipelines.stages.evaluate.suites.clean import clean_predictions
from pipelines.stages.evaluate.worker import EvaluateWorker

Found = Mapping[str, Mapping[Variant, Predictions]]  # by model
Shape = tuple[int, int]  # height and width in pixels
PATH = "evaluate.corruptions.path"
RESIZED = 256  # side of images of which ImageNet-C has the central 224 pixels


@dataclass(frozen=True, slots=True)
class GeneratedTask:
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
    root: Path
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
    reporter = _Reporter(evaluation, settings, found, before, published)
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
    root: Path
    subset: SubsetSettings
    seed: int
    num_chosen: Mapping[Variant, int]
    shape: Shape
    lacks_classes: bool

    @classmethod
    def of(cls, evaluation: Evaluation, settings: CorruptionSuiteSettings) -> "Published":
        """Lists the images; missing variants are told."""
        assert settings.path is not None
        root = Path(settings.path).expanduser().absolute()
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
def _listed(name: str, root: Path, variant: Variant, subset: SubsetSettings, seed: int) -> Listing:
    source = open_variant(name, root, variant, subset=True)
    entries = source.entries()
    by_id = dict(zip(image_ids(variant, entries), entries, strict=True))
    labels = [entry.label for entry in by_id.values()]
    chosen = choose_items(list(by_id), labels, subset, seed=seed)
    return Listing(source, [(image, by_id[image]) for image in chosen], len(set(labels)))


@dataclass(frozen=True)
class _Reporter:
    """The numbers of each model."""

    evaluation: Evaluation
    settings: CorruptionSuiteSettings
    found: Found
    clean: Mapping[str, Predictions]
    published: Published | None

    def flags(self, variant: Variant) -> list[str]:
        """Why accuracies under this variant are not comparable with published ones."""
        if self.published:
            return self.published.flags()
        data = self.evaluation.dataset
        textures = self.settings.textures
        return flags_of(variant[0], height=data.height, width=data.width, textures=textures)

    def rows(self, model: str) -> list[MetricRow]:
        """Accuracies of all variants, then the scores."""
        numbers: list[Measurement] = []
        for variant in self.settings.variants():
            numbers += self._variant(model, variant)
        numbers += self._scores(model)
        return rows_of(self._subject(model), self.evaluation.suite, numbers)

    def _subject(self, model: str) -> Subject:
        data, settings = self.evaluation.dataset, self.settings
        if self.published is None:
            fidelity = settings.fidelity_at(data.height, data.width)
            return self.evaluation.subject(model, fidelity=fidelity)
        digest = corruption_files(settings)["path"]
        fidelity = "released" if settings.source == IMAGENET_C else "raw"
        return self.evaluation.subject(
            model,
            dataset=settings.source,
            dataset_digest=digest,
            fidelity=fidelity,
            resize="squash",
        )

    def _variant(self, model: str, variant: Variant) -> list[Measurement]:
        (name, severity), flags = variant, self.flags(variant)
        own = self.found[model].get(variant)
        if own is None:
            why = f"{self.settings.path} lacks {name}/{severity}"
            return [
                null(item=name, level=severity, metric=metric, why=why)
                for metric in ("accuracy", "top5_accuracy")
            ]
        others = {other: of[variant] for other, of in self.found.items()}
        return [
            *accuracy_measurements(own, item=name, level=severity, flags=flags),
            *comparisons(others, model, item=name, level=severity),
        ]

    def _scores(self, model: str) -> Iterator[Measurement]:
        own = self.found[model]
        flags = sorted({flag for variant in own for flag in self.flags(variant)})
        imagenet = tuple(self.evaluation.dataset.classes) == imagenet_synsets()
        partial = _incomplete(own)
        own = {variant: one for variant, one in own.items() if variant not in partial}
        scores = corruption_scores(
            {variant: float(one.correct.mean()) for variant, one in own.items()},
            clean=self._clean_accuracy(model, next(iter(own.values())).item_ids),
            incomparable=not_comparable(flags, imagenet=imagenet),
            incomplete=partial,
        )
        for name, score in scores.items():
            if score.value is None:
                yield null(item=ALL, metric=name, why=score.reason, flags=flags)
                continue
            low, high, num_items = _interval(own, variants_of_score(name))
            yield Measurement(
                item=ALL, metric=name, value=score.value, n=num_items, lo95=low, hi95=high,
                flags=tuple(flags),
            )  # fmt: skip

    def _clean_accuracy(self, model: str, images: Sequence[str]) -> float | None:
        """Clean accuracy on these images; None where it is not known.

        ImageNet-C is made of crops of 224 pixels after resizing to 256 (Hendrycks & Dietterich
        2019, released code): test items that were fitted otherwise are other images.
        """
        clean = self.clean[model]
        if self.published is None:
            return float(clean.correct.mean())
        origin = self.evaluation.origin
        if origin.fit != "crop" or not origin.resize or not origin.image_size:
            return None
        names = [PurePosixPath(item_id).stem for item_id in clean.item_ids]
        right = dict(zip(names, clean.correct, strict=True))
        wanted = [PurePosixPath(image).stem for image in images]
        is_other = SIDE * origin.resize != RESIZED * origin.image_size or not set(wanted) <= {
            *right
        }
        if is_other or len(right) < len(names):
            return None
        return float(np.mean([right[name] for name in wanted]))


def _incomplete(own: Mapping[Variant, Predictions]) -> dict[Variant, str]:
    """Variants with other images than most: a mean over all would mix images."""
    counts = Counter(one.item_ids for one in own.values())
    usual = max(counts, key=lambda ids: (counts[ids], len(ids)))
    return {
        variant: f"{len(one.item_ids)} images, other variants {len(usual)}"
        for variant, one in own.items()
        if one.item_ids != usual
    }


def _interval(
    own: Mapping[Variant, Predictions], variants: Sequence[Variant] | None
) -> tuple[float | None, float | None, int | None]:
    """The interval of a mean accuracy over the same items, with their number."""
    if variants is None:
        return None, None, None
    parts = [own[variant] for variant in variants]
    shares: NDArray[np.float64] = np.mean([part.correct for part in parts], axis=0)
    return *mean_interval(shares), len(shares)


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
