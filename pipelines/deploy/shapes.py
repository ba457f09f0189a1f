"""Groups of worker nodes for a recipe: their size, their number, and what fits on them.

A group is made for what the recipe's `cluster` section asks for: train workers (also those of
trials) and actors (attacks, evaluations, analyses, certificates). Preparation needs single CPUs.
Work with GPUs and work without gets a group each, so that no GPU waits for a CPU task.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from components.core.errors import CasemateError
from pipelines.deploy.settings import ManifestSettings
from pipelines.recipe.schema.place import ClusterSection
from pipelines.recipe.schema.recipe import Recipe

ACTOR_STAGES = ("attack", "evaluate", "analyze", "certify")
MIN_CPUS = 4
GIB_PER_CPU, GIB_PER_GPU = 4, 32
MAX_WORKERS = 4  # nodes of a group whose work takes as many as there are
HEAD_CPUS, HEAD_GIB = 2, 8  # driver, dashboard and autoscaler; no work


class Need(NamedTuple):
    """Processes of one kind: what each holds, and how many there are at once."""

    what: str
    key: str  # of the cluster section, followed by what it counts: {}_per_actor
    cpus: int
    gpus: float
    number: int | None  # None: as many as there is room for
    together: int = 1  # so many must run at the same time

    def fitting(self, cpus: int, gpus: int) -> int:
        """How many fit on a node; several share a GPU, one does not use parts of two."""
        by_cpu = cpus // self.cpus
        if not self.gpus:
            return by_cpu
        per_gpu = int(1 / self.gpus) if self.gpus < 1 else 0
        return min(by_cpu, gpus * per_gpu if per_gpu else int(gpus / self.gpus))


class Group(NamedTuple):
    """Worker nodes of one size."""

    name: str
    cpus: int
    memory: int  # GiB
    gpus: int
    max_nodes: int
    needs: tuple[Need, ...]

    @property
    def shared_memory(self) -> int:
        """GiB of /dev/shm: 30 % for Ray's object store, the rest for NCCL."""
        return max(1, self.memory // 2)


def needs_of(recipe: Recipe) -> list[Need]:
    """The processes of a recipe's flow."""
    cluster = recipe.cluster
    found = [Need("task of the preparation", "", 1, 0, None)]
    if recipe.train or recipe.tune:
        found.append(_train_need(cluster, elastic=recipe.tune is not None))
    if any(recipe.needs_stage(stage) for stage in ACTOR_STAGES):
        cpus, gpus = cluster.cpus_per_actor, cluster.gpus_per_actor
        found.append(Need("actor", "cluster.{}_per_actor", cpus, gpus, cluster.num_actors))
    return found


def _train_need(cluster: ClusterSection, *, elastic: bool) -> Need:
    """Train workers; `elastic`: those of trials, of which as many run as fit."""
    return Need(
        "train worker",
        "cluster.{}_per_train_worker",
        cluster.cpus_per_train_worker,
        cluster.gpus_per_train_worker,
        None if elastic else cluster.train_workers,
        together=cluster.train_workers,
    )


def groups_of(recipe: Recipe, settings: ManifestSettings) -> list[Group]:
    """The groups of worker nodes; those with GPUs come last.

    `--node-...` are the sizes of GPU nodes if the recipe uses any, else of CPU nodes.
    """
    needs = needs_of(recipe)
    on_gpus = [need for need in needs if need.gpus]
    on_cpus = [need for need in needs if not need.gpus]
    if settings.node_gpus and not on_gpus:
        remedy = "is set, but the recipe asks for no GPU; set cluster.gpus_per_train_worker or "
        remedy += "cluster.gpus_per_actor"
        raise CasemateError("--node-gpus", settings.node_gpus, remedy)
    usual = ManifestSettings(image=settings.image, max_workers=settings.max_workers)
    groups = [_group("cpu", on_cpus, usual if on_gpus else settings)]
    return [*groups, *([_group("gpu", on_gpus, settings)] if on_gpus else [])]


def _group(name: str, needs: Sequence[Need], settings: ManifestSettings) -> Group:
    """A group whose nodes hold any of these processes."""
    gpus = settings.node_gpus or max(math.ceil(need.gpus) for need in needs)
    cpus = settings.node_cpus or max(_usual_cpus(need, gpus) for need in needs)
    for need in needs:
        _refuse_too_large(need, cpus, gpus)
    memory = settings.node_memory or max(GIB_PER_CPU * cpus, GIB_PER_GPU * gpus)
    nodes = max(_nodes(need, need.fitting(cpus, gpus), settings.max_workers) for need in needs)
    return Group(name, cpus, memory, gpus, nodes, tuple(needs))


def _usual_cpus(need: Need, gpus: int) -> int:
    """CPUs with which every GPU of a node is used."""
    if not need.gpus:
        return max(MIN_CPUS, need.cpus)
    return max(MIN_CPUS, need.fitting(need.cpus * 1000, gpus) * need.cpus)


def _refuse_too_large(need: Need, cpus: int, gpus: int) -> None:
    """Refuse a process that fits on no node of the group."""
    for word, wanted, there in (("cpus", need.cpus, cpus), ("gpus", need.gpus, gpus)):
        if wanted > there:
            remedy = f"is more than a node has ({there}); raise --node-{word}, or ask for less"
            raise CasemateError(need.key.format(word), wanted, remedy)


def _nodes(need: Need, fitting: int, most: int | None) -> int:
    """Nodes for these processes, at most `most`; those that run together must fit."""
    least = math.ceil(need.together / fitting)
    if most and least > most:
        remedy = f"need {least} nodes at the same time, {fitting} on each; raise --max-workers"
        raise CasemateError("cluster.train_workers", need.together, f"{remedy} above {most}")
    wanted = math.ceil(need.number / fitting) if need.number else max(least, most or MAX_WORKERS)
    return min(wanted, most) if most else wanted


def actors_on(groups: Sequence[Group]) -> int | None:
    """How many actors fit on all nodes; None: the flow has none."""
    return next((count for group in groups for count in _actors(group)), None)


def _actors(group: Group) -> Iterator[int]:
    for need in group.needs:
        if need.what == "actor":
            yield need.fitting(group.cpus, group.gpus) * group.max_nodes
