"""What `evaluate` and `analyze` share: loaded models on images in memory, units computed here."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from components.core.errors import CasemateError
from components.core.settings import Settings, plain
from pipelines.api.models import check_model

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from components.core.units import Unit
    from components.data.memory import MemoryDataset
    from components.evaluate.settings import SubsetSettings
    from components.models.pixels import PixelModel
    from pipelines.recipe.schema.base import Section
    from pipelines.stages.evaluate.evaluation import EvaluatedModel, TestItems
    from pipelines.stages.evaluate.worker import EvaluateWorker

AnySection = TypeVar("AnySection", bound="Section")

MAIN = "model"  # name of a single model


def models_by_name(
    model: "PixelModel | Mapping[str, PixelModel]",
) -> "dict[str, PixelModel]":
    """The models; refuses none, other objects than models, and models on two devices."""
    models = dict(model) if isinstance(model, Mapping) else {MAIN: model}
    if not models:
        raise CasemateError("model", "{}", "is empty; give a model, or several by name")
    for one in models.values():
        check_model(one)
    devices = {str(one.mean.device) for one in models.values()}
    if len(devices) > 1:
        raise CasemateError("model", ", ".join(sorted(devices)), "are two devices; choose one")
    return models


def section_of(
    kind: type[AnySection], stage: str, parts: Mapping[str, Any], *, micro_batch: int | None
) -> AnySection:
    """The suites or studies that are given, validated as in a recipe."""
    from pydantic import ValidationError

    from components.core.problems import RecipeError
    from components.core.user_code import reading
    from pipelines.recipe.explain import explain

    values: dict[str, Any] = {
        name: plain(one) if isinstance(one, Settings) else one for name, one in parts.items()
    }
    if micro_batch is not None:
        values["micro_batch"] = micro_batch
    with reading(base=Path(), trusted=True):
        try:
            return kind.model_validate(values)
        except ValidationError as error:
            raise RecipeError(stage, explain(kind, values, error)) from None


def dataset_of(
    models: "Mapping[str, PixelModel]",
    images: "Tensor",
    labels: "Tensor",
    *,
    item_ids: Sequence[str] | None,
    classes: Sequence[str] | None,
) -> "MemoryDataset":
    """The images as test items, which all models must fit."""
    from components.data.memory import MemoryDataset

    first = next(iter(models.values()))
    dataset = MemoryDataset.of(
        images, labels, num_classes=first.spec.num_classes, item_ids=item_ids, classes=classes
    )
    for one in models.values():
        one.spec.check_image((dataset.channels, dataset.height, dataset.width))
        one.spec.check_classes(len(dataset.classes))
    return dataset


class InProcess:
    """Models and images of a worker in this process."""

    def __init__(
        self,
        worker: "type[EvaluateWorker]",
        models: "Mapping[str, PixelModel]",
        dataset: "MemoryDataset",
        *,
        micro_batch: int,
        seed: int,
    ) -> None:
        from pipelines.stages.evaluate.evaluation import DataOrigin
        from pipelines.stages.evaluate.worker import EvaluateConfig

        config = EvaluateConfig(dataset, dict(models), micro_batch, seed)
        self._worker = worker(config, str(next(iter(models.values())).mean.device))
        self.dataset, self.seed = dataset, seed
        self.origin = DataOrigin("memory", "stored", None, None)
        self.models = {name: _evaluated(name, one) for name, one in models.items()}

    def items(self, subset: "SubsetSettings", *, key: str) -> "TestItems":
        """The items of a subset; `key` is the section that errors name."""
        from pipelines.stages.evaluate.evaluation import items_of

        test = self.dataset.test
        return items_of(test.item_ids, test.labels.tolist(), subset, seed=self.seed, key=key)

    def execute(self, step: str, units: "Sequence[Unit]") -> "Iterator[pa.Table]":
        """The results of the units, in their order."""
        from pipelines.runtime import progress

        total = sum(unit.num_items for unit in units)
        with progress.bar(step, total=total, unit="images") as bar:
            for unit in units:
                table = self._worker(unit.payload)
                bar.advance(unit.num_items)
                yield table


def _evaluated(name: str, model: "PixelModel") -> "EvaluatedModel":
    """A loaded model as suites and studies take it."""
    from components.models.checkpoint import weights_digest
    from pipelines.stages.evaluate.evaluation import EvaluatedModel

    params = sum(part.numel() for part in model.net.parameters())
    digest = weights_digest(model)
    return EvaluatedModel(name, model, digest, model.spec, params_m=params / 1e6)
