"""Attack models on test items: a list of attacks, each on what all before it left standing.

Every attack is a round of units on the sharded executor. Which items a round gets, and how they are
cut into units, follows from the finished parts of earlier rounds, so a killed stage goes on in the
middle of the list, and workers, order and batches change nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.attacks.suite import check_class_count
from components.core.digests import digest_json
from components.core.errors import CasemateError
from components.core.units import Unit
from components.data.prepared import PreparedDataset
from components.models.checkpoint import read_header
from components.models.spec import ModelSpec
from pipelines.recipe import build
from pipelines.recipe.schema.attack import AttackSection
from pipelines.recipe.schema.place import ClusterSection
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir, software
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import run_units
from pipelines.stages.attack import sanity
from pipelines.stages.attack import units as plan
from pipelines.stages.attack.results import Victim, write_examples, write_rows, write_summary
from pipelines.stages.attack.worker import AttackConfig, make_worker


@dataclass(frozen=True)
class Campaign:
    """The units of one step: run where they are missing, then read back."""

    config: AttackConfig
    parts: PartStore
    cluster: ClusterSection
    label: str  # one for all rounds: workers keep the models that they have loaded

    def run(self, units: Iterable[Unit]) -> None:
        run_units(
            list(units),
            make=make_worker,
            config=self.config,
            parts=self.parts,
            cluster=self.cluster,
            label=self.label,
        )

    def table(self, units: Iterable[Unit]) -> pa.Table:
        return pa.concat_tables(self.parts.tables([unit.name for unit in units]))


def run(recipe: Recipe, inputs: Mapping[str, Path], out: StageDir) -> None:
    """Attack every model of this entry, keep per-item results, summarise with exact intervals."""
    section = recipe.attack[out.part]
    dataset = PreparedDataset.open(inputs["prepare"])
    campaign = _campaign(recipe, section, dataset, inputs, out)
    num_items = min(section.num_items or dataset.splits["test"], dataset.splits["test"])
    listed = build.attack_list(section)
    check_class_count([attack.attack for attack in listed], num_classes=len(dataset.classes))
    works = [Work.of(section, model, listed, num_items) for model in section.models]
    campaign.run(unit for work in works for unit in work.units())
    victims = {work: Victim.before(work.model, campaign.table(work.clean)) for work in works}
    for number, attack in enumerate(listed):
        _round(campaign, victims, number, attack)
    pages = {work.model: _page(campaign, section, work, victims[work]) for work in works}
    write_examples(out, list(victims.values()), dataset)
    write_rows(out, list(victims.values()))
    write_summary(out, section, listed, pages)


@dataclass(frozen=True, eq=False)
class Work:
    """What is known about one model before anybody has fallen: all of this runs at once."""

    model: str
    audit: Sequence[Unit]
    scales: Mapping[str, Unit]  # by the name of the scaled attack
    curves: plan.CurveUnits
    clean: Sequence[Unit]

    @staticmethod
    def of(
        section: AttackSection, model: str, listed: Sequence[build.ListedAttack], num_items: int
    ) -> "Work":
        return Work(
            model,
            audit=plan.audit_units(section, model, num_items),
            scales=plan.scale_units(model, listed),
            curves=plan.curve_units(section, model, num_items),
            clean=plan.clean_units(model, num_items),
        )

    def units(self) -> list[Unit]:
        """Long ones first."""
        points = [unit for point in self.curves.values() for unit in point]
        return [*self.audit, *self.scales.values(), *points, *self.clean]


def _campaign(
    recipe: Recipe,
    section: AttackSection,
    dataset: PreparedDataset,
    inputs: Mapping[str, Path],
    out: StageDir,
) -> Campaign:
    names = dict.fromkeys([*section.models, *([section.surrogate] if section.surrogate else [])])
    folders = {model: build.model_folder(inputs, model) for model in names}
    headers = {model: read_header(folder) for model, folder in folders.items()}
    for model, header in headers.items():
        spec = ModelSpec.from_dict(header["spec"], source=f"model {model}")
        spec.check_image((dataset.channels, dataset.height, dataset.width))
        spec.check_classes(len(dataset.classes))
    if not dataset.splits["test"]:
        raise CasemateError("attack", inputs["prepare"], "has no test items to attack")
    device = build.actor_device(recipe.cluster)
    config = AttackConfig(inputs["prepare"], folders, section, recipe.seed, device)
    made_with = [header["digest"] for header in headers.values()]
    identity = digest_json([out.fingerprint, dataset.digest, made_with, device, software()])
    parts = PartStore(out.scratch / "parts", run_id=identity)
    return Campaign(config, parts, recipe.cluster, out.step)


def _round(
    campaign: Campaign, victims: Mapping[Work, Victim], number: int, listed: build.ListedAttack
) -> None:
    """One attack on the survivors of all models."""
    name = f"{number:02d}-{listed.name}"
    scales = {}
    units = {}
    for work, victim in victims.items():
        unit = work.scales.get(listed.name)
        found = campaign.table([unit])["scales"].to_pylist() if unit else []
        scales[work] = tuple(tuple(row) for row in found)
        units[work] = plan.attack_units(name, work.model, listed, victim.survivors, scales[work])
    campaign.run(unit for own in units.values() for unit in own)
    for work, victim in victims.items():
        if units[work]:
            victim.settle(listed, campaign.table(units[work]), scales[work])
        else:
            victim.skip(listed)


def _page(campaign: Campaign, section: AttackSection, work: Work, victim: Victim) -> dict[str, Any]:
    """The summary of one model: the attack list, the curves, and whether to believe them."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for (key, value), units in work.curves.items():
        point = {key: value, "accuracy": victim.share_right(campaign.table(units))}
        curves.setdefault(key, []).append(point)
    page = victim.page()
    if curves:
        page["curves"] = curves
    if section.sanity:
        page["sanity"] = sanity.summarise(campaign.table(work.audit), victim.standing, curves)
    return page
