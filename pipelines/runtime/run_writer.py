"""Writes the messages of one run to MLflow; writing one again changes nothing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from components.core.digests import digest_bytes
from pipelines.runtime.model_registry import STATUS_TAG, Registry
from pipelines.runtime.outbox import Message
from pipelines.runtime.tracking_errors import MISSING

SUPERSEDED_TAG = "casemate.superseded"
PARAM_LENGTH = 6000
NOTE_TAG = "mlflow.note.content"  # what MLflow shows as the description of a run
OWN_NOTE = "casemate.note_digest"  # of the description that we wrote: a user may write another
DESCRIBED = "Casemate: "  # how the description of a version begins at first
NOTE_LENGTH, DESCRIPTION_LENGTH = 8000, 5000  # most that MLflow's databases hold
AT_ONCE = 100  # parameters per request


@dataclass
class RunWriter:
    """One run and the runs nested in it; `write` sends one message."""

    client: MlflowClient
    registry: Registry
    experiment_id: str
    run_id: str
    _children: dict[str, str] = field(default_factory=dict)
    _steps: dict[tuple[str, str], set[int]] = field(default_factory=dict)

    def write(self, message: Message) -> None:
        """Send a message to the run, or to the nested run that it names."""
        run_id = self._child(message["child"]) if message["child"] else self.run_id
        getattr(self, f"_write_{message['kind']}")(run_id, message)

    def _child(self, named: Mapping[str, Any]) -> str:
        key = json.dumps(named, sort_keys=True)
        if key not in self._children:
            identity = {"mlflow.parentRunId": self.run_id, **named["tags"]}
            found = find_or_create(
                self.client, self.experiment_id, named["name"], identity=identity, extra={}
            )
            self._children[key] = found
        return self._children[key]

    def _write_params(self, run_id: str, message: Message) -> None:
        known = self.client.get_run(run_id).data.params
        values = message["values"].items()
        new = [Param(key, value[:PARAM_LENGTH]) for key, value in values if key not in known]
        for start in range(0, len(new), AT_ONCE):
            self.client.log_batch(run_id, params=new[start : start + AT_ONCE])

    def _write_tags(self, run_id: str, message: Message) -> None:
        tags = [RunTag(key, value) for key, value in message["values"].items()]
        self.client.log_batch(run_id, tags=tags)

    def _write_note(self, run_id: str, message: Message) -> None:
        """The description of the run, unless a user has written another."""
        known, text = self.client.get_run(run_id).data.tags, _cut(message["text"], NOTE_LENGTH)
        if _is_ours(known.get(NOTE_TAG, ""), known.get(OWN_NOTE)):
            tags = [RunTag(NOTE_TAG, text), RunTag(OWN_NOTE, _digest(text))]
            self.client.log_batch(run_id, tags=tags)

    def _write_description(self, _: str, message: Message) -> None:
        """The description of the version that a run has registered, unless a user changed it."""
        version = self.registry.version_of(message["trained_in"])
        if version is None:
            return
        text, own = _cut(message["text"], DESCRIPTION_LENGTH), version.tags.get(OWN_NOTE)
        if _is_ours(version.description or "", own):
            self.client.update_model_version(version.name, version.version, text)
            self.client.set_model_version_tag(
                version.name, version.version, OWN_NOTE, _digest(text)
            )

    def _write_results(self, run_id: str, message: Message) -> None:
        """Log the metrics whose last value is another one."""
        known = self.client.get_run(run_id).data.metrics
        fresh = [
            Metric(key, value, message["timestamp"], 0)
            for key, value in message["values"].items()
            if known.get(key) != value
        ]
        if fresh:
            self.client.log_batch(run_id, metrics=fresh)

    def _write_text(self, run_id: str, message: Message) -> None:
        self.client.log_text(run_id, message["text"], message["name"])

    def _write_metrics(self, run_id: str, message: Message) -> None:
        """Log the metrics that the store does not have for this step, in one call."""
        step = message["step"]
        about = self._about(run_id, message["trained_in"])
        fresh = [
            Metric(key, value, message["timestamp"], step, **about)
            for key, value in message["values"].items()
            if step not in self._logged(run_id, key)
        ]
        if not fresh:
            return
        try:
            self.client.log_batch(run_id, metrics=fresh)
        except BaseException:
            self._steps.clear()  # some may have arrived: look again before the next try
            raise
        for metric in fresh:
            self._logged(run_id, metric.key).add(step)

    def _logged(self, run_id: str, key: str) -> set[int]:
        """The steps of a metric that the store has."""
        if (run_id, key) not in self._steps:
            history = self.client.get_metric_history(run_id, key)
            self._steps[run_id, key] = {metric.step for metric in history}
        return self._steps[run_id, key]

    def _about(self, run_id: str, trained_in: str | None) -> dict[str, str]:
        """The model that metrics are about, and the dataset of the run that measured them."""
        model = self._model_of(trained_in)
        return {"model_id": model, **self._dataset_of(run_id)} if model else {}

    def _model_of(self, trained_in: str | None) -> str | None:
        model = self.registry.model_of(trained_in) if trained_in else None
        return str(model.model_id) if model else None

    def _dataset_of(self, run_id: str) -> dict[str, str]:
        known = self.client.get_run(run_id).inputs.dataset_inputs
        if not known:
            return {}
        return {"dataset_name": known[0].dataset.name, "dataset_digest": known[0].dataset.digest}

    def _write_artifacts(self, run_id: str, message: Message) -> None:
        for path in map(Path, message["paths"]):
            if path.exists():  # a refuted certificate is renamed after it was logged
                self.client.log_artifact(run_id, str(path), message["folder"])

    def _write_dataset(self, run_id: str, message: Message) -> None:
        known = self.client.get_run(run_id).inputs.dataset_inputs
        if any(entry.dataset.digest == message["digest"] for entry in known):
            return
        source, profile = json.dumps({"uri": message["source"]}), json.dumps(message["profile"])
        entry = Dataset(message["name"], message["digest"], "local", source, profile=profile)
        tag = InputTag("mlflow.data.context", message["context"])
        self.client.log_inputs(run_id, [DatasetInput(entry, [tag])])

    def _write_classifier(self, run_id: str, message: Message) -> None:
        self.registry.publish_classifier(run_id, message)

    def _write_smoothed(self, run_id: str, message: Message) -> None:
        self.registry.publish_smoothed(run_id, message)

    def _write_model_results(self, run_id: str, message: Message) -> None:
        """Metrics on the run that trained the model, tags on its registered version.

        The run may be in another store, or deleted: its model then has no page to show them on.
        """
        trained_in = message["trained_in"]
        try:
            known = self.client.get_run(trained_in).data.metrics
        except MlflowException as error:
            if error.error_code == MISSING:
                return
            raise
        model = self.registry.model_of(trained_in)
        about = {"model_id": model.model_id, **self._dataset_of(run_id)} if model else {}
        shown = {m.key: m.value for m in model.metrics or ()} if model else known
        fresh = [
            Metric(key, value, message["timestamp"], 0, **about)
            for key, value in message["metrics"].items()
            if shown.get(key) != value
        ]
        if fresh:
            self.client.log_batch(trained_in, metrics=fresh)
        if version := self.registry.version_of(trained_in):
            tags = {**version.tags, **message["tags"]}
            for key, value in (message["tags"] | _summed_up(tags)).items():
                self.client.set_model_version_tag(version.name, version.version, key, value)

    def _write_finish(self, run_id: str, message: Message) -> None:
        self.client.set_terminated(run_id, message["status"])


def _is_ours(text: str, digest: str | None) -> bool:
    """Whether a description may be replaced: there is none, or it is as we wrote it."""
    return not text or text.startswith(DESCRIBED) or digest == _digest(text)


def _digest(text: str) -> str:
    return digest_bytes(text.encode())


def _cut(text: str, length: int) -> str:
    """The text, or as many whole lines of it as fit."""
    if len(text) <= length:
        return text
    return text[: text.rindex("\n", 0, length - 2)] + "\n…"


def _summed_up(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags of a model as a whole, from those of every attack and certificate on it.

    `robustness.threat.NAME` and the like are of one; a doubtful one makes the model doubtful.
    """
    result = {}
    for key in ("robustness.threat", "certificate.digest"):
        found = sorted({value for name, value in tags.items() if name.startswith(f"{key}.")})
        if found:
            result[key] = ", ".join(found)
    verdicts = {value for name, value in tags.items() if name.startswith("robustness.verdict.")}
    if verdicts:
        worst = next((v for v in ("refuted", "suspect", "unsound") if v in verdicts), None)
        result["robustness.verdict"] = worst or ", ".join(sorted(verdicts))
        result[STATUS_TAG] = "failed" if worst else "passed"
    return result


def find_or_create(
    client: MlflowClient,
    experiment: str,
    name: str,
    *,
    identity: Mapping[str, str],
    extra: Mapping[str, str],
) -> str:
    """The run with these tags, running again if it had ended, or a new one."""
    found = client.search_runs([experiment], having(identity), max_results=20)
    live = [run for run in found if SUPERSEDED_TAG not in run.data.tags]
    if live:
        run = live[0]
        if run.info.status != "RUNNING":
            client.update_run(run.info.run_id, status="RUNNING")
        return str(run.info.run_id)
    tags = {**identity, **extra, "mlflow.runName": name}
    return str(client.create_run(experiment, tags=tags).info.run_id)


def having(tags: Mapping[str, str]) -> str:
    """A search for runs that have all these tags."""
    return " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
