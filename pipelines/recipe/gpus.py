"""GPUs that are there and that a recipe does not ask for. Needs neither torch nor Ray."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from pipelines.recipe.schema.recipe import Recipe

DEVICES = Path("/dev")
WORK = {
    "train": "training",
    "tune": "trials",
    "attack": "attacks",
    "evaluate": "evaluations",
    "certify": "certificates",
}  # of the stages that use GPUs
KEYS = {
    "gpus_per_train_worker": ("train", "tune"),
    "gpus_per_actor": ("attack", "evaluate", "certify"),
}  # and what gives them to it


class UnusedGpus(NamedTuple):
    """The key that would use them, and a message."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


def unused_gpus(
    recipe: Recipe, num_gpus: float, *, stages: Collection[str] = tuple(WORK)
) -> UnusedGpus | None:
    """A notice if some of these stages of a recipe leave the GPUs of their machines unused."""
    cluster = recipe.cluster
    idle = {
        key: [name for name in names if name in stages and recipe.needs_stage(name)]
        for key, names in KEYS.items()
        if not getattr(cluster, key)
    }
    keys = [f"cluster.{key}" for key, names in idle.items() if names]
    if not keys or num_gpus < 1:
        return None
    work = " and ".join(WORK[name] for names in idle.values() for name in names)
    count = "1 GPU is" if num_gpus == 1 else f"{num_gpus:g} GPUs are"
    also = f" and {keys[1]}" if len(keys) > 1 else ""
    return UnusedGpus(keys[0], f"0, but {count} here; {work} will run on CPUs: set it{also} to 1")


def local_gpus() -> int:
    """NVIDIA GPUs of this machine, by their device files."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in DEVICES.glob("nvidia*"))
