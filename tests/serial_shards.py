"""A dataset prepared in this process, as the workers of stage prepare would write it."""

import pickle
from pathlib import Path

from components.data.fitting import Fitting
from components.data.shards import describe_dataset, open_job, plan_shards, write_shard
from components.data.sources.base import Source
from components.data.splits import assign_splits


def write_serially(source: Source, folder: Path, **limits: int) -> str:
    """Write shards of 8 items, 8 pixels a side; the text of dataset.json."""
    folder.mkdir()
    splits = assign_splits(
        source.entries(),
        classes=source.classes,
        seed=7,
        val_fraction=0.1,
        test_fraction=0.2,
        limits=limits,
    )
    plans = plan_shards(splits, shard_size=8)
    job = open_job(
        source, plans[0].entries, folder=folder, fitting=Fitting(8, "pad"), on_error="fail"
    )
    records = [write_shard(pickle.loads(pickle.dumps(job)), plan) for plan in plans]
    return describe_dataset(
        records, classes=source.classes, shape=job.shape, split_names=tuple(splits), source={}
    )


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}
