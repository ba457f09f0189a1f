"""One step of the evaluate stage on the driver: its models and items, and the units it runs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from components.core.digests import digest_json
from components.core.errors import CasemateError
from components.core.units import Unit
from components.data.prepared import PreparedDataset
from components.evaluate.metrics import Subject
from components.evaluate.subsets import choose_items
from components.models.catalog import family_of
from components.models.checkpoint import read_header
from components.models.costs import costs_of
from components.models.spec import ModelSpec
from pipelines.recipe import build
from pipelines.recipe.schema.evaluate import EvaluateSection
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir, software
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import run_units
from pipelines.stages.evaluate.steps import OTHER
from pipelines.stages.evaluate.worker import DEVICE, EvaluateConfig, make_worker

ITEMS_PER_UNIT = 100

Some = TypeVar("Some")


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model folder with its header."""

    name: str
    folder: Path
    digest: str
    spec: ModelSpec
    pretrain: str | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of its images."""
        return self.spec.channels, self.spec.image_size, self.spec.image_size


@dataclass(frozen=True, slots=True)
class TestItems:
    """Chosen items of the test split, in the order in which they were chosen."""

    item_ids: tuple[str, ...]
    labels: tuple[int, ...]
    places: tuple[int, ...]  # in the split

    def __len__(self) -> int:
        return len(self.places)

    def first(self, num_items: int) -> "TestItems":
        """At most the first items."""
        return TestItems(
            self.item_ids[:num_items], self.labels[:num_items], self.places[:num_items]
        )


@dataclass(frozen=True)
class Evaluation:
    """Models, items and folders of one step."""

    recipe: Recipe
    section: EvaluateSection
    dataset: PreparedDataset
    models: Mapping[str, EvaluatedModel]
    items: TestItems
    inputs: Mapping[str, Path]
    out: StageDir
    devices: set[str] = field(default_factory=set)  # that computed what was read

    @staticmethod
    def of(recipe: Recipe, inputs: Mapping[str, Path], out: StageDir) -> "Evaluation":
        """The step that `out` names."""
        section = recipe.evaluate
        assert section is not None
        dataset = PreparedDataset.open(inputs["prepare"])
        if not dataset.splits["test"]:
            raise CasemateError("evaluate", inputs["prepare"], "has no test items to evaluate")
        models = {name: _model(recipe, inputs, name) for name in recipe.evaluated_models()}
        for model in models.values():
            model.spec.check_image((dataset.channels, dataset.height, dataset.width))
        others = [step for step in inputs if step.startswith(f"{OTHER}.")]
        models |= {_name(step): _other(_name(step), inputs[step]) for step in others}
        for model in models.values():
            model.spec.check_classes(len(dataset.classes))
        items = _chosen(dataset, section, seed=recipe.seed)
        return Evaluation(recipe, section, dataset, models, items, inputs, out)

    @property
    def suite(self) -> str:
        return self.out.part

    def run(self, units: Sequence[Unit], *, phase: str = "") -> pa.Table:
        """The results of all units, in their order; those of an earlier start are kept."""
        parts = PartStore(self.out.scratch / "parts", run_id=self._identity())
        run_units(
            list(units),
            make=make_worker,
            config=EvaluateConfig(
                dataset=self.inputs["prepare"],
                models={name: model.folder for name, model in self.models.items()},
                micro_batch=self.section.micro_batch,
                seed=self.recipe.seed,
            ),
            parts=parts,
            cluster=self.recipe.cluster,
            label=self.out.step,
            out=self.out,
            phase=phase,
        )
        return pa.concat_tables(
            self._noted(table) for table in parts.tables([unit.name for unit in units])
        )

    def subject(
        self,
        model: str,
        *,
        dataset: str | None = None,
        dataset_digest: str | None = None,
        fidelity: str | None = None,
        resize: str | None = None,
    ) -> Subject:
        """What a number of this model belongs to; the dataset is the recipe's by default."""
        own = self.models[model]
        params_m, gmacs = _costs(own.spec)
        data = self.recipe.data
        return Subject(
            model=model,
            model_digest=own.digest,
            family=family_of(own.spec.architecture),
            arch=own.spec.architecture,
            params_m=params_m,
            gmacs=gmacs,
            pretrain=own.pretrain,
            recipe=self.recipe.name,
            dataset=dataset or data.source,
            dataset_digest=dataset_digest or self.dataset.digest,
            seed=self.recipe.seed,
            resize=resize or resize_name(data.fit, data.resize, data.image_size),
            fidelity=fidelity,
        )

    def _identity(self) -> str:
        device = self.recipe.cluster.actor_device
        digests = [model.digest for model in self.models.values()]
        made_with = [self.out.fingerprint, self.dataset.digest, digests, device, software()]
        return digest_json(made_with)

    def _noted(self, table: pa.Table) -> pa.Table:
        """The table without its column of devices, which are kept apart."""
        self.devices.update(table[DEVICE].unique().to_pylist())
        return table.drop_columns([DEVICE])


def blocks(values: Sequence[Some], size: int | None = None) -> Iterator[tuple[Some, ...]]:
    """Even pieces, as few as the size of a unit allows: they depend on the values alone."""
    count = -(-len(values) // (size or ITEMS_PER_UNIT))
    for i in range(count):
        yield tuple(values[i * len(values) // count : (i + 1) * len(values) // count])


def resize_name(fit: str, resize: int | None, image_size: int | None) -> str:
    """How images were brought to their size; `stored` if they were not."""
    if image_size is None:
        return "stored"
    return f"crop {image_size} of {resize}" if resize else fit


def _chosen(dataset: PreparedDataset, section: EvaluateSection, *, seed: int) -> TestItems:
    item_ids, labels = dataset.listing("test")
    place = {item_id: number for number, item_id in enumerate(item_ids)}
    try:
        chosen = choose_items(item_ids, labels, section.subset, seed=seed)
    except CasemateError as error:
        raise CasemateError(f"evaluate.{error.key}", error.value, error.remedy) from error
    places = tuple(place[item_id] for item_id in chosen)
    return TestItems(tuple(chosen), tuple(labels[p] for p in places), places)


def _name(step: str) -> str:
    return step.partition(".")[2]


def _model(recipe: Recipe, inputs: Mapping[str, Path], name: str) -> EvaluatedModel:
    folder = build.model_folder(inputs, name)
    start = recipe.model_of(name).pretrained
    return _opened(name, folder, pretrain=None if recipe.given_model() else start)


def _other(name: str, folder: Path) -> EvaluatedModel:
    return _opened(name, folder, pretrain=None)


def _opened(name: str, folder: Path, *, pretrain: str | None) -> EvaluatedModel:
    header = read_header(folder)
    spec = ModelSpec.from_dict(header["spec"], source=f"model {name}")
    return EvaluatedModel(name, folder, str(header["digest"]), spec, pretrain)


def _costs(spec: ModelSpec) -> tuple[float | None, float | None]:
    """Parameters in millions and GMAC per image; None where they cannot be counted by shapes."""
    try:
        found = costs_of(
            spec.architecture,
            image_size=spec.network_size,
            channels=spec.channels,
            num_classes=spec.num_classes,
            options=spec.options,
        )
    except (CasemateError, RuntimeError):
        return None, None
    return found.params / 1e6, found.flops / 1e9


def units_of(prefix: str, tasks: Iterable[tuple[str, object]]) -> list[Unit]:
    """Numbered units of tasks, each with what it is about."""
    return [
        Unit(f"{prefix}-{number:06d}", about, task) for number, (about, task) in enumerate(tasks)
    ]
