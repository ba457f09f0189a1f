"""Checks of a cluster before a flow fails on it: versions, GPUs, storage, clocks, disks, MLflow.

Every machine is asked by an actor of its own, all at once, and has to answer within
a stated time; one that does not is named. Nothing is left behind on the storage.
"""

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from components.core.errors import CasemateError, first_line, last_line
from components.core.object_stores import is_uri
from components.core.secrets import redact
from pipelines.recipe.paths import named_paths
from pipelines.recipe.schema.place import TrackingSection
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime import findings, node_probe
from pipelines.runtime.cluster import check_reachable, host_and_port, ray_cluster
from pipelines.runtime.findings import Finding
from pipelines.runtime.node_probe import ANSWER_SECONDS
from pipelines.runtime.provenance import software
from pipelines.runtime.storage import Storage, open_storage

CLOCK_TRIES = 3
MAX_SHOWN = 5
TRACKING_ENV = "MLFLOW_TRACKING_URI"

T = TypeVar("T")
Answers = dict[str, dict[str, Any]]  # by node
UNEXPECTED = 2  # Ray: a node's death that was neither a drain nor a shutdown


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster as Ray lists it."""

    node_id: str
    name: str  # for people
    resources: Mapping[str, float]
    session: str  # Ray's folder on it

    @property
    def num_gpus(self) -> int:
        return int(self.resources.get("GPU", 0))


def diagnose(
    recipe: Recipe, *, address: str | None = None, timeout: float = ANSWER_SECONDS
) -> Iterator[Finding]:
    """Check the cluster that a recipe would run on; findings come as they are made.

    Every machine and MLflow have `timeout` seconds for their answers.
    """
    address = address or recipe.cluster.address
    if address:
        host_and_port(address)  # a mistyped address is bad input, a dead one a finding
    root: Storage | None = None
    try:
        there = Storage.at(recipe.storage.root)
        is_new = there.is_local and within(timeout, lambda: not there.path.exists())
        root = within(timeout, lambda: open_storage(there))
        usage = shutil.disk_usage(root.path)
        found = {"total": usage.total, "free": usage.free}
        yield findings.space_finding(root.path, found, is_new=is_new)
        if not root.is_local:
            yield findings.ok("storage", f"{root} creates keys once and can be written here")
    except (CasemateError, TimeoutError) as error:
        yield findings.fail("storage", str(error))
    yield from _check_tracking(recipe.tracking, root, timeout=timeout)
    try:
        with ray_cluster(recipe.cluster, address=address):
            yield from _check_nodes(recipe, root, timeout=timeout)
    except CasemateError as error:  # joining failed
        yield findings.fail("cluster", str(error))


# -- machines


def _check_nodes(recipe: Recipe, root: Storage | None, *, timeout: float) -> Iterator[Finding]:
    alive, lost = _nodes()
    total = ray.cluster_resources()
    counts = f"{len(alive)} node(s), {total.get('CPU', 0):g} CPUs, {total.get('GPU', 0):g} GPUs"
    yield findings.ok("cluster", counts)
    for name in lost:
        yield findings.warn("cluster", f"{name} was lost: look at its Ray logs, or start it again")
    absolute = [path for path in named_paths(recipe) if not path.made]
    wanted = [
        path.path if is_uri(path.path) else str(Path(path.path).expanduser().absolute())
        for path in absolute
    ]
    with _token(root) as token:
        actors = {node.node_id: _actor_on(node) for node in alive}
        requests = {n.node_id: _request(n, root, token, wanted, timeout=timeout) for n in alive}
        calls = {key: actor.look.remote(requests[key]) for key, actor in actors.items()}
        answers, silent = _answers(calls, timeout=timeout)
        for node in alive:
            if node.node_id in silent:
                yield findings.fail("node", f"{node.name} {silent[node.node_id]}")
                continue
            yield from _findings_of(node, answers[node.node_id], root=root, token=token)
            yield _clock(node, actors[node.node_id], timeout=timeout)
        for actor in actors.values():
            ray.kill(actor)


def _nodes() -> tuple[list[Node], list[str]]:
    """The machines that are up, and the names of those that were lost unexpectedly."""
    alive, lost = [], []
    for entry in ray.nodes():
        name = _name_of(entry)
        if entry["Alive"]:
            session = Path(entry["RayletSocketName"]).parents[1]
            alive.append(Node(entry["NodeID"], name, entry["Resources"], str(session)))
        elif entry["DeathReason"] == UNEXPECTED:
            lost.append(name)
    return sorted(alive, key=lambda node: node.name), sorted(lost)


def _name_of(entry: Mapping[str, Any]) -> str:
    """The name that a machine was given (`ray start --node-name`), else its host's name."""
    address = str(entry["NodeManagerAddress"])
    named = entry["NodeName"] if entry["NodeName"] != address else entry["NodeManagerHostname"]
    return f"{named} ({address})"


def _actor_on(node: Node) -> Any:
    """A probe on this machine, which needs no free CPU."""
    ray.cloudpickle.register_pickle_by_value(node_probe)
    here = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    remote = ray.remote(num_cpus=0, max_restarts=0)(node_probe.NodeProbe)
    return remote.options(scheduling_strategy=here).remote()


def _request(
    node: Node, root: Storage | None, token: str, paths: Sequence[str], *, timeout: float
) -> dict[str, Any]:
    return {
        "packages": sorted(software()),
        "storage": root.root if root else "",
        "token": token,
        "node": node.node_id,
        "session": node.session,
        "paths": list(paths),
        "seconds": timeout / 2,  # for torch, whose driver may hang
    }


def _answers(calls: Mapping[str, Any], *, timeout: float) -> tuple[Answers, dict[str, str]]:
    """Answers by node, and for nodes without one the reason."""
    done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout)
    answers: Answers = {}
    silent: dict[str, str] = {}
    for node_id, call in calls.items():
        if call not in done:
            silent[node_id] = (
                f"does not answer within {timeout:.0f} s; look at its Ray logs and its load, "
                "or take it out of the cluster"
            )
            continue
        try:
            answers[node_id] = ray.get(call)
        except RayError as error:
            silent[node_id] = f"cannot run our code: {last_line(error)}"
    return answers, silent


def _clock(node: Node, actor: Any, *, timeout: float) -> Finding:
    """The best of several readings: half of the time a call takes is not known."""
    readings = []
    for _ in range(CLOCK_TRIES):
        sent = time.time()
        try:
            there = ray.get(actor.now.remote(), timeout=timeout / CLOCK_TRIES)
        except (RayError, GetTimeoutError):
            return findings.fail("clock", f"{node.name} does not tell its time")
        back = time.time()
        readings.append(((back - sent) / 2, there - (sent + back) / 2))
    doubt, skew = min(readings)
    return findings.clock_finding(node.name, skew=skew, doubt=doubt)


# -- one machine


def _findings_of(
    node: Node, answer: Mapping[str, Any], *, root: Storage | None, token: str
) -> Iterator[Finding]:
    yield findings.versions_finding(node.name, answer["versions"])
    yield findings.code_finding(node.name, answer["code"])
    yield findings.gpu_finding(node.name, answer["gpus"], num_gpus=node.num_gpus)
    if root:
        seen = root.store.find(node_probe.storage_key(token, node.node_id)) == token.encode()
        yield findings.storage_finding(node.name, answer["storage"], root=root, seen_here=seen)
    store = int(node.resources.get("object_store_memory", 0))
    yield findings.disk_finding(f"{node.name}: {node.session}", answer["disk"])
    yield findings.shm_finding(node.name, answer["shm"], object_store=store)
    if missing := answer["missing"]:
        shown = ", ".join(missing[:MAX_SHOWN])
        yield findings.fail(
            "paths", f"{node.name} does not see {shown}; mount them there, or correct them"
        )
    for problem in answer["stores"]:
        yield findings.fail("paths", f"{node.name}: {problem}")


@contextmanager
def _token(root: Storage | None) -> Iterator[str]:
    """A token under a key of the storage; removed afterwards, with the answers of the machines."""
    token = secrets.token_hex(16)
    if root is None:
        yield token
        return
    root.store.put_same(node_probe.storage_key(token, node_probe.DRIVER), token.encode())
    try:
        yield token
    finally:
        left = root.store.listing(node_probe.storage_key(token))
        root.store.delete([entry.key for entry in left])


# -- tracking


def _check_tracking(
    section: TrackingSection, root: Storage | None, *, timeout: float
) -> Iterator[Finding]:
    """Log a small run and delete it, as a flow's driver would."""
    uri = section.uri or os.environ.get(TRACKING_ENV)
    if uri is None and root is None:
        yield findings.fail("mlflow", "has no place: the storage cannot be written")
        return
    shown = redact(uri) if uri else f"SQLite in {root}"
    try:
        if uri and uri.startswith(("http://", "https://")):
            check_reachable(uri, key="tracking.uri")
        within(timeout, lambda: _log_a_run(section, root or Storage.at(".")))
    except Exception as error:
        why = first_line(error).replace(uri or "\0", shown)
        remedy = f"start it, or correct tracking.uri or {TRACKING_ENV}"
        yield findings.fail("mlflow", f"{shown}: {why}; {remedy}")
        return
    if uri is None and root and (kind := _network_kind(root.path)):
        remedy = "SQLite breaks on network disks; run an MLflow server and set tracking.uri"
        yield findings.warn("mlflow", f"{shown} is on {kind}; {remedy}")
        return
    yield findings.ok("mlflow", f"{shown}: a run with a file was logged and deleted")


def _log_a_run(section: TrackingSection, root: Storage) -> None:
    from pipelines.runtime.tracking import Tracker

    with closing(Tracker(section, storage=root)) as tracker:
        run = tracker.client.create_run(tracker.experiment_id, run_name="casemate doctor")
        try:
            tracker.client.log_metric(run.info.run_id, "doctor", 1.0)
            tracker.client.log_text(run.info.run_id, "ok", "doctor.txt")
        finally:
            tracker.client.delete_run(run.info.run_id)


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of work in a thread that is given up after some seconds."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # a pool would be waited for at the end
    try:
        return result.result(seconds)
    except FutureTimeoutError:
        if result.done():
            raise  # an error of the work itself
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None


def _network_kind(root: Path) -> str | None:
    """The kind of a network file system that holds the folder; None: a disk of this machine."""
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, found = line.split()[:3]
        if root.is_relative_to(place) and len(place) >= len(best):
            best, kind = place, found
    return (
        kind if kind.startswith(("nfs", "cifs", "smb", "fuse.", "lustre", "ceph", "gpfs")) else None
    )
