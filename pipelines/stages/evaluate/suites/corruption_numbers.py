"""The numbers of corrupted test items: accuracy per variant, means, corruption errors."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from components.core.statistics import mean_interval
from components.data.corruptions.settings import flags_of
from components.data.corruptions.stored import IMAGENET_C, SIDE
from components.data.sources.corrupted import Variant
from components.data.sources.names import imagenet_synsets
from components.evaluate.corruptions import (
    corruption_scores,
    not_comparable,
    variants_of_score,
)
from components.evaluate.metrics import ALL, Measurement, MetricRow, Subject, null, rows_of
from components.evaluate.predictions import Predictions, accuracy_measurements
from components.evaluate.settings import CorruptionSuiteSettings
from pipelines.stages.evaluate.evaluation import DataOrigin, Evaluation
from pipelines.stages.evaluate.results import comparisons
from pipelines.stages.evaluate.steps import corruption_files

Found = Mapping[str, Mapping[Variant, Predictions]]  # by model
RESIZED = 256  # side of images of which ImageNet-C has the central 224 pixels


@dataclass(frozen=True)
class Reporter:
    """The numbers of each model."""

    evaluation: Evaluation
    settings: CorruptionSuiteSettings
    found: Found
    clean: Mapping[str, Predictions]
    published_flags: Sequence[str] | None  # of a published dataset; None: generated

    def flags(self, variant: Variant) -> list[str]:
        """Why accuracies under this variant are not comparable with published ones."""
        if self.published_flags is not None:
            return list(self.published_flags)
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
        if self.published_flags is None:
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
        clean = self.clean[model]
        if self.published_flags is None:  # the same items
            return float(clean.correct.mean())
        return clean_accuracy_on(images, clean, self.evaluation.origin)


def clean_accuracy_on(
    images: Sequence[str], clean: Predictions, origin: DataOrigin
) -> float | None:
    """Clean accuracy on the images of ImageNet-C; None unless all are among the test items.

    They are the central 224 pixels after resizing to 256 (Hendrycks & Dietterich 2019, released
    code): test items that were fitted otherwise are other images.
    """
    if origin.fit != "crop" or not origin.resize or not origin.image_size:
        return None
    names = [PurePosixPath(item_id).stem for item_id in clean.item_ids]
    right = dict(zip(names, clean.correct, strict=True))
    wanted = [PurePosixPath(image).stem for image in images]
    is_cropped_alike = SIDE * origin.resize == RESIZED * origin.image_size
    if not is_cropped_alike or len(right) < len(names) or not right.keys() >= set(wanted):
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
