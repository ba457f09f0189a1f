"""Studies of loaded models in this process."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from components.core.settings import RUN_SEED, Settings, plain
from pipelines.api.evaluations import MAIN, check_models, evaluated
from pipelines.api.models import check_seed
from pipelines.api.tables import frame

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from torch import Tensor

    from components.core.types import Array
    from components.core.units import Unit
    from components.data.memory import MemoryDataset
    from components.models.pixels import PixelModel
    from pipelines.recipe.schema.analyze import AnalyzeSection


@dataclass(frozen=True, slots=True)
class AnalysisReport:
    """Results of all studies: `metrics` has one row per number, as `metrics.parquet` of a step.

    `tables`, `arrays` and `details` are by study, then by the names that a step gives its files
    (without the ending).
    """

    metrics: "pd.DataFrame"
    tables: "dict[str, dict[str, pd.DataFrame]]"
    arrays: "dict[str, dict[str, Array]]"
    details: dict[str, dict[str, Any]]


def analyze(
    model: "PixelModel | Mapping[str, PixelModel]",
    images: "Tensor",
    labels: "Tensor",
    *,
    classes: Sequence[str] | None = None,
    seed: int = RUN_SEED,
    item_ids: Sequence[str] | None = None,
    micro_batch: int | None = None,
    **studies: "Mapping[str, Any] | Settings",
) -> AnalysisReport:
    """Analyze one model, or several by name.

    Studies (`correlation`, `lesions`, `restricted_attention`, `gaps`, `perturbations`,
    `accumulation`) and `blocks` are written as in a recipe (`{}`: its defaults) or as settings of
    `components.analyze.settings`. Images are uint8 or floats on the 256 levels of [0, 1].

    >>> from pipelines import api
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> import timm
    >>> tiny = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 1, "num_classes": 10}
    >>> network = timm.models.VisionTransformer(img_size=8, **tiny)
    >>> model = api.load_model(network, image_size=8)
    >>> images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    >>> labels = torch.arange(4)
    >>> report = api.analyze(model, images, labels, correlation={}, lesions={})
    >>> report.arrays["correlation"]["matrices/model.cls"].shape
    (2, 2)
    """
    from components.core.arithmetic import EXACT, using
    from components.data.memory import MemoryDataset
    from pipelines.stages.analyze.studies import study_of

    models = dict(model) if isinstance(model, Mapping) else {MAIN: model}
    check_models(models)
    check_seed(seed)
    section = _section(studies, models, micro_batch=micro_batch)
    first = next(iter(models.values()))
    dataset = MemoryDataset.of(
        images, labels, num_classes=first.spec.num_classes, item_ids=item_ids, classes=classes
    )
    for one in models.values():
        one.spec.check_image((dataset.channels, dataset.height, dataset.width))
        one.spec.check_classes(len(dataset.classes))
    run = _InProcess(models, dataset, section, seed)
    with using(EXACT):
        found = {study: study_of(study)(run.of(study)) for study in section.studies()}
    return AnalysisReport(
        metrics=frame(asdict(row) for result in found.values() for row in result.rows),
        tables={
            study: {name.removesuffix(".parquet"): t.to_pandas() for name, t in one.tables.items()}
            for study, one in found.items()
        },
        arrays={
            study: {name.removesuffix(".npy"): array for name, array in one.arrays.items()}
            for study, one in found.items()
        },
        details={study: dict(one.details) for study, one in found.items()},
    )


class _InProcess:
    """Computes the units of all studies here."""

    def __init__(
        self,
        models: "Mapping[str, PixelModel]",
        dataset: "MemoryDataset",
        section: "AnalyzeSection",
        seed: int,
    ) -> None:
        from pipelines.stages.analyze.worker import AnalyzeWorker
        from pipelines.stages.evaluate.worker import EvaluateConfig

        config = EvaluateConfig(dataset, dict(models), section.micro_batch, seed)
        device = str(next(iter(models.values())).mean.device)
        self.worker: AnalyzeWorker = AnalyzeWorker(config, device)
        self.models = {name: evaluated(name, one) for name, one in models.items()}
        self.dataset, self.section, self.seed = dataset, section, seed

    def of(self, study: str) -> Any:
        """The analysis of one study."""
        from pipelines.stages.analyze.analysis import Analysis
        from pipelines.stages.evaluate.evaluation import DataOrigin, TestItems, items_of

        test, how = self.dataset.test, getattr(self.section, study)
        labels, items = test.labels.tolist(), TestItems((), (), ())
        if hasattr(how, "subset"):
            items = items_of(test.item_ids, labels, how.subset, seed=self.seed, key=study)
        judges = self.section.perturbations.judge_models if self.section.perturbations else ()
        return Analysis(
            study=study,
            section=self.section,
            analyzed=tuple(self.section.models or self.models),
            judges=judges if study == "perturbations" else (),
            dataset=self.dataset,
            origin=DataOrigin("memory", "stored", None, None),
            models=self.models,
            items=items,
            seed=self.seed,
            execute=lambda units: self._execute(study, units),
        )

    def _execute(self, study: str, units: "Sequence[Unit]") -> "Iterator[pa.Table]":
        from pipelines.runtime import progress

        with progress.bar(f"analyze.{study}", total=len(units), unit="units") as bar:
            for unit in units:
                yield self.worker(unit.payload)
                bar.advance(1)


def _section(
    studies: Mapping[str, Any], models: Mapping[str, object], *, micro_batch: int | None
) -> "AnalyzeSection":
    """The studies, validated as in a recipe."""
    from pydantic import ValidationError

    from components.core.problems import RecipeError
    from components.core.user_code import reading
    from pipelines.recipe.explain import explain
    from pipelines.recipe.schema.analyze import AnalyzeSection

    values: dict[str, Any] = {
        name: plain(one) if isinstance(one, Settings) else one for name, one in studies.items()
    }
    if micro_batch is not None:
        values["micro_batch"] = micro_batch
    with reading(base=Path(), trusted=True):
        try:
            section = AnalyzeSection.model_validate(values)
        except ValidationError as error:
            raise RecipeError("analyze", explain(AnalyzeSection, values, error)) from None
    how = section.perturbations
    if section.other_models:
        remedy = "are for recipes; load them and give a dict of models"
        raise CasemateError("other_models", ", ".join(section.other_models), remedy)
    if how and how.judges:
        remedy = "are for recipes; load them, give a dict of models, and write judge_models"
        raise CasemateError("perturbations.judges", ", ".join(how.judges), remedy)
    for name in (*(section.models or ()), *(how.judge_models if how else ())):
        if name not in models:
            raise CasemateError("model", name, f"is not among {', '.join(models)}")
    return section
