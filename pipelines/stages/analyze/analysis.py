"""What a study is given: models, items and a way to compute units."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from components.core.errors import CasemateError
from components.core.folders import Folder
from components.data.prepared import PreparedDataset
from components.models.checkpoint import load_model
from components.models.pixels import PixelModel
from pipelines.recipe.analysis import given_network
from pipelines.recipe.schema.analyze import AnalyzeSection
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.analyze.steps import ANALYZED, JUDGE
from pipelines.stages.analyze.worker import make_worker
from pipelines.stages.evaluate.evaluation import (
    EvaluatedModel,
    ModelsOnItems,
    TestItems,
    executor,
    items_of,
    models_of,
    origin_of,
)
from pipelines.stages.evaluate.worker import PlacesTask


@dataclass(frozen=True, kw_only=True)
class Analysis(ModelsOnItems):
    """One study; `models` are those that it analyzes, and the judges of perturbations."""

    study: str
    section: AnalyzeSection
    analyzed: tuple[str, ...]
    judges: tuple[str, ...] = ()

    @property
    def how(self) -> Any:
        """The settings of the study."""
        return getattr(self.section, self.study)

    def network(self, model: str) -> nn.Module:
        """The bare network of a model, to inspect its layers; its weights may be absent."""
        return network_of(self.models[model])


@dataclass(frozen=True, slots=True)
class ItemsTask(PlacesTask):
    """What a unit computes of one model on these test items."""

    model: str
    places: tuple[int, ...]


def network_of(model: EvaluatedModel) -> nn.Module:
    """The network of a model, by shapes where that is possible."""
    if isinstance(model.place, PixelModel):
        return model.place.net
    return given_network(model.place) or load_model(model.place).net


def of_step(recipe: Recipe, inputs: Mapping[str, Folder], out: StageDir) -> Analysis:
    """The analysis of the step that `out` names, on the cluster."""
    section, study = recipe.analyze, out.part
    assert section is not None
    dataset = PreparedDataset.open(inputs["prepare"])
    analyzed, judges = recipe.analyzed_models(), judges_of(section, study)
    own = [*analyzed, *(name for name in judges if name in recipe.model_names())]
    names = list(dict.fromkeys(own))
    models = models_of(recipe, inputs, dataset, names=names, others=JUDGE)
    models |= _other_models(section, inputs, dataset)
    return Analysis(
        study=study,
        section=section,
        analyzed=(*analyzed, *section.other_models),
        judges=judges,
        dataset=dataset,
        origin=origin_of(recipe),
        models=models,
        items=_items(recipe, dataset, section, study),
        seed=recipe.seed,
        execute=executor(
            recipe, inputs, out, dataset, models, micro_batch=section.micro_batch, make=make_worker
        ),
        recipe=recipe.name,
    )


def _other_models(
    section: AnalyzeSection, inputs: Mapping[str, Folder], dataset: PreparedDataset
) -> dict[str, EvaluatedModel]:
    """The further models of the section, which take the images of the dataset."""
    found = {}
    for name in section.other_models:
        found[name] = EvaluatedModel.of_folder(name, inputs[f"{ANALYZED}.{name}"])
        found[name].spec.check_image((dataset.channels, dataset.height, dataset.width))
        found[name].spec.check_classes(len(dataset.classes))
    return found


def judges_of(section: AnalyzeSection, study: str) -> tuple[str, ...]:
    """Names of the models that judge a study's perturbations."""
    if study != "perturbations" or section.perturbations is None:
        return ()
    return (*section.perturbations.judge_models, *section.perturbations.judges)


def _items(
    recipe: Recipe, dataset: PreparedDataset, section: AnalyzeSection, study: str
) -> TestItems:
    """The test items of a study; accumulation starts from noise."""
    subset = getattr(getattr(section, study), "subset", None)
    if subset is None:
        return TestItems((), (), ())
    if not dataset.splits["test"]:
        raise CasemateError("analyze", recipe.data.source, "has no test items to analyze")
    return items_of(*dataset.listing("test"), subset, seed=recipe.seed, key=f"analyze.{study}")
