"""Room for the workers of Ray Train and Ray Tune: asked for, waited for, and told.

Both would wait without a word and without an end. A placement group of the same shape asks an
autoscaler for nodes; it is given back as soon as there is room.
"""

import time
from collections.abc import Mapping

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from components.core.errors import CasemateError
from pipelines.runtime import progress
from pipelines.runtime.cluster import describe_need, in_words, is_local, num_fitting
from pipelines.runtime.dispatch import TELL_AFTER, TELL_EVERY


class NoRoomError(RuntimeError):
    """The cluster had no room for workers within `cluster.max_wait`."""


def wait_for_room(
    resources: Mapping[str, float], *, num_workers: int, label: str, max_wait: float
) -> None:
    """Return when so many workers with these resources can start at once."""
    wanted = {name: amount for name, amount in resources.items() if amount}
    if is_local() and sum(num_fitting(wanted).values()) < num_workers:
        here = in_words({n: ray.cluster_resources().get(n, 0) for n in wanted})
        remedy = f"workers with {in_words(wanted)} each cannot start: this machine has {here}"
        raise CasemateError("cluster.train_workers", num_workers, remedy)
    group = placement_group([dict(wanted) for _ in range(num_workers)], strategy="PACK")
    began = told = time.monotonic()
    try:
        while not group.wait(timeout_seconds=1):
            now = time.monotonic()
            waited = f"{now - began:.0f} s for {num_workers} worker(s) at once"
            if now - began > max_wait:
                raise NoRoomError(
                    f"no room within cluster.max_wait ({max_wait:g} s): {describe_need(wanted)}; "
                    "start again to continue"
                )
            if now - began >= TELL_AFTER and (told == began or now - told >= TELL_EVERY):
                told = now
                progress.say(f"{label}: waiting since {waited}: {describe_need(wanted)}")
    finally:
        remove_placement_group(group)
