"""The workers of the sharded executor as Ray actors, kept from one call to the next.

Ray restarts no actor: its retries do not survive the loss of a node, and a process with a broken
device would come back as it was. A new actor is placed where there is room.
"""

import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from components.core.errors import last_line
from components.core.units import BriefFn, WorkFn
from pipelines.runtime import cluster as ray_place
from pipelines.runtime import crew
from pipelines.runtime.leases import Lease, Outcome, Pulse, work_off
from pipelines.runtime.parts import Plan, PlanWriter
from pipelines.runtime.pulses import Listener, telling

if TYPE_CHECKING:  # workers import this module and need no recipe
    from pipelines.recipe.schema.place import ClusterSection

COUNT_SECONDS = 5.0  # between two counts of the cluster's resources

MakeWork = Callable[[Any], WorkFn]


@dataclass(frozen=True)
class Job:
    """What all units of one call share; actors load the work of a name once."""

    name: str
    make: MakeWork
    config: Any
    writer: PlanWriter
    brief: BriefFn | None


class Reply(NamedTuple):
    """An outcome on its way to the driver, which may be unable to load its error."""

    outcome: Outcome  # without the error
    error: bytes | None = None
    said: str = ""


@ray.remote(max_restarts=0, max_task_retries=0)
class ShardWorker:
    """Loads the work of a job once (`make(config)`), then computes one lease after the other."""

    def __init__(self, num_threads: int) -> None:
        import torch

        torch.set_num_threads(num_threads)  # Ray's OMP_NUM_THREADS does not reach reused processes
        self.job = ""
        self.work: WorkFn | None = None

    def ready(self) -> crew.Place:
        """Where this actor runs."""
        node = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()
        devices = tuple(str(device) for device in ray.get_gpu_ids())
        return crew.Place(node, f"{address} ({socket.gethostname()})", devices)

    def run(
        self,
        job: Job,
        names: Sequence[str],
        ordinals: Sequence[int] | None,
        payloads: list[Any],
        key: str,
    ) -> Reply:
        """The outcome of a lease, whose results are stored in one object; its pulse is at `key`."""
        with telling(key) as teller:
            outcome = work_off(
                lambda: self._work_of(job),
                payloads,
                write=lambda tables, briefs: job.writer.write(
                    names[: len(tables)], ordinals and ordinals[: len(tables)], tables, briefs
                ),
                brief=job.brief,
                begin=teller.begin,
            )
        return _reply(replace(outcome, evaluations=teller.pulse().evaluations))

    def _work_of(self, job: Job) -> WorkFn:
        if job.name != self.job or self.work is None:
            self.job, self.work = job.name, job.make(job.config)
        return self.work


def _reply(outcome: Outcome) -> Reply:
    error = outcome.error
    if error is None:
        return Reply(outcome)
    said = f"{type(error).__name__}: {last_line(error)}"
    try:
        content = cloudpickle.dumps(error)
    except Exception:  # it holds what cannot be sent, such as an open file
        content = b""
    return Reply(replace(outcome, error=None), content, said)


def _outcome(reply: Reply) -> Outcome:
    if reply.error is None:
        return reply.outcome
    try:
        error = cloudpickle.loads(reply.error)
    except Exception:  # of a class that only the worker has
        error = RuntimeError(reply.said)
    return replace(reply.outcome, error=error)


class ActorPool:
    """Actors of one shape: ready ones, requested ones, and those that hold broken devices."""

    def __init__(self) -> None:
        self.shape: tuple[Any, ...] = ()
        self.number = 0
        self.ready: dict[int, ActorHandle] = {}
        self.pending: dict[Any, tuple[int, ActorHandle]] = {}  # by the reference of `ready()`
        self.held: list[ActorHandle] = []

    def reshape(self, cluster: "ClusterSection") -> None:
        """Forget actors of another Ray, end those with other resources."""
        job = ray.get_runtime_context().get_job_id()
        shape = (job, cluster.cpus_per_actor, cluster.gpus_per_actor)
        if shape == self.shape:
            return
        if self.shape and self.shape[0] == job:
            self.release()
        self.shape, self.ready, self.pending, self.held = shape, {}, {}, []

    def start(self, *, avoid: Collection[str]) -> None:
        """Request one more actor, on none of these nodes."""
        _, cpus, gpus = self.shape
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
        if avoid:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}
        handle = ShardWorker.options(**options).remote(cpus)  # type: ignore[attr-defined]
        self.probe(handle)

    def probe(self, handle: ActorHandle) -> None:
        self.number += 1
        self.pending[handle.ready.remote()] = self.number, handle

    def probe_all(self) -> None:
        """Ask the actors of an earlier call whether they are still there."""
        kept, self.ready = list(self.ready.values()), {}
        for handle in kept:
            self.probe(handle)

    def release(self) -> None:
        """End all actors."""
        pending = [handle for _, handle in self.pending.values()]
        for handle in (*self.ready.values(), *pending, *self.held):
            ray.kill(handle)
        self.ready, self.pending, self.held = {}, {}, []


class ActorCrew:
    """The actors of a pool at work on one job."""

    def __init__(self, pool: ActorPool, cluster: "ClusterSection", job: Job, plan: Plan) -> None:
        pool.reshape(cluster)
        self.pool, self.cluster, self.plan = pool, cluster, plan
        self.job = ray.put(job)
        self.busy: dict[Any, tuple[crew.Worker, Lease]] = {}
        self.counted, self.fitting = float("-inf"), dict[str, int]()
        self.listener = Listener()
        pool.probe_all()
        self.kept = {number for number, _ in pool.pending.values()}  # of an earlier call

    @property
    def num_pending(self) -> int:
        return len(self.pool.pending)

    def capacity(self) -> int:
        """The number of actors in the recipe, else as many as fit, without those left out."""
        fit = sum(self._count().values())
        if not fit and ray_place.is_local():
            raise ray_place.cannot_be_met(self.cluster)
        fit = max(1, fit - len(self.pool.held))  # none yet: a pending one asks the autoscaler
        asked = self.cluster.num_actors or fit
        return min(asked, fit) if ray_place.is_local() else asked

    def nodes(self) -> Collection[str]:
        return self._count().keys()

    def _count(self) -> Mapping[str, int]:
        """How many workers fit on each node; counted again when nodes may have joined."""
        if time.monotonic() - self.counted > COUNT_SECONDS:
            self.fitting = ray_place.num_fitting(self.resources)
            self.counted = time.monotonic()
        return self.fitting

    @property
    def resources(self) -> dict[str, float]:
        return ray_place.actor_resources(self.cluster)

    def hire(self, *, avoid: Collection[str]) -> None:
        self.pool.start(avoid=avoid)

    def trim(self, num_pending: int) -> None:
        while self.num_pending > num_pending:
            _, (_, handle) = self.pool.pending.popitem()
            ray.kill(handle)

    def dismiss(self, worker: crew.Worker, *, hold: bool = False) -> None:
        handle = self.pool.ready.pop(worker.number)
        if hold:
            self.pool.held.append(handle)
        else:
            ray.kill(handle)

    def send(self, worker: crew.Worker, lease: Lease) -> None:
        names = [unit.name for unit in lease.units]
        payloads = [unit.payload for unit in lease.units]
        call = self.pool.ready[worker.number].run
        ordinals, key = self.plan.ordinals_of(names), self.listener.key(lease.number)
        reference = call.remote(self.job, names, ordinals, payloads, key)
        self.busy[reference] = worker, lease

    def pulses(self) -> Mapping[int, Pulse]:
        return self.listener.pulses([lease.number for _, lease in self.busy.values()])

    def needs(self) -> str:
        return ray_place.describe_need(self.resources)

    def wait(self, seconds: float) -> Sequence[crew.Event]:
        references = [*self.busy, *self.pool.pending]
        if not references:
            time.sleep(min(seconds, 0.2))
            return []
        done, _ = ray.wait(references, num_returns=1, timeout=seconds)
        events = [self._event(reference) for reference in done]
        return [event for event in events if event is not None]

    def _event(self, reference: Any) -> crew.Event | None:
        if reference in self.pool.pending:
            return self._started(reference)
        worker, lease = self.busy.pop(reference)
        try:
            return crew.Returned(worker, lease, _outcome(ray.get(reference)))
        except RayActorError as error:
            self.listener.forget(lease.number)
            return crew.Lost(worker, lease, error, announced=error.preempted)
        except RayTaskError as error:
            cause = getattr(error, "cause", None) or error
            return crew.Returned(worker, lease, Outcome(error=cause))

    def _started(self, reference: Any) -> crew.Event | None:
        number, handle = self.pool.pending.pop(reference)
        try:
            place = ray.get(reference)
        except (RayActorError, RayTaskError) as error:
            return None if number in self.kept else crew.NotStarted(error)
        self.pool.ready[number] = handle
        return crew.Ready(crew.Worker(number, place))
