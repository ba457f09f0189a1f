"""Stage prepare: any source -> checksummed shards and dataset.json, by Ray Data.

The driver plans every shard before work starts; each plan is one Ray Data row and one task, which
writes its own file. Bytes therefore depend on the plan alone, whatever the number of workers.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.data

from components.core.digests import canonical_json
from components.core.errors import CasemateError, below_key
from components.core.files import leftovers
from components.core.folders import Folder
from components.data.encodings import PNG, Encoding
from components.data.fitting import Fitting
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
from components.data.sources import open_source
from components.data.sources.base import Entry, Source
from components.data.sources.labels import match_classes
from components.data.splits import (
    SPLITS,
    assign_splits,
    check_training_classes,
    shuffled,
    stratified_subset,
)
from pipelines.runtime.storage import SCRATCH
from pipelines.runtime.store import Ref
from pipelines.runtime.streams import ordered_ray_data

if TYPE_CHECKING:  # workers import this module and must not import pydantic and mlflow
    from components.data.settings import DataSettings
    from pipelines.recipe.schema.recipe import Recipe
    from pipelines.runtime.artifacts import StageDir
    from pipelines.runtime.storage import StepPlace

SYNTHETIC = "synthetic"  # the split of generated training images


def run(recipe: "Recipe", inputs: Mapping[str, Folder], out: "StageDir") -> None:
    """Write the prepared dataset; a second start keeps complete shards."""
    data, folder = recipe.data, out.path.absolute()
    fitting = Fitting(data.image_size, data.fit, data.channels, data.resize)
    source, generated = open_sources(data)
    splits = list_splits(data, source, generated)
    plans = plan_shards(splits, shard_size=data.shard_size)
    jobs = open_jobs(data, source, generated, plans, fitting=fitting, folder=folder)
    _remove(leftovers(folder))  # from a killed start
    _wait_for_a_cpu(recipe, out)
    records = _write_all(jobs, plans, out)
    if not source.test_only:
        _check_after_skipping(records, classes=source.classes)
    shapes = {split: job.shape for split, job in jobs.items()}
    text = describe_dataset(
        records,
        classes=source.classes,
        shape=shapes["test"],  # what models see; training images may be stored larger
        split_shapes=shapes,
        split_names=tuple(splits),
        encodings={split: job.encoding for split, job in jobs.items()},
        source={
            "name": data.source,
            "path": data.path,
            "split_seed": data.split_seed,
            "remarks": source.remarks,
            **asdict(fitting),
        },
    )
    out.write_text("dataset.json", text)
    _remove(record_path(folder, plan.file) for plan in plans)  # dataset.json holds all of it


def open_sources(data: "DataSettings") -> tuple[Source, Source | None]:
    """The dataset's source, and that of generated training images where there are any."""
    source = open_source(data.source, path=data.path, options=data.options)
    if source.test_only:
        check_no_training(data)
    if data.synthetic is None:
        return source, None
    made = data.synthetic
    with below_key("data.synthetic", instead_of="data"):
        generated = open_source(made.source, path=made.path, options=made.options)
    if len(generated.classes) > len(source.classes):
        remedy = f"has {len(generated.classes)} classes, {data.source} has {len(source.classes)}"
        raise CasemateError("data.synthetic.source", data.synthetic.source, remedy)
    _generated_labels(source, generated)
    return source, generated


def check_no_training(data: "DataSettings") -> None:
    """Refuse settings of training images for a source that has test items only."""
    remedy = f"does not apply: {data.source} has no training items"
    if data.train_size is not None:
        raise CasemateError("data.train_size", data.train_size, remedy)
    if data.synthetic is not None:
        raise CasemateError("data.synthetic", "", remedy)
    if data.train_format != "png":
        raise CasemateError("data.train_format", data.train_format, remedy)


def _generated_labels(source: Source, generated: Source) -> list[int]:
    """For each class of the generated images the label of the same class in the dataset."""
    return match_classes(generated.classes, classes=source.classes, key="data.synthetic.source")


def list_splits(
    data: "DataSettings", source: Source, generated: Source | None
) -> dict[str, list[Entry]]:
    """The entries of every split in stored order; generated images are a separate split."""
    limits = {str(split): limit for split, limit in data.limits.items()}
    num_generated = limits.pop(SYNTHETIC, None)
    splits = assign_splits(
        source.entries(),
        classes=source.classes,
        seed=data.split_seed,
        val_fraction=data.val_fraction,
        test_fraction=data.test_fraction,
        limits=limits,
        test_only=source.test_only,
    )
    if generated is None:
        return splits
    labels = _generated_labels(source, generated)
    entries = [
        replace(  # ids stay unique in the dataset
            entry, item_id=f"{SYNTHETIC}-{entry.item_id}", label=labels[entry.label]
        )
        for entry in generated.entries()
        if entry.split_hint in (None, "train")
    ]
    if num_generated is not None:
        entries = stratified_subset(
            entries, limit=num_generated, stream=SYNTHETIC, seed=data.split_seed
        )
    return {**splits, SYNTHETIC: shuffled(entries, seed=data.split_seed)}


def open_jobs(
    data: "DataSettings",
    source: Source,
    generated: Source | None,
    plans: list[ShardPlan],
    *,
    fitting: Fitting,
    folder: Path,
) -> dict[str, ShardJob]:
    """How the shards of each split are written; splits from one source at one size share a job."""
    groups: list[tuple[Sequence[str], Source, Fitting]] = [(SPLITS, source, fitting)]
    larger = fitting
    if data.train_size is not None:
        larger = fitting.enlarged(data.train_size)
        groups = [(("train",), source, larger), (("val", "test"), source, fitting)]
    if generated is not None:
        groups.append(((SYNTHETIC,), generated, larger))
    jobs: dict[str, ShardJob] = {}
    for splits, origin, wanted in groups:
        entries = (entry for plan in plans if plan.split in splits for entry in plan.entries)
        job = open_job(origin, entries, folder=folder, fitting=wanted, on_error=data.on_error)
        jobs |= dict.fromkeys(splits, job)
    _check_shapes(jobs)
    encoding = Encoding.of(data)  # of the training splits
    if encoding != PNG:
        trained = {split for split in ("train", SYNTHETIC) if split in jobs}
        jobs |= {split: replace(jobs[split], encoding=encoding) for split in trained}
    return jobs


def _check_shapes(jobs: Mapping[str, ShardJob]) -> None:
    """Refuse splits with different channels, or generated images of another size."""
    first = next(iter(jobs.values()))
    for split, job in jobs.items():
        if split == SYNTHETIC and job.shape[:2] != jobs["train"].shape[:2]:
            sizes = ["x".join(map(str, j.shape[:2])) for j in (job, jobs["train"])]
            remedy = (
                f"is {sizes[0]} while {jobs['train'].reference_id} is {sizes[1]}; "
                "set data.image_size"
            )
            raise CasemateError("data.image_size", job.reference_id, remedy)
        if job.shape[2] != first.shape[2]:
            remedy = (
                f"has {job.shape[2]} channels while {first.reference_id} has {first.shape[2]}; "
                "set data.channels"
            )
            raise CasemateError("data.channels", job.reference_id, remedy)


def _wait_for_a_cpu(recipe: "Recipe", out: "StageDir") -> None:
    """Ray Data would wait without a word and without an end."""
    from pipelines.runtime.cluster import is_local
    from pipelines.runtime.waiting import wait_for_room

    if not is_local():
        wait_for_room({"CPU": 1}, num_workers=1, label=out.step, max_wait=recipe.cluster.max_wait)


def _write_all(
    jobs: Mapping[str, ShardJob], plans: list[ShardPlan], out: "StageDir"
) -> list[ShardRecord]:
    """One task per plan; returns the records in the order of the plans."""
    from pipelines.runtime import progress
    from pipelines.runtime.gauges import shown_at

    # embedded sources carry their pixels: one copy per node, not per task
    stored = {id(job): ray.put(job) for job in jobs.values()}
    shared = {split: stored[id(job)] for split, job in jobs.items()}
    records: list[ShardRecord] = []
    shown = progress.bar(out.step, total=len(plans), unit="shards", **shown_at(out))
    with ordered_ray_data(), shown as bar:
        rows = ray.data.from_items(
            [{"plan": plan.packed()} for plan in plans], override_num_blocks=len(plans)
        )
        place = None if out.place.storage.is_local else out.place
        outcomes = rows.map_batches(
            _write_planned, batch_size=1, fn_kwargs={"shared": shared, "place": place}
        )
        for row in outcomes.iter_rows():
            outcome = json.loads(row["outcome"])
            if "error" in outcome:
                raise CasemateError(*outcome["error"])
            records.append(ShardRecord(**outcome["record"]))
            if "stored" in outcome:
                out.stored[records[-1].file] = Ref(**outcome["stored"])
            bar.advance()
    return records


def _write_planned(
    rows: dict[str, Any],
    *,
    shared: "Mapping[str, ray.ObjectRef[ShardJob]]",
    place: "StepPlace | None",
) -> dict[str, Any]:
    """Worker: one plan in, one outcome out; `place` is that of the step if it shares no disk.

    A user error is returned as a value: Ray Data rewrites the text of exceptions.
    """
    outcomes: list[str] = []
    for packed in rows["plan"]:
        plan = ShardPlan.unpacked(bytes(packed))
        try:
            outcome = _write(ray.get(shared[plan.split]), plan, place)
        except CasemateError as error:
            outcome = {"error": [error.key, str(error.value), error.remedy]}
        outcomes.append(json.dumps(outcome))
    return {"outcome": outcomes}


def _write(job: ShardJob, plan: ShardPlan, place: "StepPlace | None") -> dict[str, Any]:
    """Write a shard to the step's folder, or store it unless an earlier start did."""
    if place is None:
        return {"record": asdict(write_shard(job, plan))}
    key = f"{place.key}/{SCRATCH}/records/{job.plan_key(plan)}.json"
    if done := place.store.find(key):
        found: dict[str, Any] = json.loads(done)
        return found
    with tempfile.TemporaryDirectory() as folder:
        record = write_shard(replace(job, folder=Path(folder)), plan)
        stored = place.put_file(plan.file, Path(folder) / plan.file)
    outcome = {"record": asdict(record), "stored": stored._asdict()}
    place.store.put_same(key, canonical_json(outcome).encode())
    return outcome


def _check_after_skipping(records: list[ShardRecord], *, classes: tuple[str, ...]) -> None:
    labels = [label for record in records if record.split == "train" for label in record.labels]
    remedy = "all its images were skipped; repair them"
    check_training_classes(labels, classes=classes, remedy=remedy)
    for split in SPLITS:
        if not any(record.labels for record in records if record.split == split):
            remedy = "is empty: all its images were skipped; repair them"
            raise CasemateError("data", f"the {split} split", remedy)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
