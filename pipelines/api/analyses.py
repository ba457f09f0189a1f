"""Studies of loaded models in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from components.core.settings import RUN_SEED, Settings
from pipelines.api.in_process import InProcess, dataset_of, models_by_name, section_of
from pipelines.api.models import check_seed
from pipelines.api.tables import frame

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from components.core.types import Array
    from components.models.pixels import PixelModel
    from pipelines.recipe.schema.analyze import AnalyzeSection
    from pipelines.stages.analyze.analysis import Analysis


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
    from pipelines.recipe.schema.analyze import AnalyzeSection
    from pipelines.stages.analyze.studies import study_of
    from pipelines.stages.analyze.worker import AnalyzeWorker

    models = models_by_name(model)
    check_seed(seed)
    section = section_of(AnalyzeSection, "analyze", studies, micro_batch=micro_batch)
    _check_models(section, models)
    dataset = dataset_of(models, images, labels, item_ids=item_ids, classes=classes)
    run = InProcess(AnalyzeWorker, models, dataset, micro_batch=section.micro_batch, seed=seed)
    with using(EXACT):
        found = {
            study: study_of(study)(_analysis(run, section, study)) for study in section.studies()
        }
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


def _check_models(section: "AnalyzeSection", models: Mapping[str, object]) -> None:
    """Refuse folders of judges, and names of models that are not given."""
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


def _analysis(run: InProcess, section: "AnalyzeSection", study: str) -> "Analysis":
    from pipelines.stages.analyze.analysis import Analysis, judges_of
    from pipelines.stages.evaluate.evaluation import TestItems

    subset = getattr(getattr(section, study), "subset", None)
    return Analysis(
        study=study,
        section=section,
        analyzed=tuple(section.models or run.models),
        judges=judges_of(section, study),
        dataset=run.dataset,
        origin=run.origin,
        models=run.models,
        items=run.items(subset, key=study) if subset else TestItems((), (), ()),
        seed=run.seed,
        execute=partial(run.execute, f"analyze.{study}"),
    )
