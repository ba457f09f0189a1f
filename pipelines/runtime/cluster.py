"""The only place that starts Ray."""

import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import AuthenticationError
from ray.experimental.internal_kv import _internal_kv_get

from components.core.errors import CasemateError, first_line
from components.core.secrets import redact
from pipelines import RAY_CAME_FIRST
from pipelines.runtime.forwarding import FORWARD_ENV, SETUP_HOOK, in_job
from pipelines.runtime.local_ray import local_nodes
from pipelines.runtime.provenance import REVISION_ENV, git_revision
from pipelines.runtime.shipping import ROOT, code_env, is_checkout
from pipelines.runtime.worker_env import WORKER_ENV

if TYPE_CHECKING:  # workers import this module and need no recipe
    from pipelines.recipe.schema.place import ClusterSection

LEFT_BY_RAY_DATA = ("_dataset_stats_actor", "AutoscalingCoordinator")  # namespaces
_started_here: set[str] = set()  # addresses of local Rays that end with this process


@contextmanager
def ray_cluster(
    section: "ClusterSection", *, address: str | None = None, user_code: Sequence[str] = ()
) -> Iterator[None]:
    """A connected Ray for the time of a flow; an already connected one is left as it is.

    `user_code` are the digests of the user's own code that workers need.
    """
    if ray.is_initialized():
        yield
        return
    connect(section, address=address or section.address, user_code=user_code)
    try:
        yield
    finally:
        ray.shutdown()


def connect(
    section: "ClusterSection", *, address: str | None, user_code: Sequence[str] = ()
) -> None:
    """Join the named cluster or the job's own, else start a local Ray that ends with us."""
    if RAY_CAME_FIRST:
        raise CasemateError(
            "RAY_AUTH_MODE",
            "unset",
            "when ray was imported; import pipelines before ray, or set it to token",
        )
    _hide_secrets_of_command()
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address:
        check_joinable(address)
    if address or os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(address=address, runtime_env=_driver_env(user_code), **quiet)
        except AuthenticationError as error:
            raise refused_token("cluster.address", address) from error
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise CasemateError(
                "cluster.address",
                address or os.environ["RAY_ADDRESS"],
                f"cannot be joined: {first_line(error)}; is RAY_AUTH_TOKEN that of its ray start?",
            ) from error
        return
    # A local Ray cannot be preempted: skip the watcher, a process per training.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    # Inherited by Ray's processes. A runtime_env would do the same, but throw away the workers
    # that Ray has started ahead.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update({**WORKER_ENV, "PYTHONPATH": os.pathsep.join(paths)})
    with local_nodes():
        ray.init(
            address="local",
            num_cpus=section.num_cpus,
            include_dashboard=False,
            object_store_memory=section.object_store_mb * 2**20,
            **quiet,
        )
    _started_here.add(ray.get_runtime_context().gcs_address)


def refused_token(key: str, address: str | None) -> CasemateError:
    """The error for a cluster whose token this process does not have."""
    has = "another token than the one here" if os.environ.get("RAY_AUTH_TOKEN") else "a token"
    remedy = f"asks for {has}; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as for its ray start"
    return CasemateError(key, address or os.environ.get("RAY_ADDRESS", "the cluster"), remedy)


def _hide_secrets_of_command() -> None:
    """Overwrite passwords in this process's arguments: Ray records them with the driver's job."""
    given = shlex.join(sys.orig_argv)
    if (shown := redact(given)) != given:
        ray._raylet.setproctitle(shown)


def end_idle_actors() -> None:
    """End the two idle actors that Ray Data leaves behind, a hundred megabytes each.

    It starts them again when it needs them. On a shared cluster they may be serving others.
    """
    if ray.get_runtime_context().gcs_address not in _started_here:
        return
    for found in ray.util.list_named_actors(all_namespaces=True):
        if found["namespace"] in LEFT_BY_RAY_DATA:
            ray.kill(ray.get_actor(found["name"], namespace=found["namespace"]))


def _driver_env(user_code: Sequence[str]) -> dict[str, Any]:
    """Inside a job its environment is set already; a driver from outside sends the code."""
    if in_job():
        return {"worker_process_setup_hook": SETUP_HOOK} if os.environ.get(FORWARD_ENV) else {}
    return {**code_env(user_code), "env_vars": {**WORKER_ENV, **revision_env()}}


def revision_env() -> dict[str, str]:
    """The variable that tells a sent copy its revision: it has no `.git`.

    Code that is not sent is of the cluster's image, which knows its own. Sent code without a
    revision must not take the image's for its own.
    """
    return {REVISION_ENV: git_revision() or ""} if is_checkout() else {}


def check_joinable(address: str) -> None:
    """Refuse what a driver cannot join: other kinds of addresses, and dead ones."""
    if "://" in address:
        remedy = (
            "is not host:port of the head, as ray start prints it (port 6379 by default); "
            "addresses with http:// are those of submit"
        )
        raise CasemateError("cluster.address", address, remedy)
    check_reachable(address)
    if _speaks_http(*host_and_port(address)):
        remedy = "is the port of the dashboard; name that of the head (6379 by default), or submit"
        raise CasemateError("cluster.address", address, remedy)


def _speaks_http(host: str, port: int) -> bool:
    """Whether a web server answers there, at which Ray would wait for minutes."""
    if not port:
        return False
    connection = HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/")
        connection.getresponse()
    except (HTTPException, OSError):  # the head does not speak HTTP/1
        return False
    finally:
        connection.close()
    return True


def check_reachable(address: str, *, key: str = "cluster.address") -> None:
    """One quick TCP try: Ray itself would wait for minutes on a dead address."""
    if address in ("auto", "local"):
        return
    try:
        with socket.create_connection(host_and_port(address, key=key), timeout=5):
            pass
    except OSError as error:
        raise CasemateError(
            key, address, f"cannot be reached ({error.strerror or error}); is the cluster up?"
        ) from error


def host_and_port(address: str, *, key: str = "cluster.address") -> tuple[str, int]:
    """Host and port of an address; that of Ray itself has no scheme."""
    if address in ("auto", "local"):
        return "localhost", 0
    parts = urlsplit(address if "//" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise CasemateError(key, address, "is not host:port; write e.g. 10.0.0.5:6379")
    return host, port


def total_cpus() -> int:
    """CPUs of the connected cluster."""
    return int(ray.cluster_resources().get("CPU", 1))


def is_local() -> bool:
    """Whether the connected Ray was started by this process: it never gets further nodes."""
    return ray.get_runtime_context().gcs_address in _started_here


def train_resources(cluster: "ClusterSection") -> dict[str, float]:
    """What a train worker needs."""
    gpus = cluster.gpus_per_train_worker
    return {"CPU": cluster.cpus_per_train_worker, **({"GPU": gpus} if gpus else {})}


def actor_resources(cluster: "ClusterSection") -> dict[str, float]:
    """What an actor of the sharded executor needs."""
    return {"CPU": cluster.cpus_per_actor, "GPU": cluster.gpus_per_actor}


def num_fitting(resources: Mapping[str, float]) -> dict[str, int]:
    """How many workers with these resources fit on each living node, if nothing else ran there.

    A fraction of a GPU is a fraction of one: three workers with 0.4 need two GPUs.
    """
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    fitting = {node: _fitting_on(there, resources) for node, there in alive.items()}
    return {node: count for node, count in fitting.items() if count}


def _fitting_on(node: Mapping[str, float], resources: Mapping[str, float]) -> int:
    counts = []
    for name, amount in resources.items():
        there = node.get(name, 0)
        if 0 < amount < 1 and name == "GPU":
            counts.append(int(there) * int(1 / amount))
        elif amount:
            counts.append(int(there / amount))
    return min(counts, default=0)


def describe_need(resources: Mapping[str, float]) -> str:
    """What waiting workers wait for, and why the cluster does not have it now."""
    need = "each needs " + in_words(resources)
    if not num_fitting(resources):
        return f"{need}; no node of the cluster has that, one must join" + _who_adds_nodes()
    total, free = ray.cluster_resources(), ray.available_resources()
    wanted = [name for name, amount in resources.items() if amount]
    if is_local() and not any(free.get(name, 0) for name in wanted):
        return f"{need}; they are starting"  # a local Ray is ours: no other job holds it
    left = ", ".join(f"{free.get(n, 0):g} of {total.get(n, 0):g} {n}s free" for n in wanted)
    return f"{need}; {left}"


def _who_adds_nodes() -> str:
    """A hint if the cluster surely has no autoscaler.

    An autoscaler leaves its status in Ray's key-value store; so does the monitor of a head without
    one, which names every node's type after the node.
    """
    from ray.autoscaler.v2.utils import is_autoscaler_v2  # loads half of the autoscaler

    if is_autoscaler_v2(fetch_from_server=True):
        return ""
    status = _internal_kv_get("__autoscaling_status")
    types = json.loads(status)["autoscaler_report"]["active_nodes"] if status else {}
    has_none = bool(types) and all(name.startswith("node_") for name in types)
    return " (it has no autoscaler)" if has_none else ""


def cannot_be_met(cluster: "ClusterSection") -> CasemateError:
    """A local Ray without room for a single actor."""
    total = ray.cluster_resources()
    if gpus := cluster.gpus_per_actor:
        remedy = f"cannot be met: {total.get('GPU', 0):g} GPUs here"
        return CasemateError("cluster.gpus_per_actor", gpus, remedy)
    remedy = f"cannot be met: {total.get('CPU', 0):g} CPUs here"
    return CasemateError("cluster.cpus_per_actor", cluster.cpus_per_actor, remedy)


def in_words(resources: Mapping[str, float]) -> str:
    """Resources of one worker: `1 CPU and 0.5 GPU`."""
    parts = [f"{amount:g} {name}" for name, amount in resources.items() if amount]
    return " and ".join(parts) or "nothing"
