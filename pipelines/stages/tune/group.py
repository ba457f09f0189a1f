"""A trial on several workers, which share every batch as those of a training do.

They are actors inside the placement group of the trial: Ray Tune reserves the resources of all of
them before the trial starts and frees them with it, also when a scheduler stops the trial. A
trainer of Ray Train would reserve its own, behind the back of the search, and its checkpoints would
not be those of the trial, which schedulers copy and restarts resume from. A lost worker fails the
trial, and Ray Tune starts it again from the checkpoint of its last epoch.
"""

import socket
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from components.core.errors import CasemateError
from components.train.feed import Worker
from pipelines.recipe.schema.place import ClusterSection
from pipelines.recipe.trials import Values
from pipelines.runtime.devices import process_group_backend, worker_device
from pipelines.stages.tune.training import TrialJob, TrialTraining


@ray.remote(max_restarts=0, max_task_retries=0)
class TrialWorker:
    """One worker of a trial."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def place(self) -> str:
        """A free address of this worker's machine, by which all of them meet."""
        worker_device()  # a GPU that cannot be used is told here: NCCL's error names no machine
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, job: TrialJob, values: Values, saved: bytes | None, meeting: str) -> bool:
        """Meet the other workers and load the state; returns whether nothing is left to train."""
        from torch import distributed

        cluster = ClusterSection.model_validate(job["recipe"]["cluster"])
        distributed.init_process_group(
            process_group_backend(cluster),
            init_method=meeting,
            rank=self.worker.rank,
            world_size=self.worker.world,
        )
        self.training = TrialTraining(job, values, saved, worker=self.worker)
        return self.training.finished

    def run_epoch(self) -> tuple[dict[str, Any], bool]:
        """The report of one epoch, and whether it was the last."""
        report = self.training.run_epoch()
        return report, self.training.finished

    def state(self) -> bytes | None:
        """The checkpoint; the first worker has it."""
        state = self.training.state()
        return state if self.worker.rank == 0 else None


class TrialGroup:
    """The workers of one trial; each call is made on all of them, the first one answers."""

    def __init__(self, job: TrialJob, values: Values, saved: bytes | None) -> None:
        self.job, self.values, self.saved = job, values, saved
        cluster = ClusterSection.model_validate(job["recipe"]["cluster"])
        group, world = ray.util.get_current_placement_group(), cluster.train_workers
        self.workers = [
            TrialWorker.options(  # type: ignore[attr-defined]
                num_cpus=cluster.cpus_per_train_worker,
                num_gpus=cluster.gpus_per_train_worker,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
            ).remote(Worker(rank, world))
            for rank in range(world)
        ]
        self.finished = False

    def start(self) -> None:
        """Form the group, from the last checkpoint if there is one."""
        meeting = self._call("place")
        saved = ray.put(self.saved)
        self.finished = self._call("start", self.job, self.values, saved, meeting)

    def run_epoch(self) -> dict[str, Any]:
        """The report of one epoch, or of why training cannot continue."""
        report: dict[str, Any]
        report, self.finished = self._call("run_epoch")
        return report

    def state(self) -> bytes:
        """The checkpoint."""
        state: bytes = self._call("state")
        return state

    def end(self) -> None:
        """Free the workers, also those that wait for a lost one."""
        for worker in self.workers:
            ray.kill(worker)

    def _call(self, method: str, *arguments: Any) -> Any:
        calls = [getattr(worker, method).remote(*arguments) for worker in self.workers]
        try:
            return ray.get(calls)[0]  # raises as soon as one of them fails
        except RayTaskError as error:
            if isinstance(error.cause, CasemateError):
                raise error.cause from None
            raise
