"""Train one of the recipe's models with Ray Train: any number of workers, exact resume.

The driver reads `live.json` of rank 0 to show progress and to log to MLflow, so workers do not
need the tracking store.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from ray._private.worker import get_dashboard_url
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2.api.config import LoggingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from components.core.errors import CasemateError, last_line
from components.core.folders import Folder
from components.data.prepared import PreparedDataset
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from pipelines.recipe import build
from pipelines.recipe.schema.place import ClusterSection
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime import progress
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.cluster import train_resources
from pipelines.runtime.devices import process_group_backend
from pipelines.runtime.gauges import shown_at
from pipelines.runtime.store import Ref
from pipelines.runtime.waiting import NoRoomError, wait_for_room
from pipelines.stages.train import results
from pipelines.stages.train.backend import ProcessGroup
from pipelines.stages.train.failures import MistakesEndTraining, lacked_room, mistake_in
from pipelines.stages.train.worker import JOB, STOPPED, STORED, TrainJob, train_loop


def run(recipe: Recipe, inputs: Mapping[str, Folder], out: StageDir) -> None:
    """Train to the end, or from the last checkpoint of an interrupted run to the end."""
    model, local = out.part, build.with_absolute_paths(recipe, inputs)
    spec = build.model_spec(local, PreparedDataset.open(inputs["prepare"]), model)
    _check_network(local, spec, model)
    if start := local.model_of(model).pretrained:
        results.report_start(start, spec, out)
    job = TrainJob(
        recipe=local.resolved(),
        recipe_digest=recipe.digest(),
        model=model,
        dataset=inputs["prepare"],
        notes=out.notes,
        out=out.path,
        place=out.place,
        num_threads=recipe.cluster.cpus_per_train_worker,
    )
    job.notes.forget(STOPPED)
    trainer = _trainer(job, recipe.cluster, out)
    trainer.max_wait = recipe.cluster.max_wait
    total, look = recipe.epochs_of(model), results.LiveLog(job.notes, out)
    wait_for_room(
        train_resources(recipe.cluster),
        num_workers=recipe.cluster.train_workers,
        label=out.step,
        max_wait=recipe.cluster.max_wait,
    )
    with progress.follow(out.step, total=total, unit="epochs", look=look, **shown_at(out)):
        _fit(trainer, max_wait=recipe.cluster.max_wait)
    job.notes.receive(STOPPED, STORED)
    if (stopped := out.scratch / STOPPED).exists():
        raise CasemateError(*json.loads(stopped.read_text()))
    if (stored := out.scratch / STORED).exists():
        out.fetch({name: Ref(**ref) for name, ref in json.loads(stored.read_text()).items()})
    results.publish(recipe, out)


def _check_network(recipe: Recipe, spec: ModelSpec, model: str) -> None:
    """Refuse a network that cannot be built, or not be sharded, before workers start."""
    sharded = recipe.cluster.strategy == "fsdp"
    try:
        with torch.device("meta"):  # shapes only, no weights
            network = PixelModel(spec)
    except RuntimeError:
        if sharded:
            raise
        return  # its constructor computes with values: only the workers can build it
    if sharded:
        from components.train.sharding import check_shardable  # drivers need no training code
        from pipelines.stages.train.session import objective_of

        check_shardable(network, objective_of(recipe, model))


class FailFastTrainer(DataParallelTrainer):  # type: ignore[misc]  # Ray has no types
    """Ray's trainer that does not retry after a user's mistake, and starts two processes fewer.

    The first of these hands out datasets, of which we pass none. The second frees the CPUs of a
    lost controller; it queries the dashboard for the controller, and a local Ray has no dashboard.
    """

    max_wait: float = ClusterSection().max_wait  # seconds, for room after workers were lost

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        settings["failure_policy"] = MistakesEndTraining(
            self.run_config.failure_config, max_wait=self.max_wait
        )
        return super()._initialize_and_run_controller(**settings)

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        unused: tuple[type[RayTrainCallback], ...] = (DatasetsCallback,)
        if not get_dashboard_url():
            unused += (PlacementGroupCleanerCallback,)
        callbacks = super()._create_default_callbacks()
        return [callback for callback in callbacks if not isinstance(callback, unused)]


def _trainer(job: TrainJob, cluster: ClusterSection, out: StageDir) -> FailFastTrainer:
    return FailFastTrainer(
        train_loop,
        train_loop_config={JOB: job},
        backend_config=ProcessGroup(process_group_backend(cluster)),
        scaling_config=ScalingConfig(
            num_workers=cluster.train_workers,
            use_gpu=cluster.gpus_per_train_worker > 0,
            resources_per_worker=train_resources(cluster),
        ),
        run_config=RunConfig(
            name=f"train-{out.fingerprint[:12]}",
            storage_path=out.ray_storage,
            failure_config=FailureConfig(max_failures=cluster.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


def _fit(trainer: FailFastTrainer, *, max_wait: float) -> None:
    """Train; the error of a worker is raised in place of Ray's."""
    try:
        trainer.fit()
    except WorkerGroupError as error:
        if mistake := mistake_in(error):
            raise mistake from error
        first = next(iter(error.worker_failures.values()))
        raise RuntimeError(f"training failed: {first}") from error
    except ControllerError as error:
        if lacked_room(error):
            reason = f"no room for lost workers within cluster.max_wait ({max_wait:g} s)"
            raise NoRoomError(f"{reason}; start again to continue") from error
        failure = error.controller_failure
        cause = getattr(failure, "cause", None) or failure  # of an error on a worker
        raise RuntimeError(f"training failed: {last_line(cause)}") from error
