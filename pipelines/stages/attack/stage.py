"""Attack models on test items: a list of attacks, each on the items robust to all before it.

Every attack is a round of units on the sharded executor. The items of a round and their units are
derived from the finished parts of earlier rounds, so a killed stage continues in the middle of the
list, and the result does not depend on workers, order or batches.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from components.attacks.listing import ListedAttack, attack_list, check_class_count
from components.attacks.passes import AskedPasses, AttackPasses
from components.core.digests import digest_json
from components.core.errors import CasemateError
from components.core.folders import Folder
from components.core.units import Unit
from components.data.prepared import PreparedDataset
from components.models.checkpoint import read_header
from components.models.spec import ModelSpec
from pipelines.recipe import build
from pipelines.recipe.schema.attack import AttackSection
from pipelines.recipe.schema.place import ClusterSection
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.parts import PartStore
from pipelines.runtime.progress import say
from pipelines.runtime.provenance import software
from pipelines.runtime.shards import run_units
from pipelines.stages.attack import sanity
from pipelines.stages.attack import units as plan
from pipelines.stages.attack.documents import CurvePoint, Curves, ModelSummary
from pipelines.stages.attack.live import RoundLedger
from pipelines.stages.attack.results import (
    ModelUnderAttack,
    write_examples,
    write_rows,
    write_summary,
)
from pipelines.stages.attack.worker import DEVICE, AttackConfig, make_prober, make_worker


@dataclass(frozen=True)
class UnitRunner:
    """Runs the units of one step that are missing, and reads their results."""

    config: AttackConfig
    num_classes: int
    parts: PartStore
    cluster: ClusterSection
    out: StageDir
    devices: set[str] = field(default_factory=set)  # that computed what was read

    def run(self, units: Iterable[Unit], ledger: RoundLedger, *, phase: str) -> None:
        run_units(
            list(units),
            make=make_worker,
            config=self.config,
            parts=self.parts,
            cluster=self.cluster,
            source=ledger,
            out=self.out,
            phase=phase,
        )

    def table(self, units: Iterable[Unit]) -> pa.Table:
        return pa.concat_tables(
            self._noted(table) for table in self.parts.tables([unit.name for unit in units])
        )

    def _noted(self, table: pa.Table) -> pa.Table:
        """The table without its column of devices, which are kept apart."""
        if DEVICE not in table.column_names:  # a part of an earlier version
            return table
        self.devices.update(table[DEVICE].to_pylist())
        return table.drop_columns([DEVICE])


def run(recipe: Recipe, inputs: Mapping[str, Folder], out: StageDir) -> None:
    """Attack every model of this entry; write per-item results and a summary."""
    section = recipe.attack[out.part]
    dataset = PreparedDataset.open(inputs["prepare"])
    runner = _runner(recipe, section, dataset, inputs, out)
    num_items = min(section.num_items or dataset.splits["test"], dataset.splits["test"])
    listed = attack_list(section.attacks, norm=section.norm, eps=section.eps)
    check_class_count([attack.settings for attack in listed], num_classes=len(dataset.classes))
    works = [
        ModelUnits.of(
            section,
            model,
            listed,
            num_items,
            num_classes=runner.num_classes,
            micro_batch=runner.config.passes.micro_batch,
        )
        for model in section.models
    ]
    units = [unit for work in works for unit in work.units()]
    clean = RoundLedger.clean(units, {work.model: work.clean for work in works})
    runner.run(units, clean, phase="clean")
    models = {work: ModelUnderAttack.before(work.model, runner.table(work.clean)) for work in works}
    for number, attack in enumerate(listed):
        _round(runner, models, number, attack)
    summaries = {work.model: _summary(runner, section, work, models[work]) for work in works}
    write_examples(out, list(models.values()), dataset)
    write_rows(out, list(models.values()))
    write_summary(
        out,
        section,
        listed,
        summaries,
        devices=sorted(runner.devices),
        passes=None if asked_passes(section).is_decided else runner.config.passes,
    )


@dataclass(frozen=True, eq=False)
class ModelUnits:
    """The units of one model that do not depend on results of others: all of them run at once."""

    model: str
    audit: Sequence[Unit]
    scales: Mapping[str, Unit]  # by the name of the scaled attack
    curves: plan.CurveUnits
    clean: Sequence[Unit]

    @staticmethod
    def of(
        section: AttackSection,
        model: str,
        listed: Sequence[ListedAttack],
        num_items: int,
        *,
        num_classes: int,
        micro_batch: int,
    ) -> "ModelUnits":
        return ModelUnits(
            model,
            audit=plan.audit_units(section, model, num_items),
            scales=plan.scale_units(model, listed),
            curves=plan.curve_units(
                section, model, num_items, num_classes=num_classes, micro_batch=micro_batch
            ),
            clean=plan.clean_units(model, num_items, micro_batch=micro_batch),
        )

    def units(self) -> list[Unit]:
        """Long ones first."""
        points = [unit for point in self.curves.values() for unit in point]
        return [*self.audit, *self.scales.values(), *points, *self.clean]


def _runner(
    recipe: Recipe,
    section: AttackSection,
    dataset: PreparedDataset,
    inputs: Mapping[str, Folder],
    out: StageDir,
) -> UnitRunner:
    names = dict.fromkeys([*section.models, *([section.surrogate] if section.surrogate else [])])
    folders = {model: build.model_folder(inputs, model) for model in names}
    headers = {model: read_header(folder) for model, folder in folders.items()}
    for model, header in headers.items():
        spec = ModelSpec.from_dict(header["spec"], source=f"model {model}")
        spec.check_image((dataset.channels, dataset.height, dataset.width))
        spec.check_classes(len(dataset.classes))
    if not dataset.splits["test"]:
        raise CasemateError("attack", inputs["prepare"], "has no test items to attack")
    asked = asked_passes(section)
    config = AttackConfig(
        dataset=inputs["prepare"],
        models=folders,
        norm=section.norm,
        eps=section.eps,
        passes=asked.known,
        seed=recipe.seed,
    )
    device = recipe.cluster.actor_device
    made_with = [header["digest"] for header in headers.values()]
    made_with = [out.fingerprint, dataset.digest, made_with, device, software()]
    if not asked.is_decided:
        first = section.models[0]
        passes = _decided(config, asked, first, recipe.cluster, out, made_with)
        config = replace(config, passes=passes)
        made_with.append(config.passes.to_dict())
    parts = out.parts("parts", run_id=digest_json(made_with))
    return UnitRunner(config, len(dataset.classes), parts, recipe.cluster, out)


def asked_passes(section: AttackSection) -> AskedPasses:
    """What a section asks for."""
    return AskedPasses(
        micro_batch=section.micro_batch, precision=section.precision, compiled=section.compiled
    )


def _decided(
    config: AttackConfig,
    asked: AskedPasses,
    model: str,
    cluster: ClusterSection,
    out: StageDir,
    made_with: Sequence[object],
) -> AttackPasses:
    """What a first worker decides. Kept, so that a resumed step decides nothing anew."""
    parts = out.parts("probe", run_id=digest_json(["passes", *made_with]))
    unit = Unit(f"probe-{parts.run_id[:12]}", "the first worker", model)
    run_units(
        [unit],
        make=make_prober,
        config=(config, asked),
        parts=parts,
        cluster=cluster,
        label=f"{out.step} probe",
    )
    (found,) = parts.load(unit.name).to_pylist()
    passes = AttackPasses(**json.loads(found["passes"]))
    if passes.why_eager:
        say(f"{out.step}: goes on without compiled passes: {passes.why_eager}")
    if passes.precision != "float32":
        say(f"{out.step}: accuracies are those of the models in {passes.precision}")
    return passes


def _round(
    runner: UnitRunner,
    models: Mapping[ModelUnits, ModelUnderAttack],
    number: int,
    listed: ListedAttack,
) -> None:
    """One attack on the robust items of all models."""
    name = f"{number:02d}-{listed.name}"
    scales = {}
    units = {}
    for work, model in models.items():
        unit = work.scales.get(listed.name)
        found = runner.table([unit])["scales"].to_pylist() if unit else []
        scales[work] = tuple(tuple(row) for row in found)
        units[work] = plan.attack_units(
            name,
            work.model,
            listed,
            model.robust_items,
            scales[work],
            num_classes=runner.num_classes,
            micro_batch=runner.config.passes.micro_batch,
        )
    ledger = RoundLedger.attack([(models[work], own) for work, own in units.items()])
    runner.run((unit for own in units.values() for unit in own), ledger, phase=listed.name)
    for work, model in models.items():
        if units[work]:
            model.record(listed, runner.table(units[work]), scales[work])
        else:
            model.skip(listed)


def _summary(
    runner: UnitRunner, section: AttackSection, work: ModelUnits, model: ModelUnderAttack
) -> ModelSummary:
    """The summary of one model: the attack list, the curves, and the sanity checks."""
    curves: Curves = {}
    for (key, value), units in work.curves.items():
        accuracy = model.accuracy_of(runner.table(units))
        point: CurvePoint = (
            {"eps": value, "accuracy": accuracy}
            if key == "eps"
            else {"steps": value, "accuracy": accuracy}
        )
        curves.setdefault(key, []).append(point)
    summary = model.summary()
    if curves:
        summary["curves"] = curves
    if section.sanity:
        summary["sanity"] = sanity.summarise(runner.table(work.audit), model.state, curves)
    return summary
