"""Trainings of arms, one at a time, and the file that stores their results.

A trial is a function of (arm, size, seed). Its line in the file carries a digest of the settings it
was made with: a trial whose settings are no longer those of its arm is repeated, never shown.
"""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from components.core.digests import digest_json
from components.data.fitting import Fitting
from components.data.prepared import PreparedDataset
from components.data.settings import DataSettings
from components.data.shards import describe_dataset, open_job, plan_shards, write_shard
from components.data.sources import open_source
from notebooks.replications.arms import ARMS, Size, values_of
from notebooks.replications.measures import MEASURES
from pipelines.recipe.load import parse
from pipelines.stages.prepare.stage import list_splits
from pipelines.stages.train.session import make_session

Trial = dict[str, Any]
Results = dict[str, list[Trial]]  # arm -> its trials, in the order of their seeds


def run_all(
    path: Path,
    size: Size,
    *,
    arms: Iterable[str] = tuple(ARMS),
    report: Callable[[str], None] = lambda line: None,
) -> Results:
    """Every trial of these arms: read from the file, or run and added to it.

    May be stopped at any time and started again, and run for different arms in parallel.
    """
    found: Results = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        for seed in size.seeds:
            for arm in arms:
                trial = read(path).get((arm, seed, digest_of(arm, size)))
                if trial is None:
                    trial = _run(arm, size, seed=seed, folder=Path(scratch))
                    _append(path, trial)
                    report(f"{arm}, seed {seed}: {trial['seconds']:.0f} s of processor time")
                found[arm].append(trial)
    return dict(found)


def digest_of(arm: str, size: Size) -> str:
    """Digest of everything a trial depends on besides its seed: training and measurement."""
    values = values_of(ARMS[arm], size, seed=0)
    measured = [size.band, size.patch_sizes, size.apgd_steps, size.pgd_steps]
    return digest_json([values, ARMS[arm].measure, measured])[:16]


def read(path: Path) -> Mapping[tuple[str, int, str], Trial]:
    """The trials of a file by arm, seed and settings."""
    lines = path.read_text().splitlines() if path.exists() else []
    trials = [json.loads(line) for line in lines]
    return {(t["arm"], t["seed"], t["settings"]): t for t in trials}


def tidy(path: Path, results: Results) -> None:
    """Rewrite a file with these trials only."""
    lines = [json.dumps(trial) for trials in results.values() for trial in trials]
    path.write_text("\n".join(lines) + "\n")


def prepare(data: DataSettings, folder: Path) -> PreparedDataset:
    """The dataset as `casemate prepare` writes it; too small to start Ray for it."""
    source = open_source(data.source, path=None)
    splits = list_splits(data, source, None)
    fitting = Fitting(data.image_size, data.fit)
    job = open_job(source, splits["test"], folder=folder, fitting=fitting, on_error="fail")
    records = [write_shard(job, plan) for plan in plan_shards(splits, shard_size=data.shard_size)]
    text = describe_dataset(
        records,
        classes=source.classes,
        shape=job.shape,
        split_names=tuple(splits),
        source={"name": data.source, "split_seed": data.split_seed},
    )
    (folder / "dataset.json").write_text(text)
    return PreparedDataset.open(folder)


def _run(name: str, size: Size, *, seed: int, folder: Path) -> Trial:
    """Train one arm from scratch and count on test items."""
    torch.set_num_threads(1)  # sums in a matrix product depend on the number of threads
    arm, began = ARMS[name], time.process_time()
    recipe = parse(values_of(arm, size, seed=seed), source="replications")
    kept = folder / "dataset.json"
    dataset = PreparedDataset.open(folder) if kept.exists() else prepare(recipe.data, folder)
    session = make_session(recipe, "main", dataset)
    while not session.finished:
        session.run_epoch()
    model = session.final_model()
    counts = MEASURES[arm.measure](model, dataset, size, seed=seed)
    return {
        "arm": name,
        "seed": seed,
        "settings": digest_of(name, size),
        "counts": counts,
        "num_params": sum(p.numel() for p in model.parameters()),
        "epoch": session.selected_epoch,
        "seconds": round(time.process_time() - began, 1),
    }


def _append(path: Path, trial: Trial) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:  # one short write: lines of two processes do not mix
        file.write(json.dumps(trial) + "\n")
