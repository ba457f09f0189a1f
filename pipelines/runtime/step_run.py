"""One MLflow run of a flow, a step or a trial: what is logged to it becomes messages in order."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.core.secrets import redact, redacted
from pipelines.runtime.outbox import Message, Outbox
from pipelines.runtime.run_writer import DESCRIBED


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested sections as MLflow parameters `train.epochs`."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value)
    return flat


@dataclass
class StepRun:
    """One MLflow run: every method sends a message, or keeps it while the server is away."""

    run_id: str
    outbox: Outbox
    child_of_run: Message | None = None  # name and tags of a nested run; None: the run itself
    inherited: list[Message] = field(default_factory=list)  # what its nested runs get, too
    runs_page: str | None = None  # of the experiment on a server

    def page_of(self, run_id: str) -> str | None:
        """The address of a run of the same experiment; None without a server."""
        return f"{self.runs_page}/{run_id}" if self.runs_page else None

    def params(self, values: Mapping[str, Any]) -> None:
        """Parameters that the run does not have yet."""
        self._put("params", values=flatten(redacted(values)))

    def tags(self, values: Mapping[str, object]) -> None:
        self._put("tags", values={key: redact(str(value)) for key, value in values.items()})

    def origin(self, values: Mapping[str, str]) -> None:
        """Tags of this run and of those nested in it: recipe, user, code, dataset."""
        self._inherit("tags", values={key: redact(value) for key, value in values.items()})

    def metrics(
        self, values: Mapping[str, float | None], *, step: int = 0, trained_in: str | None = None
    ) -> None:
        """Metrics that are new at this step; those about a model name the run that trained it."""
        found = {key: float(value) for key, value in values.items() if value is not None}
        if found:
            now = _now()
            self._put("metrics", values=found, step=step, timestamp=now, trained_in=trained_in)

    def results(self, values: Mapping[str, float]) -> None:
        """Metrics of a whole flow: one that has changed since, after `--force`, is told again."""
        if values:
            self._put("results", values=dict(values), timestamp=_now())

    def note(self, text: str) -> None:
        """The description of the run, unless a user has written another."""
        self._put("note", text=redact(text))

    def text(self, name: str, text: str) -> None:
        """A small text file as an artifact."""
        self._put("text", name=name, text=text)

    def artifacts(self, *paths: Path, folder: str | None = None) -> None:
        if paths:
            self._put("artifacts", paths=[str(path) for path in paths], folder=folder)

    def dataset(
        self, *, name: str, digest: str, source: str, context: str, profile: Mapping[str, Any]
    ) -> None:
        """A dataset input of this run and of those nested in it.

        Its digest ties them to the prepared images.
        """
        self._inherit(
            "dataset",
            name=name,
            digest=digest[:36],
            source=redact(source),
            context=context,
            profile=dict(profile),
        )

    def model_results(
        self, trained_in: str | None, *, metrics: Mapping[str, float], tags: Mapping[str, str]
    ) -> None:
        """Metrics and tags of the model that another run has trained and registered."""
        if trained_in:
            now = _now()
            values = {"metrics": dict(metrics), "tags": dict(tags), "timestamp": now}
            self._put("model_results", trained_in=trained_in, **values)

    def describe_model(self, trained_in: str | None, text: str) -> None:
        """The description of the version that another run has registered, unless a user has
        changed it there.
        """
        if trained_in:
            self._put("description", trained_in=trained_in, text=redact(text))

    def register_model(
        self,
        folder: Path,
        *,
        name: str,
        alias: str,
        step: int,
        metadata: Mapping[str, Any],
        about: str = "",
    ) -> None:
        """Log the model of a folder for serving, its files beside it; register it.

        `about` describes every version of the name.
        """
        content = {"folder": str(folder), "step": step, "about": about}
        self._register("classifier", name, alias, metadata, None, **content)

    def register_smoothed(
        self,
        *,
        name: str,
        alias: str,
        classifier: Path,
        denoiser: Path | None,
        settings: Mapping[str, Any],
        metadata: Mapping[str, Any],
        tags: Mapping[str, str] | None = None,
        about: str = "",
    ) -> None:
        """Log a smoothed classifier that predicts with a radius; register it.

        `settings` are those of `SmoothedClassifier`, with the shape of images and the sampler.
        """
        self._register(
            "smoothed",
            name,
            alias,
            metadata,
            tags,
            about=about,
            classifier=str(classifier),
            denoiser=str(denoiser) if denoiser else None,
            settings=dict(settings),
        )

    def _register(
        self,
        kind: str,
        name: str,
        alias: str,
        metadata: Mapping[str, Any],
        tags: Mapping[str, str] | None = None,
        **content: Any,
    ) -> None:
        made_of = ", ".join(f"{key} {value}" for key, value in metadata.items())
        described = {"name": name, "alias": alias, "description": f"{DESCRIBED}{made_of}"}
        own = {"metadata": dict(metadata), "tags": dict(tags or {})}
        self._put(kind, **described, **own, **content)

    def child(self, name: str, tags: Mapping[str, str]) -> "StepRun":
        """A nested run below this one, found again by its tags after a restart."""
        run = StepRun(self.run_id, self.outbox, {"name": name, "tags": dict(tags)})
        for message in self.inherited:
            run._put(**message)
        return run

    def finish(self, status: str = "FINISHED") -> None:
        """End the run; does not wait for a server that is away."""
        self._put("finish", status=status)

    def complete(self) -> None:
        """End the run when all that it logged has arrived; waits at most `tracking.max_outage`."""
        self.outbox.drain()
        self.finish()
        self.outbox.drain()

    def _inherit(self, kind: str, **content: Any) -> None:
        self.inherited.append({"kind": kind, **content})
        self._put(kind, **content)

    def _put(self, kind: str, **content: Any) -> None:
        self.outbox.put({"kind": kind, "child": self.child_of_run, **content})


def _now() -> int:
    """Milliseconds, as MLflow counts time."""
    return int(time.time() * 1000)
