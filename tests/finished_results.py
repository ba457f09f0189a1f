"""Finished attacks, certificates and evaluations, written by the real writers without a model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from components.attacks.listing import attack_list
from components.core.folders import Folder
from components.evaluate.metrics import Subject, rows_of, share, write_metrics
from components.models.checkpoint import save_model
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from pipelines.recipe.schema.attack import AttackSection
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.step_locks import hold
from pipelines.runtime.storage import StepPlace, Storage
from pipelines.stages.attack.results import ModelUnderAttack, write_rows, write_summary
from tests.small_certificates import GAUSSIAN_CLAIM, gaussian_votes, write_small_certificate
from tests.stored_steps import PRINT, finish, place_of
from tests.unit.pipelines.conftest import FakeRun

OPTIONS = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}
NUM_ITEMS = 40


def attack_step(
    place: StepPlace,
    models: dict[str, tuple[int, int]],
    *,
    suspect: str = "",
    eps: object = "8/255",
    attacks: Sequence[dict[str, Any]] = ({"kind": "fgsm"},),
    item: str = "i{}",
    label: int = 0,
    num_items: int = 10,
    inputs: Mapping[str, Folder] | None = None,
    run_id: str = "mlflow-1",
) -> None:
    """Some items: (classified correctly, robust) of each model."""
    run = SimpleNamespace(**{n: getattr(FakeRun(), n) for n in ("metrics", "tags", "artifacts")})
    run.model_results, run.run_id = FakeRun().model_results, run_id
    section = AttackSection.model_validate({"eps": eps, "attacks": list(attacks)})
    listed = attack_list(section.attacks, norm="linf", eps=section.eps)
    place.work.mkdir(parents=True)
    out = StageDir(place.work, place.name.rpartition("-")[0], PRINT, run, inputs or {}, place)
    attacked, summaries = [], {}
    for model, (clean, robust) in models.items():
        own = ModelUnderAttack.before(
            model,
            pa.table(
                {
                    "item_id": [item.format(i) for i in range(num_items)],
                    "label": [label] * num_items,
                    "clean_prediction": [label + int(i >= clean) for i in range(num_items)],
                    "margin": [1.0 if i >= clean else -1.0 for i in range(num_items)],
                }
            ),
        )
        zeros = [0] * clean
        outcome = {
            "place": list(range(clean)),
            "clean_prediction": [label] * clean,
            "adversarial_prediction": [label + int(i >= robust) for i in range(clean)],
            "num_evaluations": zeros, "num_gradients": zeros, "num_zero_gradients": zeros,
            "norm": [0.01] * clean, "image": [None] * clean,
            "margin": [0.5 if i >= robust else -0.5 for i in range(clean)],
        }  # fmt: skip
        own.record(listed[0], pa.table(outcome), [])
        attacked.append(own)
        summaries[model] = own.summary()
        if suspect:
            summaries[model]["sanity"] = {
                "verdict": "suspect",
                "reasons": [suspect],
                "findings": [],
            }
    with hold(place.store, [place.key]):
        write_rows(out, attacked)
        write_no_examples(out.path, list(models))
        write_summary(out, section, listed, summaries, devices=["cpu"], passes=None)
        out.finish()


def write_no_examples(folder: Path, models: Sequence[str]) -> None:
    """The pictures of an attack, of no items."""
    images, numbers = np.zeros((0, 1, 8, 8), np.float32), np.zeros(0, np.int64)
    kinds = {"clean": images, "adversarial": images}
    kinds |= dict.fromkeys(("label", "clean_prediction", "adversarial_prediction"), numbers)
    arrays = {f"{model}/{kind}": value for model in models for kind, value in kinds.items()}
    np.savez(folder / "examples.npz", **arrays)


def certify_step(place: StepPlace, made: Path, evidence: tuple, claim: dict) -> None:
    write_small_certificate(made, evidence, claim)
    finish(place, {path.name: path.read_bytes() for path in made.iterdir()})


def evaluate_step(
    place: StepPlace, made: Path, suite: str, correct: dict[str, int], n: int, **about: Any
) -> None:
    """The accuracy of one suite for each model; `about`: digests other than made-up ones."""
    metric = {"clean": "accuracy", "corruptions": "mean95"}[suite]
    rows = []
    for model, k in correct.items():
        digests = {"model_digest": "a" * 64, "dataset_digest": "b" * 64} | about
        subject = Subject(model=model, dataset="digits", seed=1, **digests)
        found = share(np.arange(n) < k, item="all", metric=metric)
        rows += rows_of(subject, suite, [found])
    write_metrics(made, rows)
    finish(place, {"metrics.parquet": made.read_bytes()})


def data_step(storage: Storage, flow: str, **changes: object) -> Path:
    document = {
        **{"format": "casemate-dataset/1", "channels": 1, "height": 8, "width": 8},
        **{"source": {"fit": "pad", "resize": None}, "digest": "d" * 64},
        **changes,
    }
    place = place_of(storage, flow, "prepare")
    finish(place, {"dataset.json": json.dumps(document).encode()})
    return place.path


def model_step(storage: Storage, flow: str, made: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    spec = ModelSpec("tiny_vit", 10, 1, 8, (0.5,), (0.5,), options=OPTIONS)
    save_model(made, PixelModel(spec).eval(), recipe_digest="")
    place = place_of(storage, flow, "train.main")
    finish(place, {f"model/{path.name}": path.read_bytes() for path in made.iterdir()})
    return place.path


def attacked_flow(
    storage: Storage, flow: str, counts: tuple[int, int], *, seed=0, data=None, **attack
) -> Path:
    """A flow with a dataset, a model and an attack on it."""
    made = storage.path.parent / f"made-{flow}"
    inputs = {
        "prepare": data_step(storage, flow, **(data or {})),
        "train.main": model_step(storage, flow, made, seed),
    }
    place = place_of(storage, flow, "attack.linf")
    given = {"num_items": NUM_ITEMS, "inputs": inputs} | attack
    attack_step(place, {"main": counts}, **given)
    return storage.path / flow


def certificate(folder: Path, evidence=None, claim=None, **changes) -> Path:
    """A small l2 certificate with other values in its header or settings."""
    header, rows = evidence or gaussian_votes()
    header = {**header, **{k: v for k, v in changes.items() if k in header}}
    settings = {k: v for k, v in changes.items() if k in header["settings"]}
    header["settings"] = {**header["settings"], **settings}
    return write_small_certificate(folder, (header, rows), claim or GAUSSIAN_CLAIM)
