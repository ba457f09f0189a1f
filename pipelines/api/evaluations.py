"""Evaluation suites on loaded models in this process."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from components.core.settings import RUN_SEED, Settings, plain
from pipelines.api.models import check_model, check_seed
from pipelines.api.tables import frame

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from torch import Tensor

    from components.core.units import Unit
    from components.data.memory import MemoryDataset
    from components.evaluate.settings import (
        CorruptionSuiteSettings,
        SpatialSuiteSettings,
        TransferSuiteSettings,
    )
    from components.models.pixels import PixelModel
    from pipelines.recipe.schema.evaluate import EvaluateSection
    from pipelines.stages.evaluate.evaluation import EvaluatedModel

MAIN = "model"  # name of a single model


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
    from components.data.memory import MemoryDataset
    from pipelines.stages.evaluate.suites import suite_of

    models = dict(model) if isinstance(model, Mapping) else {MAIN: model}
    check_models(models)
    check_seed(seed)
    suites = {"corruptions": corruptions, "transfer": transfer, "spatial": spatial}
    section = _section(suites, micro_batch=micro_batch)
    first = next(iter(models.values()))
    dataset = MemoryDataset.of(
        images, labels, num_classes=first.spec.num_classes, item_ids=item_ids, classes=classes
    )
    for one in models.values():
        one.spec.check_image((dataset.channels, dataset.height, dataset.width))
        one.spec.check_classes(len(dataset.classes))
    run = _InProcess(models, dataset, section, seed)
    with using(EXACT):
        found = {suite: suite_of(suite)(run.of(suite)) for suite in run.suites()}
    return EvaluationReport(
        metrics=frame(asdict(row) for result in found.values() for row in result.rows),
        predictions={suite: result.predictions.to_pandas() for suite, result in found.items()},
        tables={
            name.removesuffix(".parquet"): table.to_pandas()
            for result in found.values()
            for name, table in result.tables.items()
        },
    )


class _InProcess:
    """Computes the units of all suites here, and keeps the clean predictions."""

    def __init__(
        self,
        models: "Mapping[str, PixelModel]",
        dataset: "MemoryDataset",
        section: "EvaluateSection",
        seed: int,
    ) -> None:
        from pipelines.stages.evaluate.worker import EvaluateConfig, EvaluateWorker

        config = EvaluateConfig(dataset, dict(models), section.micro_batch, seed)
        device = str(next(iter(models.values())).mean.device)
        self.worker: EvaluateWorker = EvaluateWorker(config, device)
        self.models = {name: evaluated(name, one) for name, one in models.items()}
        self.dataset, self.section, self.seed = dataset, section, seed
        self.clean: list[pa.Table] = []

    def suites(self) -> list[str]:
        return self.section.suites()

    def of(self, suite: str) -> Any:
        """The evaluation of one suite."""
        from pipelines.stages.evaluate.evaluation import DataOrigin, Evaluation, chosen_items

        test = self.dataset.test
        labels = test.labels.tolist()
        return Evaluation(
            suite=suite,
            section=self.section,
            dataset=self.dataset,
            origin=DataOrigin("memory", "stored", None, None),
            models=self.models,
            items=chosen_items(test.item_ids, labels, self.section, seed=self.seed),
            seed=self.seed,
            execute=lambda units: self._execute(suite, units),
            clean=lambda: _joined(self.clean),
        )

    def _execute(self, suite: str, units: "Sequence[Unit]") -> "Iterator[pa.Table]":
        from pipelines.runtime import progress

        with progress.bar(f"evaluate.{suite}", total=len(units), unit="units") as bar:
            for unit in units:
                table = self.worker(unit.payload)
                if suite == "clean":
                    self.clean.append(table)
                bar.advance(1)
                yield table


def _joined(tables: "Sequence[pa.Table]") -> "pa.Table":
    import pyarrow as pa

    return pa.concat_tables(tables)


def check_models(models: "Mapping[str, PixelModel]") -> None:
    """Refuse no models, other objects than models, and models on two devices."""
    if not models:
        raise CasemateError("model", "{}", "is empty; give a model, or several by name")
    for one in models.values():
        check_model(one)
    devices = {str(one.mean.device) for one in models.values()}
    if len(devices) > 1:
        raise CasemateError("model", ", ".join(sorted(devices)), "are two devices; choose one")


def evaluated(name: str, model: "PixelModel") -> "EvaluatedModel":
    """A loaded model as suites and studies take it."""
    from components.models.checkpoint import weights_digest
    from pipelines.stages.evaluate.evaluation import EvaluatedModel

    params = sum(part.numel() for part in model.net.parameters())
    digest = weights_digest(model)
    return EvaluatedModel(name, model, digest, model.spec, params_m=params / 1e6)


def _section(suites: Mapping[str, Any], *, micro_batch: int | None) -> "EvaluateSection":
    """The suites, validated as in a recipe."""
    from pydantic import ValidationError

    from components.core.problems import RecipeError
    from components.core.user_code import reading
    from pipelines.recipe.explain import explain
    from pipelines.recipe.schema.evaluate import EvaluateSection

    values: dict[str, Any] = {
        name: plain(one) if isinstance(one, Settings) else one
        for name, one in suites.items()
        if one is not None
    }
    if micro_batch is not None:
        values["micro_batch"] = micro_batch
    with reading(base=Path(), trusted=True):
        try:
            section = EvaluateSection.model_validate(values)
        except ValidationError as error:
            raise RecipeError("evaluate", explain(EvaluateSection, values, error)) from None
    if section.transfer and section.transfer.models:
        named = ", ".join(section.transfer.models)
        raise CasemateError("transfer.models", named, "are for recipes; load them, and give a dict")
    return section
