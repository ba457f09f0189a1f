"""Report, cluster, storage and tracking: not part of a result's identity."""

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import ClassVar, Literal

from pydantic import Field

from components.certify import PublishedSettings
from components.core.settings import Count, Name, Problem
from pipelines.recipe.schema.base import Section

STORES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")
STORE_PLUGINS = "mlflow.tracking_store"  # entry points of packages that add a scheme


class ReportSection(Section):
    """The HTML report."""

    title: str | None = None
    """null: the name of the recipe."""
    num_examples: int = Field(default=4, ge=0)
    """Items in galleries."""
    compare: dict[Name, PublishedSettings] = {}
    """Published radii that are shown beside ours."""


class ClusterSection(Section):
    """Where the work runs; not part of a result's identity."""

    former_keys: ClassVar[Mapping[str, str]] = {
        "gpus_per_worker": "is split in two: write gpus_per_train_worker (training and tuning, a "
        "whole number) and gpus_per_actor (attacks and certificates, whole or a part such as 0.5)"
    }

    address: str | None = None
    """A Ray cluster, host:port; null: a local Ray of this process."""
    num_cpus: Count | None = None
    """Cores of the local Ray; null: all."""
    object_store_mb: Count = 512
    """Shared memory of the local Ray."""
    train_workers: Count = 1
    """Workers of one training."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """`fsdp`: each train worker keeps a part of the weights."""
    cpus_per_train_worker: Count = 1
    """Cores of a train worker."""
    gpus_per_train_worker: int = Field(default=0, ge=0)
    """GPUs of a train worker, a whole number."""
    feed_threads: Literal["auto"] | Count = "auto"
    """Threads of a train worker that build batches ahead; auto: as many as it has cores with a GPU,
    else one."""
    num_actors: Count | None = None
    """Actors of a sharded stage; null: as many as fit."""
    cpus_per_actor: Count = 1
    """Cores of an actor (attacks, suites, certificates)."""
    gpus_per_actor: float = Field(default=0, ge=0)
    """GPUs of an actor; 0.5: two actors share one."""
    max_wait: float = Field(default=1800, gt=0)
    """Seconds without any worker before a stage ends."""
    checkpoint_steps: Count | None = None
    """Steps between checkpoints; null: after each epoch only."""
    max_failures: int = Field(default=3, ge=0)
    """Restarts of a training after lost workers."""

    @property
    def num_feed_threads(self) -> int:
        """Threads that build batches ahead; the batches do not depend on it."""
        if self.feed_threads != "auto":
            return self.feed_threads
        return self.cpus_per_train_worker if self.gpus_per_train_worker else 1

    @property
    def actor_device(self) -> str:
        """Where an actor is asked to compute; only the actor itself can tell whether it can."""
        return "cuda" if self.gpus_per_actor else "cpu"

    def problems(self) -> Iterator[Problem]:
        gpus = self.gpus_per_actor
        if gpus > 1 and gpus != int(gpus):
            remedy = "is neither whole nor below 1: Ray shares one GPU, it does not split several"
            yield Problem("gpus_per_actor", gpus, f"{remedy}; write {int(gpus)} or {int(gpus) + 1}")


class StorageSection(Section):
    """Where artifacts are kept."""

    root: str = "runs"
    """A folder, or a bucket: `s3://`, `gs://` or `az://`."""


class TrackingSection(Section):
    """MLflow."""

    uri: str | None = None
    """MLflow store; null: MLFLOW_TRACKING_URI, else SQLite beside the storage."""
    experiment: str | None = None
    """Experiment of the MLflow runs; null: one per recipe, with its name."""
    max_outage: float = Field(default=900, ge=0)
    """Seconds that a step waits at its end for an MLflow server that is away."""

    def problems(self) -> Iterator[Problem]:
        scheme, colon, _ = (self.uri or "").partition(":")
        if not colon or scheme.partition("+")[0] in STORES:
            return
        if scheme not in entry_points(group=STORE_PLUGINS).names:
            remedy = f"starts with no scheme that MLflow knows: {', '.join(STORES)}"
            yield Problem("uri", self.uri, remedy)
