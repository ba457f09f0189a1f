"""What a suite is given: models, items and a way to compute units."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa

from components.core.digests import digest_json
from components.core.errors import CasemateError
from components.core.folders import Folder
from components.core.tables import read_table
from components.core.units import Unit, WorkFn
from components.data.memory import MemoryDataset
from components.data.prepared import PreparedDataset
from components.evaluate.metrics import Subject
from components.evaluate.settings import SubsetSettings
from components.evaluate.subsets import choose_items
from components.models.catalog import family_of
from components.models.checkpoint import read_header
from components.models.costs import costs_of_shapes, network_of_spec
from components.models.pixels import PixelModel
from components.models.pretrained import weights_name
from components.models.spec import ModelSpec
from pipelines.recipe import build
from pipelines.recipe.schema.evaluate import CLEAN, EvaluateSection, suite_of
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.provenance import software
from pipelines.runtime.shards import run_units
from pipelines.stages.evaluate.steps import OTHER
from pipelines.stages.evaluate.worker import DEVICE, Counted, EvaluateConfig, make_worker

ITEMS_PER_UNIT = 100
PREDICTIONS_NAME = "predictions.parquet"

Some = TypeVar("Some")


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model folder or a loaded model, and what is known of it."""

    name: str
    place: Folder | PixelModel
    digest: str
    spec: ModelSpec
    pretrain: str | None = None
    params_m: float | None = None
    gmacs: float | None = None

    @staticmethod
    def of_folder(name: str, folder: Folder, *, pretrain: str | None = None) -> "EvaluatedModel":
        """The model of a folder; its costs are counted by shapes."""
        header = read_header(folder)
        spec = ModelSpec.from_dict(header["spec"], source=f"model {name}")
        return EvaluatedModel(name, folder, str(header["digest"]), spec, pretrain, *_costs(spec))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of its images."""
        return self.spec.channels, self.spec.image_size, self.spec.image_size


@dataclass(frozen=True, slots=True)
class DataOrigin:
    """Name of the clean dataset, and how its images were brought to their size."""

    name: str
    fit: str
    resize: int | None
    image_size: int | None


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


@dataclass(frozen=True, kw_only=True)
class ModelsOnItems:
    """Models, test items, and `execute`, which computes units on a cluster or in this process."""

    dataset: PreparedDataset | MemoryDataset
    origin: DataOrigin
    models: Mapping[str, EvaluatedModel]
    items: TestItems
    seed: int
    execute: Callable[[Sequence[Unit]], Iterable[pa.Table]]
    recipe: str | None = None
    devices: set[str] = field(default_factory=set)  # that computed what was read

    def run(self, units: Sequence[Unit]) -> pa.Table:
        """The results of all units, in their order; those of an earlier start are kept."""
        return pa.concat_tables(self.tables(units))

    def tables(self, units: Sequence[Unit]) -> list[pa.Table]:
        """The results of all units one by one, in their order."""
        return [self._noted(table) for table in self.execute(units)]

    def subject(
        self,
        model: str,
        *,
        dataset: str | None = None,
        dataset_digest: str | None = None,
        fidelity: str | None = None,
        resize: str | None = None,
    ) -> Subject:
        """What a number of this model belongs to; the dataset is the clean one by default."""
        own, data = self.models[model], self.origin
        return Subject(
            model=model,
            model_digest=own.digest,
            family=family_of(own.spec.architecture),
            arch=own.spec.architecture,
            params_m=own.params_m,
            gmacs=own.gmacs,
            pretrain=own.pretrain,
            recipe=self.recipe,
            dataset=dataset or data.name,
            dataset_digest=dataset_digest or self.dataset.digest,
            seed=self.seed,
            resize=resize or resize_name(data.fit, data.resize, data.image_size),
            fidelity=fidelity,
        )

    def _noted(self, table: pa.Table) -> pa.Table:
        """The table without its column of devices, which are kept apart."""
        self.devices.update(table[DEVICE].unique().to_pylist())
        return table.drop_columns([DEVICE])


@dataclass(frozen=True, kw_only=True)
class Evaluation(ModelsOnItems):
    """One suite on models and items."""

    suite: str
    section: EvaluateSection
    clean: Callable[[], pa.Table]  # the predictions of the clean suite

    @property
    def step(self) -> str:
        return f"evaluate.{self.suite}"


def of_step(recipe: Recipe, inputs: Mapping[str, Folder], out: StageDir) -> Evaluation:
    """The evaluation of the step that `out` names, on the cluster."""
    section = recipe.evaluation()
    assert section is not None
    dataset = PreparedDataset.open(inputs["prepare"])
    if not dataset.splits["test"]:
        raise CasemateError("evaluate", inputs["prepare"], "has no test items to evaluate")
    names = recipe.evaluation_parts()[out.part]
    models = models_of(recipe, inputs, dataset, names=names, others=OTHER)
    return Evaluation(
        suite=suite_of(out.part),
        section=section,
        dataset=dataset,
        origin=origin_of(recipe),
        models=models,
        items=items_of(*dataset.listing("test"), section.subset, seed=recipe.seed, key="evaluate"),
        seed=recipe.seed,
        execute=executor(
            recipe, inputs, out, dataset, models, micro_batch=section.micro_batch, make=make_worker
        ),
        clean=lambda: read_table(inputs[f"evaluate.{CLEAN}"] / PREDICTIONS_NAME),
        recipe=recipe.name,
    )


def executor(
    recipe: Recipe,
    inputs: Mapping[str, Folder],
    out: StageDir,
    dataset: PreparedDataset,
    models: Mapping[str, EvaluatedModel],
    *,
    micro_batch: int,
    make: Callable[[EvaluateConfig], WorkFn],
) -> Callable[[Sequence[Unit]], Iterator[pa.Table]]:
    """Computes units on the cluster, those of an earlier start excepted; results in their order."""
    config = EvaluateConfig(
        dataset=inputs["prepare"],
        models={name: model.place for name, model in models.items()},
        micro_batch=micro_batch,
        seed=recipe.seed,
    )
    device = recipe.cluster.actor_device
    digests = [model.digest for model in models.values()]
    identity = digest_json([out.fingerprint, dataset.digest, digests, device, software()])

    def execute(units: Sequence[Unit]) -> Iterator[pa.Table]:
        parts = out.parts("parts", run_id=identity)
        run_units(units, make=make, config=config, parts=parts, cluster=recipe.cluster, out=out)
        return parts.tables([unit.name for unit in units])

    return execute


def origin_of(recipe: Recipe) -> DataOrigin:
    """The dataset of a recipe."""
    data = recipe.data
    return DataOrigin(data.source, data.fit, data.resize, data.image_size)


def models_of(
    recipe: Recipe,
    inputs: Mapping[str, Folder],
    dataset: PreparedDataset,
    *,
    names: Sequence[str],
    others: str,
) -> dict[str, EvaluatedModel]:
    """These models of the recipe, which take these images, and those of steps `<others>.<name>`."""
    models = {}
    for name in names:
        own = recipe.model_of(name)
        start = None if recipe.given_model() else own.pretrained
        pretrain = weights_name(start, architecture=own.architecture)
        folder = build.model_folder(inputs, name)
        models[name] = EvaluatedModel.of_folder(name, folder, pretrain=pretrain)
        models[name].spec.check_image((dataset.channels, dataset.height, dataset.width))
    for step, folder in inputs.items():
        stage, _, name = step.partition(".")
        if stage == others:
            models[name] = EvaluatedModel.of_folder(name, folder)
    for model in models.values():
        model.spec.check_classes(len(dataset.classes))
    return models


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


def items_of(
    item_ids: Sequence[str], labels: Sequence[int], subset: SubsetSettings, *, seed: int, key: str
) -> TestItems:
    """The items of a subset; `key` is the section that errors name."""
    place = {item_id: number for number, item_id in enumerate(item_ids)}
    try:
        chosen = choose_items(item_ids, labels, subset, seed=seed)
    except CasemateError as error:
        raise CasemateError(f"{key}.{error.key}", error.value, error.remedy) from error
    places = tuple(place[item_id] for item_id in chosen)
    return TestItems(tuple(chosen), tuple(labels[p] for p in places), places)


def _costs(spec: ModelSpec) -> tuple[float | None, float | None]:
    """Parameters in millions and GMAC per image; None where they cannot be counted by shapes."""
    try:
        net = network_of_spec(spec)
        found = costs_of_shapes(net, image_size=spec.network_size, channels=spec.channels)
    except (CasemateError, RuntimeError):
        return None, None
    return found.params / 1e6, found.flops / 1e9


def units_of(prefix: str, tasks: Iterable[tuple[str, Counted]]) -> list[Unit]:
    """Numbered units of tasks, each with what it is about."""
    return [
        Unit(f"{prefix}-{number:06d}", about, task, task.num_items)
        for number, (about, task) in enumerate(tasks)
    ]
