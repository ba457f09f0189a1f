"""Attack models on test items through the sharded executor; one row per model and item."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.attacks.gradients import attack_mode
from components.attacks.pgd import AttackResult, in_fixed_batches, pgd_linf
from components.attacks.starts import random_starts
from components.core.digests import digest_json
from components.core.threats import LinfThreat, describe
from components.data.prepared import ImageSplit, PreparedDataset
from components.evaluate.accuracy import accuracy
from components.models.checkpoint import load_model, read_header
from components.models.pixels import PixelModel
from pipelines import build
from pipelines.recipe import Recipe
from pipelines.runtime.artifacts import StageDir, software
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import Unit, WorkFn, run_units
from pipelines.sections import PgdAttack

ITEMS_PER_UNIT = 100
NUM_EXAMPLES = 6  # adversarial images kept for people to look at


@dataclass(frozen=True, slots=True)
class AttackConfig:
    """What a worker needs: places and settings, no tensors."""

    dataset: Path
    models: Mapping[str, Path]
    attack: PgdAttack
    seed: int
    device: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive test items under one model."""

    model: str
    start: int
    stop: int


class PgdWorker:
    """Loads data once and each model once, then attacks chunk after chunk."""

    def __init__(self, config: AttackConfig) -> None:
        self.config = config
        self.items = PreparedDataset.open(config.dataset).open_split("test")
        self.model = cache(lambda name: load_model(config.models[name], device=config.device))

    def attack(self, name: str, part: ImageSplit) -> AttackResult:
        c = self.config
        model: PixelModel = self.model(name)
        x, y = part.pixels().to(c.device), part.labels.to(c.device)
        starts = random_starts(part.item_ids, tuple(x.shape[1:]), run_seed=c.seed, stream="pgd")
        with attack_mode(model):
            return pgd_linf(
                in_fixed_batches(model, size=c.attack.micro_batch),
                x,
                y,
                eps=c.attack.eps,
                num_steps=c.attack.num_steps,
                step_size=c.attack.step_size or c.attack.eps / 4,
                starts=starts.to(c.device),
            )

    def __call__(self, chunk: Chunk) -> pa.Table:
        part = self.items.span(chunk.start, chunk.stop)
        result = self.attack(chunk.model, part)
        moved = (result.x_adv.cpu() - part.pixels()).abs().flatten(1).amax(dim=1)
        clean, after = result.clean_prediction.cpu(), result.adversarial_prediction.cpu()
        broken = (clean == part.labels) & (after != part.labels)
        images = result.x_adv.cpu().numpy()
        keep = [
            images[i].tobytes() if chunk.start + i < NUM_EXAMPLES else None
            for i in range(len(part))
        ]
        return pa.table(
            {
                "model": [chunk.model] * len(part),
                "item_id": list(part.item_ids),
                "label": pa.array(part.labels.tolist(), pa.int32()),
                "clean_prediction": pa.array(clean.tolist(), pa.int32()),
                "adversarial_prediction": pa.array(after.tolist(), pa.int32()),
                "broken_by": pa.array(
                    [self.config.attack.kind if b else None for b in broken.tolist()], pa.string()
                ),
                "num_evaluations": pa.array(result.num_evaluations.tolist(), pa.int32()),
                "zero_gradient": result.zero_gradient.tolist(),
                "norm": pa.array(moved.tolist(), pa.float32()),
                "image": pa.array(keep, pa.binary()),
            }
        )


def make_worker(config: AttackConfig) -> WorkFn:
    return PgdWorker(config)


def run(recipe: Recipe, inputs: Mapping[str, Path], out: StageDir) -> None:
    """Attack every model of this entry, keep per-item results, summarise with exact intervals."""
    attack = recipe.attack[out.part]
    dataset = PreparedDataset.open(inputs["prepare"])
    num_items = min(attack.num_items or dataset.splits["test"], dataset.splits["test"])
    config = AttackConfig(
        inputs["prepare"],
        {m: inputs[f"train.{m}"] / "model" for m in attack.models},
        attack,
        recipe.seed,
        build.actor_device(recipe.cluster),
    )
    units = [
        Unit(
            f"{model}-{start:08d}",
            f"{model}, test items {start}..{stop - 1}",
            Chunk(model, start, stop),
        )
        for model in attack.models
        for start in range(0, num_items, ITEMS_PER_UNIT)
        for stop in [min(start + ITEMS_PER_UNIT, num_items)]
    ]
    made_with = [read_header(folder)["digest"] for folder in config.models.values()]
    identity = digest_json([out.fingerprint, dataset.digest, made_with, config.device, software()])
    parts = PartStore(out.scratch / "parts", run_id=identity)
    run_units(
        units, make=make_worker, config=config, parts=parts, cluster=recipe.cluster, label=out.step
    )
    table = pa.concat_tables(parts.tables([u.name for u in units]))
    _write_examples(out, table, dataset, inputs["prepare"])
    table = table.drop_columns(["image"])
    partial = out.scratch / "attacks.parquet"
    pq.write_table(table, partial)
    partial.rename(out.path / "attacks.parquet")
    _summarise(out, attack, table)


def _summarise(out: StageDir, attack: PgdAttack, table: pa.Table) -> None:
    frame = table.to_pandas()
    models: dict[str, dict[str, Any]] = {}
    for model in attack.models:
        rows = frame[frame.model == model]
        clean = (rows.clean_prediction == rows.label).to_numpy()
        standing = clean & (rows.adversarial_prediction == rows.label).to_numpy()
        models[model] = {
            "num_items": len(rows),
            "clean_accuracy": accuracy(clean),
            "robust_accuracy": accuracy(standing),
            "zero_gradient_rate": float(rows.zero_gradient.mean()),
            "num_evaluations": int(rows.num_evaluations.sum()),
        }
        out.run.metrics(
            {
                f"attack/{out.part}/{model}/{name}": models[model][name]["value"]
                for name in ("clean_accuracy", "robust_accuracy")
            }
        )
    threat = describe(LinfThreat(attack.eps))
    settings = {**attack.model_dump(), "step_size": attack.step_size or attack.eps / 4}
    out.write_json(
        "summary.json",
        {"kind": attack.kind, "threat": threat, "settings": settings, "models": models},
    )
    out.run.artifacts(out.path / "attacks.parquet", out.path / "summary.json")


def _write_examples(out: StageDir, table: pa.Table, dataset: PreparedDataset, folder: Path) -> None:
    """A few clean and adversarial images of each model, as arrays."""
    kept = table.filter(pa.compute.is_valid(table["image"])).to_pylist()
    split = dataset.load("test", limit=NUM_EXAMPLES)
    clean = dict(zip(split.item_ids, split.pixels().numpy(), strict=True))
    arrays: dict[str, Any] = {}
    for model in dict.fromkeys(row["model"] for row in kept):
        rows = [row for row in kept if row["model"] == model]
        arrays[f"{model}/clean"] = np.stack([clean[r["item_id"]] for r in rows])
        shape = arrays[f"{model}/clean"].shape[1:]
        arrays[f"{model}/adversarial"] = np.stack(
            [np.frombuffer(r["image"], np.float32).reshape(shape) for r in rows]
        )
        for name in ("label", "clean_prediction", "adversarial_prediction"):
            arrays[f"{model}/{name}"] = np.array([r[name] for r in rows])
    partial = out.scratch / "examples.npz"
    np.savez_compressed(partial, **arrays)
    partial.rename(out.path / "examples.npz")
