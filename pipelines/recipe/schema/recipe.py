"""The recipe: one file that describes a result completely."""

from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import yaml
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from components.certify.registry import FAMILIES
from components.certify.settings import CertificateEntry, CertificateSettings
from components.core.digests import digest_json
from components.core.folders import Folder, folder_at
from components.core.settings import RUN_SEED, Name, Problem
from components.data.settings import DataSettings
from components.denoising.settings import is_on_disk
from components.models.settings import TIMM, ModelSettings
from components.train.objectives.settings import ObjectiveSettings
from components.train.settings import TrainSettings
from pipelines.recipe.schema.analyze import AnalyzeSection
from pipelines.recipe.schema.attack import AttackSection
from pipelines.recipe.schema.base import Section, union_of
from pipelines.recipe.schema.evaluate import CLEAN, REMAINING, EvaluateSection
from pipelines.recipe.schema.place import (
    ClusterSection,
    ReportSection,
    StorageSection,
    TrackingSection,
)
from pipelines.recipe.schema.tune import TuneSection

if TYPE_CHECKING:
    CertifySettings = CertificateSettings
else:
    CertifySettings = union_of(FAMILIES)

EXTENDS = "extends"  # a recipe whose values are used where this one has none
MAIN = "main"  # the model of `train.objective`; variants have their own names


# Keys beside the recipes of a storage.
RESERVED_NAMES = ("locks", "mlartifacts", "probes", "shared", "storage-id")
_opened = lru_cache(maxsize=16)(folder_at)  # the folder at a URI is looked up once


class Recipe(Section):
    """All settings of a result; its identity excludes `cluster`, `storage` and `tracking`."""

    further_keys: ClassVar[tuple[str, ...]] = (EXTENDS,)
    off_keys: ClassVar[tuple[str, ...]] = ("evaluate",)

    name: Name
    """Folder of the results; lower case, digits, - and _."""
    seed: Annotated[int, Field(ge=0)] = RUN_SEED
    """Seed of everything random but the splits."""
    data: DataSettings
    """Which images."""
    model: ModelSettings = ModelSettings()
    """Which network."""
    train: TrainSettings | None = None
    """How models are trained; null: model.pretrained is used as it is."""
    tune: TuneSection | None = None
    """A search over keys of the recipe."""
    attack: dict[Name, AttackSection] = Field(default={})
    """Attacks, each under a name."""
    evaluate: EvaluateSection | None = None
    """What the models withstand, measured. Left out: clean items of trained models that nothing
    attacks; null: nothing."""
    analyze: AnalyzeSection | None = Field(  # digests of recipes without it do not change
        default=None, exclude_if=lambda section: section is None
    )
    """What happens inside the models."""
    certify: dict[Name, CertifySettings] = Field(default={})
    """Certificates, each under a name."""
    report: ReportSection = ReportSection()
    """The report."""
    cluster: ClusterSection = ClusterSection()
    """Machines, workers and GPUs; not part of a result's identity."""
    storage: StorageSection = StorageSection()
    """Where results are kept; not part of a result's identity."""
    tracking: TrackingSection = TrackingSection()
    """Where MLflow runs are kept; not part of a result's identity."""

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The values; a recipe that says nothing of its evaluation does not name it."""
        values: dict[str, Any] = write(self)
        if not self.evaluate and not self.is_evaluation_off:
            values.pop("evaluate", None)
        return values

    @cached_property
    def source(self) -> str:
        """The file that errors name. Set when the recipe is read; not one of its values."""
        return self.name

    def problems(self) -> Iterator[Problem]:
        if self.name in RESERVED_NAMES:
            remedy = "is a name that storages use themselves; choose another"
            yield Problem("name", self.name, remedy)

    def model_names(self) -> list[str]:
        """The models of the train section, `main` first; without one, the given model."""
        if self.train:
            return [MAIN, *self.train.variants]
        return [MAIN] if self.given_model() else []

    def given_model(self) -> Folder | None:
        """The folder of a given model: pretrained, and not trained by this recipe."""
        start = self.model.pretrained
        return None if self.train or start in (None, TIMM) else _opened(start)

    def certificates(self) -> dict[str, CertificateEntry]:
        """All certificates: one per section, or one per entry of a sweep."""
        return {n: e for k, c in self.certify.items() for n, e in c.entries(k).items()}

    def objective_of(self, model: str) -> ObjectiveSettings:
        """The training objective of a model of this recipe."""
        assert self.train is not None
        return self.train.objective if model == MAIN else self.train.variants[model].objective

    def model_of(self, model: str) -> ModelSettings:
        """The architecture of a model of this recipe: its own, else the recipe's."""
        variant = self.train.variants.get(model) if self.train else None
        return (variant.model if variant else None) or self.model

    def objective_key(self, model: str) -> str:
        """The key of the section that holds a model's objective."""
        return "train" if model == MAIN else f"train.variants.{model}"

    def model_key(self, model: str) -> str:
        """The key of the section that describes a model's network."""
        own = self.model_of(model) is not self.model
        return f"train.variants.{model}.model" if own else "model"

    def objectives(self) -> list[tuple[str, ObjectiveSettings]]:
        """The objectives of all trained models by their keys, `main` first."""
        names = self.model_names() if self.train else []
        return [
            (f"{self.objective_key(name)}.objective", self.objective_of(name)) for name in names
        ]

    def model_sections(self) -> list[tuple[str, ModelSettings]]:
        """Every section that describes a network, by the prefix of its key `model`."""
        variants = self.train.variants.items() if self.train else ()
        own = [(f"train.variants.{name}.", part.model) for name, part in variants if part.model]
        return [("", self.model), *own]

    def step_of(self, model: str) -> str:
        """The step whose folder holds a model."""
        return f"model.{model}" if self.given_model() else f"train.{model}"

    def denoisers(self) -> list[str]:
        """The models that estimate images instead of classifying them."""
        if self.train is None:
            return []
        return [name for name in self.model_names() if self.objective_of(name).is_denoiser]

    def evaluated_models(self) -> list[str]:
        """The models of the evaluate section: those it names, else all classifiers."""
        return [] if self.evaluate is None else self.evaluate.models or self.classifiers()

    @property
    def is_evaluation_off(self) -> bool:
        """Whether the recipe says `evaluate: null`."""
        return self.evaluate is None and "evaluate" in self.model_fields_set

    def unmeasured_models(self) -> list[str]:
        """Trained classifiers that are neither attacked nor in the evaluate section."""
        if self.train is None or self.is_evaluation_off:
            return []
        attacked = {model for entry in self.attack.values() for model in entry.models}
        measured = attacked.union(self.evaluated_models())
        return [model for model in self.classifiers() if model not in measured]

    def evaluation(self) -> EvaluateSection | None:
        """The evaluate section; if it is left out, its defaults where a model is unmeasured."""
        return self.evaluate or (EvaluateSection() if self.unmeasured_models() else None)

    def evaluation_parts(self) -> dict[str, list[str]]:
        """The models of every part of the evaluation: of each suite, and the unmeasured ones."""
        parts = {suite: self.evaluated_models() for suite in self._suites()}
        if unmeasured := self.unmeasured_models():
            parts[REMAINING if self.evaluate else CLEAN] = unmeasured
        return parts

    def _suites(self) -> list[str]:
        return self.evaluate.suites() if self.evaluate else []

    def needs_stage(self, section: str) -> bool:
        """Whether the stage of a section has something to do."""
        return bool(self.evaluation() if section == "evaluate" else getattr(self, section))

    def analyzed_models(self) -> list[str]:
        """The models of the analyze section: those it names, else all classifiers."""
        return [] if self.analyze is None else self.analyze.models or self.classifiers()

    def classifiers(self) -> list[str]:
        """All models that are not denoisers."""
        denoisers = self.denoisers()
        return [model for model in self.model_names() if model not in denoisers]

    def denoiser_of(self, model: str) -> str | None:
        """The denoiser of this recipe behind which a model is trained, if there is one."""
        behind = self.objective_of(model).denoiser_name
        return None if behind is None or is_on_disk(behind) else behind

    def certified_behind(self, section: CertificateSettings) -> str | None:
        """The denoiser of this recipe behind which a section certifies, if there is one."""
        behind = section.denoiser_name
        return None if behind is None or is_on_disk(behind) else behind

    def epochs_of(self, model: str) -> int:
        """Number of epochs that a model of this recipe is trained for."""
        assert self.train is not None
        variant = self.train.variants.get(model)
        return (variant.epochs if variant else None) or self.train.epochs

    def resolved(self) -> dict[str, Any]:
        """Plain values with every default written out."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """Identity of what the recipe computes; where it runs is left out."""
        return digest_json(self.model_dump(mode="json", exclude={"cluster", "storage", "tracking"}))

    def to_yaml(self) -> str:
        """The resolved recipe as a YAML that `casemate run` accepts."""
        return yaml.safe_dump(self.resolved(), sort_keys=False)
