"""Gauges of running stages for Prometheus, through Ray's metrics agents.

Ray exports them as `ray_<name>` on the metrics port of the driver's node, tagged by flow (the name
of the recipe) and step. `infra/grafana/` has a dashboard that shows them.
"""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ray.util.metrics import Gauge

from pipelines.runtime.progress import FILE_NAME, Status

if TYPE_CHECKING:
    from pipelines.runtime.artifacts import StageDir

LOG = logging.getLogger("casemate.gauges")
TAGS = ("flow", "step")
GAUGES: dict[str, tuple[str, Callable[[Status], float | None]]] = {
    "casemate_units_done": ("Units of work that are finished", lambda s: s.done),
    "casemate_units_total": ("Units of work of the stage", lambda s: s.total),
    "casemate_unit_rate": ("Units finished per second", lambda s: s.rate),
    "casemate_eta_seconds": ("Seconds until the stage ends", lambda s: s.eta_seconds),
    "casemate_unit_failures": ("Failures of units, each tried again", lambda s: s.failures),
    "casemate_workers_ready": ("Workers that are ready", lambda s: s.workers),
    "casemate_workers_wanted": ("Workers that were requested", lambda s: s.workers_wanted),
    "casemate_waiting_seconds": ("Seconds without any worker", lambda s: s.waiting_seconds),
    "casemate_draws": ("Predictions computed: noisy copies, ablations", lambda s: s.draws),
    "casemate_images_per_second": ("Images per second", lambda s: s.images_per_second),
}


@cache
def _gauge(name: str) -> Gauge:
    return Gauge(name, description=GAUGES[name][0], tag_keys=TAGS)


class ShownAt(TypedDict):
    """Where the progress of a step is shown besides the terminal."""

    file: Path
    watch: Callable[[Status], None]


def shown_at(out: "StageDir") -> ShownAt:
    """The progress file of a step and its gauges, as arguments of `progress.bar`."""
    watch = exporter(out.place.recipe, out.step)
    return {"file": out.scratch / FILE_NAME, "watch": watch}


def exporter(flow: str, step: str) -> Callable[[Status], None]:
    """A function that exports the status of a step; it never fails."""
    tags = {"flow": flow, "step": step}
    failed = False

    def export(status: Status) -> None:
        nonlocal failed
        try:
            for name, (_, value_of) in GAUGES.items():
                if (value := value_of(status)) is not None:
                    _gauge(name).set(float(value), tags)
        except Exception as error:  # Ray may be gone already
            if not failed:
                LOG.warning("no metrics are exported (%s)", type(error).__name__)
            failed = True

    return export
