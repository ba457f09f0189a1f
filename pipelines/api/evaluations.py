"""Evaluation suites on loaded models in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from components.core.settings import RUN_SEED
from pipelines.api.in_process import InProcess, dataset_of, models_by_name, section_of
from pipelines.api.models import check_seed
from pipelines.api.tables import frame

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from components.evaluate.settings import (
        CorruptionSuiteSettings,
        SpatialSuiteSettings,
        TransferSuiteSettings,
    )
    from components.models.pixels import PixelModel


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Results of all suites: `metrics` has one row per number, as `metrics.parquet` of a step.

    `predictions` has a table per suite with one row per model and item; `tables` those that only
    some suites have, by their names: `matrix` of transfer, `failure_map` of spatial.
    """

    metrics: "pd.DataFrame"
    predictions: "dict[str, pd.DataFrame]"
    tables: "dict[str, pd.DataFrame]"

    def value(
        self,
        suite: str,
        metric: str,
        *,
        item: str | None = None,
        level: float | None = None,
        model: str | None = None,
    ) -> float | None:
        """One number; `item`, `level` and `model` only where a suite has several."""
        rows = self.metrics
        wanted = {"suite": suite, "metric": metric, "item": item, "level": level, "model": model}
        for column, wish in wanted.items():
            rows = rows if wish is None else rows[rows[column] == wish]
        if len(rows) != 1:
            named = ", ".join(f"{key} {wish}" for key, wish in wanted.items() if wish is not None)
            raise CasemateError("value", named, f"names {len(rows)} numbers, not one")
        found = rows["value"].iloc[0]
        return None if found != found else float(found)


def evaluate(
    model: "PixelModel | Mapping[str, PixelModel]",
    images: "Tensor",
    labels: "Tensor",
    *,
    corruptions: "Mapping[str, Any] | CorruptionSuiteSettings | None" = None,
    transfer: "Mapping[str, Any] | TransferSuiteSettings | None" = None,
    spatial: "Mapping[str, Any] | SpatialSuiteSettings | None" = None,
    classes: Sequence[str] | None = None,
    seed: int = RUN_SEED,
    item_ids: Sequence[str] | None = None,
    micro_batch: int | None = None,
) -> EvaluationReport:
    """Evaluate one model, or several by name, on clean images and on the suites that are given.

    Suites are written as in a recipe (`{}`: its defaults) or as settings of
    `components.evaluate.settings`. Images are uint8 or floats on the 256 levels of [0, 1].
    `micro_batch`, the rows of every forward pass, defaults to that of recipes. Random numbers
    depend on `seed` and the item ids alone.

    >>> from pipelines import api
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
    >>> model = api.load_model(network, image_size=8)
    >>> images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    >>> labels = model(images / 255).argmax(dim=1)
    >>> report = api.evaluate(model, images, labels, corruptions={"names": ["fog"]}, spatial={})
    >>> report.value("clean", "accuracy")
    1.0
    >>> report.value("corruptions", "accuracy", item="fog", level=3) <= 1
    True
    >>> len(report.predictions["corruptions"])
    20
    """
    from components.core.arithmetic import EXACT, using
    from pipelines.recipe.schema.evaluate import CLEAN, EvaluateSection
    from pipelines.stages.evaluate.evaluation import Evaluation
    from pipelines.stages.evaluate.results import SuiteResult
    from pipelines.stages.evaluate.suites import suite_of
    from pipelines.stages.evaluate.worker import EvaluateWorker

    models = models_by_name(model)
    check_seed(seed)
    suites = {"corruptions": corruptions, "transfer": transfer, "spatial": spatial}
    section = section_of(EvaluateSection, "evaluate", suites, micro_batch=micro_batch)
    if section.transfer and section.transfer.models:
        named = ", ".join(section.transfer.models)
        raise CasemateError("transfer.models", named, "are for recipes; load them, and give a dict")
    dataset = dataset_of(models, images, labels, item_ids=item_ids, classes=classes)
    run = InProcess(EvaluateWorker, models, dataset, micro_batch=section.micro_batch, seed=seed)
    found: dict[str, SuiteResult] = {}
    with using(EXACT):
        for suite in section.suites():
            evaluation = Evaluation(
                suite=suite,
                section=section,
                dataset=run.dataset,
                origin=run.origin,
                models=run.models,
                items=run.items(section.subset, key="evaluate"),
                seed=seed,
                execute=partial(run.execute, f"evaluate.{suite}"),
                clean=lambda: found[CLEAN].predictions,
            )
            found[suite] = suite_of(suite)(evaluation)
    return EvaluationReport(
        metrics=frame(asdict(row) for result in found.values() for row in result.rows),
        predictions={suite: result.predictions.to_pandas() for suite, result in found.items()},
        tables={
            name.removesuffix(".parquet"): table.to_pandas()
            for result in found.values()
            for name, table in result.tables.items()
        },
    )
