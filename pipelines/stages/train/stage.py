"""Train one of the recipe's models with Ray Train: any number of workers, exact resume.

The driver's side: it reads rank 0's diary `live.json` to show progress and to log to MLflow, so no
worker needs the tracking store.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from ray._private.worker import get_dashboard_url
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2.api.config import LoggingConfig
from ray.train.v2.api.exceptions import WorkerGroupError

from components.core.errors import CasemateError
from components.data.prepared import PreparedDataset
from components.denoising.loading import is_source, source_digest
from components.denoising.pretrained import load_pretrained_denoiser
from components.models.checkpoint import load_model, read_header
from components.models.importing.match import ImportReport
from components.models.pixels import PixelModel
from components.models.pretrained import load_pretrained, read_parent
from components.models.spec import ModelSpec
from components.train.session import Session, initial_model
from components.train.sharding import check_shardable
from pipelines.recipe import build
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime import progress
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.train.failures import MistakesEndTraining, mistake_in
from pipelines.stages.train.worker import train_loop


def make_session(recipe: Recipe, model: str, dataset: PreparedDataset, **placement: Any) -> Session:
    """The training of one model; `placement` says on which worker, with which wrapper."""
    assert recipe.train is not None
    device, fresh = placement.pop("device", torch.device("cpu")), placement.pop("fresh", True)
    network = initial_model(build.model_spec(recipe, dataset, model), seed=recipe.seed)
    if (start := recipe.model_of(model).pretrained) and fresh:
        _load_start(network, start)  # else a checkpoint is about to bring its own weights
    memory = {"memory_mb": recipe.train.memory_mb}
    synthetic = recipe.data.synthetic
    return Session(
        network.to(device),
        build.objective(recipe, model),
        train=placement.pop("train", None) or dataset.open_split("train", **memory),
        val=dataset.open_split("val", **memory),
        synthetic=dataset.open_split("synthetic", **memory) if synthetic else None,
        **build.session_settings(recipe, model, dataset),
        **placement,
    )


def run(recipe: Recipe, inputs: Mapping[str, Path], out: StageDir) -> None:
    """Train to the end, or from the last checkpoint of an interrupted run to the end."""
    assert recipe.train is not None
    model, cluster = out.part, recipe.cluster
    if recipe.train.batch_size % cluster.train_workers:
        raise CasemateError(
            "train.batch_size",
            recipe.train.batch_size,
            f"is not shared evenly by {cluster.train_workers} workers",
        )
    placed = build.on_this_machine(recipe, inputs)
    spec = build.model_spec(placed, PreparedDataset.open(inputs["prepare"]), model)
    _check_network(placed, spec, model)
    if start := placed.model_of(model).pretrained:
        _report_start(start, spec, out)
    live, stopped = out.scratch / "live.json", out.scratch / "stopped.json"
    stopped.unlink(missing_ok=True)
    trainer = LeanTrainer(
        train_loop,
        train_loop_config={
            "recipe": placed.resolved(),
            "model": model,
            "dataset": str(inputs["prepare"]),
            "live": str(live),
            "stopped": str(stopped),
            "out": str(out.path),
            "num_threads": cluster.cpus_per_train_worker,
            "recipe_digest": recipe.digest(),
        },
        scaling_config=ScalingConfig(
            num_workers=cluster.train_workers,
            use_gpu=cluster.gpus_per_worker > 0,
            resources_per_worker=_worker_resources(recipe),
        ),
        run_config=RunConfig(
            name=f"train-{out.fingerprint[:12]}",
            storage_path=str(out.scratch),
            failure_config=FailureConfig(max_failures=cluster.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )
    total = recipe.epochs_of(model)
    with progress.follow(out.step, total=total, unit="epochs", look=_Diary(live, out)):
        try:
            trainer.fit()
        except WorkerGroupError as error:
            if mistake := mistake_in(error):
                raise mistake from error
            first = next(iter(error.worker_failures.values()))
            raise RuntimeError(f"training failed: {first}") from error
    if stopped.exists():
        raise CasemateError(*json.loads(stopped.read_text()))
    _publish(recipe, out)


def _check_network(recipe: Recipe, spec: ModelSpec, model: str) -> None:
    """A network that cannot be built, or not be sharded, is named before workers start."""
    sharded = recipe.cluster.strategy == "fsdp"
    try:
        with torch.device("meta"):  # its layers are looked at, not its weights
            network = PixelModel(spec)
    except RuntimeError:
        if sharded:
            raise
        return  # it computes with values while it is built: the workers will do that
    if sharded:
        check_shardable(network, build.objective(recipe, model))


class LeanTrainer(TorchTrainer):  # type: ignore[misc]  # Ray has no types
    """Ray's trainer that does not repeat mistakes, and starts two processes fewer.

    Of its companions one hands out datasets, of which we pass none. The other frees the CPUs of a
    lost controller; it asks the dashboard whether the controller lives, and a local Ray has none.
    """

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        settings["failure_policy"] = MistakesEndTraining(self.run_config.failure_config)
        return super()._initialize_and_run_controller(**settings)

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        companions: tuple[type[RayTrainCallback], ...] = (DatasetsCallback,)
        if not get_dashboard_url():
            companions += (PlacementGroupCleanerCallback,)
        usual = super()._create_default_callbacks()
        return [callback for callback in usual if not isinstance(callback, companions)]


def _report_start(source: str, spec: ModelSpec, out: StageDir) -> None:
    """What becomes of each pretrained tensor, in `pretrained.json` and MLflow.

    The driver loads them once to know, so that weights that do not fit show before workers start. A
    resumed training needs them no more: its checkpoint has its own.
    """
    path = out.path / "pretrained.json"
    if not path.exists():
        report = _load_start(PixelModel(spec), source)
        if is_source(source):
            parent: dict[str, Any] = {"source": source, "digest": source_digest(source)}
        else:
            parent = asdict(read_parent(source, architecture=spec.architecture))
        out.write_json(path.name, {"parent": parent, "report": report.to_dict()})
    out.run.artifacts(path)


def _load_start(network: PixelModel, source: str) -> ImportReport:
    """Weights of a classifier, or of a denoiser on disk."""
    load = load_pretrained_denoiser if is_source(source) else load_pretrained
    return load(network, source)


def _worker_resources(recipe: Recipe) -> dict[str, float]:
    resources: dict[str, float] = {"CPU": recipe.cluster.cpus_per_train_worker}
    if recipe.cluster.gpus_per_worker:
        resources["GPU"] = recipe.cluster.gpus_per_worker
    return resources


class _Diary:
    """Reads live.json: a progress line, and each finished epoch once in MLflow."""

    def __init__(self, live: Path, out: StageDir) -> None:
        self.live, self.out, self.num_logged = live, out, 0

    def __call__(self, bar: progress.Bar) -> None:
        if not self.live.exists():
            return
        state = json.loads(self.live.read_text())
        rows = state["rows"]
        for row in rows[self.num_logged :]:
            values = {f"train/{k}": v for k, v in row.items() if k != "epoch"}
            self.out.run.metrics(values, step=row["epoch"])
        self.num_logged = max(self.num_logged, len(rows))
        bar.at(len(rows) + state["fraction"], _note(rows, state["running"]))


def _note(rows: list[dict[str, Any]], running: dict[str, Any]) -> str:
    """The running epoch's figures, and those that only a finished one has."""
    last = rows[-1] if rows else {}
    now = running if running["loss"] is not None else last
    clean = now.get("train_clean_accuracy")  # measured beside a loss on attacked images alone
    shown = {
        "loss": now.get("loss"),
        "clean": clean,
        "train": now.get("train_accuracy") if clean is None else None,
        "attacked": now.get("train_adversarial_accuracy"),
        "val": last.get("val_accuracy"),
        "robust": last.get("val_robust_accuracy"),
        "mse": last.get("val_mse"),
        "eps": now.get("eps"),
    }
    figures = [f"{key} {value:.3f}" for key, value in shown.items() if value is not None]
    if now.get("lr") is not None:
        figures.append(f"lr {now['lr']:.1e}")
    if speed := now.get("images_per_second") or last.get("images_per_second"):
        figures.append(f"{speed:.0f} images/s")
    return " ".join(figures) or "first epoch"


def _publish(recipe: Recipe, out: StageDir) -> None:
    """Final figures, and the model in the registry."""
    history = json.loads((out.path / "history.json").read_text())
    header = read_header(out.path / "model")
    kept = history["rows"][history["selected_epoch"]]
    final = {k: v for k, v in kept.items() if k.startswith(("val_", "train_"))}
    out.write_json("metrics.json", {"final": final, "model_digest": header["digest"]})
    out.run.tags({"casemate.model_digest": header["digest"]})
    if out.part in recipe.denoisers():  # a function of images and noise levels: none to serve
        out.run.artifacts(*(out.path / "model").glob("model.*"))
        return
    model = load_model(out.path / "model")
    spec = model.spec
    example = torch.zeros(2, spec.channels, spec.image_size, spec.image_size)
    out.run.register_model(
        model,
        name=f"{recipe.name}-{out.part}",
        alias="candidate",
        example=example,
        files=[out.path / "model" / "model.safetensors", out.path / "model" / "model.json"],
        metadata={"digest": header["digest"], "fingerprint": out.fingerprint},
    )
