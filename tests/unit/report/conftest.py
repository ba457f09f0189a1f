"""A finished run, made up on the spot: tiny folders in the real formats."""

import hashlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from components.certify.certificate import write_certificate
from components.certify.vote_rows import VoteRow, image_digest
from components.certify.votes import write_votes
from components.core.statistics import accuracy
from components.core.threats import UNIT
from components.data.shards import FORMAT, SHARD_SCHEMA
from components.report.page import render
from pipelines.runtime.storage import StepPlace, Storage
from pipelines.stages.report.stage import build_content

WIDTH = 16
CLASSES = ("zero", "one", "two")
DATASET_DIGEST = "d" * 64
DIGESTS = {"main": "a" * 64, "standard": "b" * 64}
NUM_ITEMS = 40


@dataclass
class FakeRun:
    """The descriptions that MLflow would get, by training run."""

    described: dict[str | None, str] = field(default_factory=dict)

    def describe_model(self, trained_in: str | None, text: str) -> None:
        self.described[trained_in] = text


@dataclass
class FakeOut:
    """What the stage asks of an output folder."""

    path: Path
    run: FakeRun = field(default_factory=FakeRun)
    facts: dict[str, object] = field(default_factory=lambda: {"git_revision": "0" * 40})

    @property
    def place(self) -> StepPlace:
        return Storage.at(self.path.parents[1]).step(self.path.parent.name, self.path.name)

    def write_text(self, name: str, text: str) -> Path:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())
        return target

    def provenance(self) -> dict[str, object]:
        return self.facts

    def page_of_run(self, run_id: str) -> str | None:
        return None


def make_recipe(**changes: Any) -> SimpleNamespace:
    report = SimpleNamespace(title="A made-up run", num_examples=2, compare={})
    values = {"name": "made-up", "source": "made-up", "seed": 7, "report": report}
    recipe = SimpleNamespace(**{**values, **changes})
    recipe.resolved = lambda: {"name": recipe.name, "seed": recipe.seed, "data": {"source": "made"}}
    return recipe


def share(held: int, num_items: int) -> dict[str, float | int]:
    return accuracy(np.arange(num_items) < held)


def made_images(num_items: int) -> np.ndarray:
    """(N, H, W) uint8: a bar whose place is the label, so that pictures differ."""
    images = np.zeros((num_items, WIDTH, WIDTH), dtype=np.uint8)
    for i in range(num_items):
        left = 2 + 4 * (i % len(CLASSES))
        images[i, 3:13, left : left + 3] = 160 + i
    return images


def write_prepared(folder: Path) -> Path:
    folder.mkdir(parents=True)
    rows = []
    for i, image in enumerate(made_images(NUM_ITEMS)):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG")
        label = i % len(CLASSES)
        rows.append((f"made-{i:03d}", buffer.getvalue(), WIDTH, WIDTH, label))
    columns = [
        pa.array(column, f.type)
        for column, f in zip(zip(*rows, strict=True), SHARD_SCHEMA, strict=True)
    ]
    shard = folder / "test-00000.parquet"
    pq.write_table(pa.Table.from_arrays(columns, schema=SHARD_SCHEMA), shard)
    sha256 = hashlib.sha256(shard.read_bytes()).hexdigest()
    entry = {"file": shard.name, "sha256": sha256, "num_items": NUM_ITEMS}
    page = {
        "format": FORMAT, "classes": CLASSES, "channels": 1, "height": WIDTH, "width": WIDTH,
        "splits": {"train": {"num_items": 0, "shards": []},
                   "test": {"num_items": NUM_ITEMS, "shards": [entry]}},
        "source": {"name": "made"}, "skipped": [], "digest": DATASET_DIGEST,
    }  # fmt: skip
    (folder / "dataset.json").write_text(json.dumps(page))
    return folder


def write_train(folder: Path, model: str) -> Path:
    (folder / "model").mkdir(parents=True)
    header = {"format": 1, "spec": {"architecture": "tiny_vit"}, "digest": DIGESTS[model]}
    (folder / "model" / "model.json").write_text(json.dumps(header))
    robust = model == "main"
    rows = [
        {
            "epoch": e, "lr": 1e-3, "loss": 2 / (e + 1), "train_accuracy": 1 - 0.6 / (e + 1),
            "eps": min(e, 4) / 4 * 8 / 255 if robust else None,
            "val_accuracy": 1 - 0.7 / (e + 1), "seconds": 1.5,
            "val_robust_accuracy": 0.8 - 0.7 / (e + 1) if robust else None,
        }
        for e in range(8)
    ]  # fmt: skip
    (folder / "history.json").write_text(json.dumps({"rows": rows}))
    return folder


def attack_step(name: str, entry: str, *, given: int, left: int) -> dict[str, Any]:
    return {
        "name": name, "entry": entry, "num_items": given, "num_broken": given - left,
        "robust_accuracy": share(left, NUM_ITEMS), "num_evaluations": 21 * given,
        "num_gradients": 20 * given, "zero_gradient_rate": 0.0,
    }  # fmt: skip


def attack_page(clean: int, left: tuple[int, int, int]) -> dict[str, Any]:
    """Three attacks in two lines of a recipe, curves, doubts and a scaled attack."""
    names = (
        ("fgsm", "fgsm"),
        ("apgd-ce", "autoattack-standard"),
        ("square", "autoattack-standard"),
    )
    steps = [
        attack_step(*name, given=given, left=rest)
        for name, given, rest in zip(names, (clean, *left), left, strict=False)
    ]
    findings = [
        {"name": "logits", "ok": True, "value": 0.0, "limit": 0.5, "text": "these are logits"},
        {"name": "square (attack list)", "ok": clean < 39, "value": 0.1, "limit": 0.025,
         "text": "square broke 4 of 40"},
    ]  # fmt: skip
    suspect = not findings[1]["ok"]
    counts = [0] * 20 + [40, 80, 160, 80, 40] + [0] * 41
    block = {"counts": counts, "q50": 0.5, "q90": 2.0, "q99": 3.5, "max": 9.0,
             "cancelled": 0.0, "underflowed": 0.0}  # fmt: skip
    candidate = {key: share(10, 20) for key in (
        "original_accuracy", "scaled_accuracy", "scaled_clean_accuracy")}  # fmt: skip
    return {
        "num_items": NUM_ITEMS, "clean_accuracy": share(clean, NUM_ITEMS), "attacks": steps,
        "robust_accuracy": share(left[-1], NUM_ITEMS), "num_evaluations": 5000,
        "num_gradients": 4000, "zero_gradient_rate": 0.0,
        "curves": {
            "eps": [{"eps": e / 255, "accuracy": share(clean - 3 * e, NUM_ITEMS)}
                    for e in (2, 4, 8)],
            "steps": [{"steps": n, "accuracy": share(clean - n, NUM_ITEMS)} for n in (1, 5, 20)],
        },
        "sanity": {
            "verdict": "suspect" if suspect else "reliable", "num_items": 40,
            "reasons": ["square (attack list): square broke 4 of 40"] if suspect else [],
            "findings": findings,
            "attention_gaps": {
                "edges": np.logspace(-4, 4, 65).tolist(),
                "limits": {"cancels": 16.65, "underflows": 104.0},
                "blocks": {"blocks.0.attn": block, "blocks.1.attn": {**block, "q99": 9.0}},
            },
        },
        "paper_protocol": {
            "aas-pgd-20-ce": {
                "num_items": 20, "restarts_accuracy": share(11, 20),
                "candidates": [{"scales": None, **candidate}, {"scales": [0.1, 0.1], **candidate}],
            }
        },
    }  # fmt: skip


def attacked_items(held: dict[str, tuple[int, tuple[int, int, int]]]) -> pa.Table:
    """One row per model and item: the first items stay right, the last were wrong before."""
    rows: list[dict[str, Any]] = []
    for model, (clean, left) in held.items():
        names = ("fgsm", "apgd-ce", "square")
        for i in range(NUM_ITEMS):
            label, wrong = i % len(CLASSES), (i + 1) % len(CLASSES)
            broken_by = next((n for n, rest in zip(names, left, strict=True) if i >= rest), None)
            was_right = i < clean
            rows.append({
                "model": model, "item_id": f"made-{i:03d}", "label": label,
                "clean_prediction": label if was_right else wrong,
                "adversarial_prediction": label if i < left[-1] else wrong,
                "broken_by": broken_by if was_right else None,
            })  # fmt: skip
    return pa.Table.from_pylist(rows)


def write_attack(folder: Path, models: tuple[str, ...] = ("main", "standard")) -> Path:
    folder.mkdir(parents=True)
    held = {"main": (37, (31, 28, 26))}
    summary = {
        "threat": {"kind": "linf", "unit": UNIT, "eps": 8 / 255},
        "attacks": ["fgsm", "apgd-ce", "square"],
        "settings": {"models": list(models), "eps": 8 / 255, "norm": "linf", "num_items": None,
                     "attacks": [{"kind": "fgsm", "num_steps": 1, "step_size": None},
                                 {"kind": "autoattack", "version": "standard"}]},
        "models": {m: attack_page(*held.get(m, (39, (20, 8, 3)))) for m in models},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    pq.write_table(attacked_items({m: held.get(m, (39, (20, 8, 3))) for m in models}),
                   folder / "attacks.parquet")  # fmt: skip
    clean = made_images(3)[:, None].astype(np.float32) / 255
    signs = np.where(np.indices(clean.shape).sum(axis=0) % 2, 1, -1).astype(np.float32)
    adversarial = np.clip(clean + signs * np.float32(8 / 255), 0, 1)
    arrays = {}
    for m in models:
        arrays |= {f"{m}/clean": clean, f"{m}/adversarial": adversarial, f"{m}/label": np.arange(3),
                   f"{m}/clean_prediction": np.arange(3),
                   f"{m}/adversarial_prediction": np.array([0, 2, 1])}  # fmt: skip
    np.savez(folder / "examples.npz", **arrays)
    return folder


def _header(kind: str, model: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": kind, "run_id": "made", "model_digest": DIGESTS[model],
        "dataset_digest": DATASET_DIGEST, "num_classes": len(CLASSES),
        "image": {"channels": 1, "height": WIDTH, "width": WIDTH}, "settings": settings,
        "noise_impl": None if kind == "columns" else "made", "num_items": NUM_ITEMS, "software": {},
    }  # fmt: skip


def _row(i: int, stream: str, num_votes: int, *, num_wrong: int = 0) -> VoteRow:
    """Votes of item i for its label, the first ones for the next class."""
    label = i % len(CLASSES)
    votes = np.full(num_votes, label, dtype=np.uint16)
    votes[:num_wrong] = (label + 1) % len(CLASSES)
    digest = image_digest(torch.from_numpy(made_images(NUM_ITEMS)[i])[None])
    return VoteRow(f"made-{i:03d}", label, digest, stream, 0, num_votes, votes)


def _challenged(
    folder: Path, attack: str, threat: dict[str, object], *, certified: int, standing: int
) -> Path:
    """The folder with the outcome of an attack on ten items."""
    challenge = {
        "attack": attack, "num_items": 10, "broken_certified": 0,
        "threat": {**threat, "unit": UNIT},
        "certified": share(certified, 10), "standing": share(standing, 10),
    }  # fmt: skip
    (folder / "challenge.json").write_text(json.dumps(challenge))
    return folder


def write_columns(folder: Path) -> Path:
    """Votes of item i: the label wins all bands but i // 3 of them."""
    folder.mkdir(parents=True)
    rows = [_row(i, "columns", WIDTH, num_wrong=i // 3) for i in range(NUM_ITEMS)]
    header = _header("columns", "main", {"band": 3, "stride": 1})
    votes_file = write_votes(folder / "votes.parquet", rows, header)
    write_certificate(folder, votes_file, {"patch_sizes": [1, 2, 3, 4], "rule": "count"})
    threat = {"kind": "patch", "patch_sizes": [2]}
    return _challenged(folder, "adaptive patch attack", threat, certified=6, standing=9)


def write_gaussian(folder: Path) -> Path:
    folder.mkdir(parents=True)
    n0, n = 20, 300
    rows = [
        row
        for i in range(NUM_ITEMS)
        for row in (_row(i, "select", n0), _row(i, "estimate", n, num_wrong=4 * i))
    ]
    settings = {"sigma": 0.25, "num_select": n0, "num_estimate": n, "run_seed": 7}
    votes_file = write_votes(folder / "votes.parquet", rows, _header("gaussian", "main", settings))
    write_certificate(folder, votes_file, {"failure_prob": 0.001, "radii": [0.1, 0.25, 0.4]})
    threat = {"kind": "l2", "sigma": 0.25, "eps": 0.25}
    return _challenged(folder, "l2 attack on the smoothed vote", threat, certified=5, standing=8)


def write_tune(folder: Path) -> Path:
    """Three trials of a search: the best, a tie, and one that failed."""
    folder.mkdir(parents=True)
    rows = [
        {"trial": number, "values": {"train.learning_rate": rate}, "epochs": 4, "status": status,
         "val_robust_accuracy": held and share(held, 40), "val_accuracy": held and share(35, 40),
         "difference_to_best": None, "tied_with_best": held is not None}
        for number, rate, held, status in (
            (1, 3e-3, 22, "finished"), (0, 1e-3, 20, "finished"), (2, 1e-1, None, "failed: leak"))
    ]  # fmt: skip
    page = {
        "metric": "val_robust_accuracy", "search": "grid", "scheduler": "asha", "rows": rows,
        "attack": {"kind": "apgd-ce", "num_steps": 20, "num_items": 40},
        "space": {"train.learning_rate": [1e-3, 3e-3, 1e-1]},
    }  # fmt: skip
    (folder / "trials.json").write_text(json.dumps(page))
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of every step of a made-up run."""
    root = tmp_path_factory.mktemp("runs") / "made-up"
    return {
        "prepare": write_prepared(root / "prepare-0"),
        "tune": write_tune(root / "tune-0"),
        "train.main": write_train(root / "train.main-0", "main"),
        "train.standard": write_train(root / "train.standard-0", "standard"),
        "attack.linf": write_attack(root / "attack.linf-0"),
        "certify.patch": write_columns(root / "certify.patch-0"),
        "certify.l2": write_gaussian(root / "certify.l2-0"),
    }


@pytest.fixture(scope="session")
def page(finished: dict[str, Path]) -> str:
    """The page of the whole made-up run."""
    folder = FakeOut(finished["prepare"].parent / "report-0")
    return render(build_content(make_recipe(), finished, folder))


@pytest.fixture
def out(finished: dict[str, Path]) -> FakeOut:
    """An output folder beside the inputs, as in a real run."""
    return FakeOut(finished["prepare"].parent / "report-0")


@pytest.fixture
def recipe() -> SimpleNamespace:
    return make_recipe()
