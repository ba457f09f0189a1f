"""Stage prepare: any source -> checksummed shards and dataset.json, by Ray Data.

The driver plans every shard before work starts; each plan is one Ray Data row and one task, which
writes its own file. Bytes therefore depend on the plan alone, whatever the number of workers.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.data

from components.core.errors import CasemateError
from components.data.shards import (
    ShardJob,
    ShardPlan,
    ShardRecord,
    describe_dataset,
    open_job,
    plan_shards,
    record_path,
    write_shard,
)
from components.data.sources import Fitting, open_source
from components.data.splits import SPLITS, assign_splits, check_training_classes

if TYPE_CHECKING:  # workers import this module: spare them pydantic and mlflow
    from pipelines.recipe import Recipe
    from pipelines.runtime.artifacts import StageDir


def run(recipe: "Recipe", inputs: Mapping[str, Path], out: "StageDir") -> None:
    """Writes the prepared dataset; a second start keeps the shards that are already whole."""
    data = recipe.data
    fitting = Fitting(data.image_size, data.fit, data.channels)
    source = open_source(data.source, path=data.path)
    splits = assign_splits(
        source.entries(),
        classes=source.classes,
        seed=data.split_seed,
        val_fraction=data.val_fraction,
        test_fraction=data.test_fraction,
        limits={str(split): limit for split, limit in data.limits.items()},
    )
    plans = plan_shards(splits, shard_size=data.shard_size)
    folder = out.path.absolute()
    entries = (entry for plan in plans for entry in plan.entries)
    job = open_job(source, entries, folder=folder, fitting=fitting, on_error=data.on_error)
    _remove(folder.glob(".*.tmp"))  # parts of a killed start
    records = _write_all(job, plans)
    _check_after_skipping(records, classes=source.classes)
    text = describe_dataset(
        records,
        classes=source.classes,
        shape=job.shape,
        split_names=SPLITS,
        source={
            "name": data.source,
            "path": data.path,
            "split_seed": data.split_seed,
            **asdict(fitting),
        },
    )
    out.write_text("dataset.json", text)
    _remove(record_path(folder, plan.file) for plan in plans)  # dataset.json says it all now


def _write_all(job: ShardJob, plans: list[ShardPlan]) -> list[ShardRecord]:
    """One task per plan; the records come back in the order of the plans."""
    shared = ray.put(job)  # embedded sources carry their pixels: one copy per node, not per task
    records: dict[str, ShardRecord] = {}
    with _quiet_ray_data():
        rows = ray.data.from_items(
            [{"plan": plan.to_json()} for plan in plans], override_num_blocks=len(plans)
        )
        outcomes = rows.map_batches(_write_planned, batch_size=1, fn_kwargs={"shared": shared})
        for row in outcomes.iter_rows():
            outcome = json.loads(row["outcome"])
            if "error" in outcome:
                raise CasemateError(*outcome["error"])
            record = ShardRecord(**outcome["record"])
            records[record.file] = record
    return [records[plan.file] for plan in plans]


def _write_planned(rows: dict[str, Any], *, shared: "ray.ObjectRef[ShardJob]") -> dict[str, Any]:
    """Worker: one plan in, one outcome out.

    A user's mistake returns as a value: Ray Data rewrites the text of exceptions on their way.
    """
    job: ShardJob = ray.get(shared)
    outcomes: list[str] = []
    for plan in rows["plan"]:
        try:
            record = write_shard(job, ShardPlan.from_json(str(plan)))
        except CasemateError as error:
            outcomes.append(json.dumps({"error": [error.key, str(error.value), error.remedy]}))
        else:
            outcomes.append(json.dumps({"record": asdict(record)}))
    return {"outcome": outcomes}


def _check_after_skipping(records: list[ShardRecord], *, classes: tuple[str, ...]) -> None:
    labels = [label for record in records if record.split == "train" for label in record.labels]
    check_training_classes(labels, classes=classes, remedy="all its images were skipped: mend them")


@contextmanager
def _quiet_ray_data() -> Iterator[None]:
    """No bars and no chatter while the rows run; the caller's settings return afterwards."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with ray.data.DataContext.current(context):
            yield
    finally:
        logger.setLevel(level)


def _remove(paths: Iterator[Path]) -> None:
    for path in list(paths):
        path.unlink(missing_ok=True)
