"""The only `import mlflow`: a run per flow, a child run per step; a second start continues them."""

import json
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # progress is ours

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.time import get_current_time_millis

from components.core.errors import CasemateError, first_line

FLOW_TAG, STEP_TAG, PRINT_TAG = "casemate.flow", "casemate.step", "casemate.fingerprint"
SUPERSEDED_TAG = "casemate.superseded"
SMOOTHED = Path(__file__).with_name("smoothed_model.py")  # executed by MLflow where it is served
_EXPORT = threading.Lock()  # torch.export patches global state: one model at a time


def default_uri(storage: Path) -> str:
    """The SQLite store beside the artifacts; absolute: the working directory never matters."""
    return f"sqlite:///{storage}/mlflow.db"


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
    """One MLflow run; a metric that the store has for a step is not logged again."""

    client: MlflowClient
    run_id: str
    _logged: dict[str, set[int]] = field(default_factory=dict)

    def params(self, values: Mapping[str, Any]) -> None:
        flat = flatten(values)
        known = self.client.get_run(self.run_id).data.params
        new = [Param(k, v[:6000]) for k, v in flat.items() if k not in known]
        for start in range(0, len(new), 100):
            self.client.log_batch(self.run_id, params=new[start : start + 100])

    def tags(self, values: Mapping[str, object]) -> None:
        self.client.log_batch(self.run_id, tags=[RunTag(k, str(v)) for k, v in values.items()])

    def metrics(self, values: Mapping[str, float | None], *, step: int = 0) -> None:
        """Log the metrics that are new at this step, in one call."""
        now = get_current_time_millis()
        fresh = [
            Metric(key, float(value), now, step)
            for key, value in values.items()
            if value is not None and step not in self._steps(key)
        ]
        if fresh:
            self.client.log_batch(self.run_id, metrics=fresh)
            for metric in fresh:
                self._steps(metric.key).add(step)

    def _steps(self, key: str) -> set[int]:
        if key not in self._logged:
            history = self.client.get_metric_history(self.run_id, key)
            self._logged[key] = {m.step for m in history}
        return self._logged[key]

    def artifacts(self, *paths: Path, folder: str | None = None) -> None:
        for path in paths:
            self.client.log_artifact(self.run_id, str(path), folder)

    def dataset(
        self, *, name: str, digest: str, source: str, context: str, profile: Mapping[str, Any]
    ) -> None:
        """A dataset input of this run: its digest ties the run to the prepared images."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        known = self.client.get_run(self.run_id).inputs.dataset_inputs
        if any(d.dataset.digest == digest[:36] for d in known):
            return
        entry = Dataset(
            name, digest[:36], "local", json.dumps({"uri": source}), profile=json.dumps(profile)
        )
        self.client.log_inputs(
            self.run_id, [DatasetInput(entry, [InputTag("mlflow.data.context", context)])]
        )

    def child(self, name: str, tags: Mapping[str, str]) -> "StepRun":
        """A nested run below this one, found again by its tags after a restart."""
        experiment = self.client.get_run(self.run_id).info.experiment_id
        query = {"mlflow.parentRunId": self.run_id, **tags}
        return _find_or_create(self.client, experiment, name, query, {})

    def register_model(
        self,
        model: Any,
        *,
        name: str,
        alias: str,
        example: Any,
        files: Sequence[Path],
        metadata: Mapping[str, Any],
    ) -> str:
        """Log a model for serving (pt2: no pickle), our own files beside it; register an alias."""
        from mlflow.models import infer_signature

        if found := self.client.search_model_versions(f"run_id = '{self.run_id}'"):
            return str(found[0].source)  # an interrupted attempt came this far
        signature = infer_signature(example.numpy(), model(example).detach().numpy())
        for path in files:
            self.artifacts(path, folder="model")
        with _EXPORT, mlflow.start_run(run_id=self.run_id):
            info = mlflow.pytorch.log_model(
                model,
                name=name,
                signature=signature,
                input_example=example.numpy(),
                metadata=dict(metadata),
                pip_requirements=["torch", "timm"],
            )
        self._register(name, alias, str(info.model_uri))
        return str(info.model_uri)

    def register_smoothed(
        self,
        *,
        name: str,
        alias: str,
        classifier: Path,
        denoiser: Path | None,
        settings: Mapping[str, Any],
        metadata: Mapping[str, Any],
    ) -> str:
        """Log a smoothed classifier that predicts with a radius, and register it under an alias.

        `settings` are those of `SmoothedClassifier`, with the shape of images and the sampler.
        """
        if found := self.client.search_model_versions(f"run_id = '{self.run_id}'"):
            return str(found[0].source)  # an interrupted attempt came this far
        shape = (settings["channels"], settings["image_size"], settings["image_size"])
        with (
            TemporaryDirectory() as place,
            _EXPORT,
            warnings.catch_warnings(),
            mlflow.start_run(run_id=self.run_id),
        ):
            # MLflow recommends an input example, but would run all draws on it
            warnings.simplefilter("ignore", UserWarning)
            networks = Path(place) / "networks"
            shutil.copytree(classifier, networks / "classifier")
            if denoiser is not None:
                shutil.copytree(denoiser, networks / "denoiser")
            info = mlflow.pyfunc.log_model(
                name=name,
                python_model=str(SMOOTHED),
                artifacts={"networks": str(networks)},
                model_config=dict(settings),
                code_paths=[str(SMOOTHED.parents[2] / "components")],
                signature=_smoothed_signature(shape),
                metadata=dict(metadata),
                pip_requirements=["mlflow", "torch", "timm", "diffusers", "scipy", "pyarrow"],
            )
        self._register(name, alias, str(info.model_uri))
        return str(info.model_uri)

    def _register(self, name: str, alias: str, source: str) -> None:
        """A new version of a registered model, under an alias."""
        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = self.client.create_model_version(name, source, self.run_id)
        self.client.set_registered_model_alias(name, alias, version.version)

    def finish(self, status: str = "FINISHED") -> None:
        self.client.set_terminated(self.run_id, status)


def _smoothed_signature(shape: tuple[int, ...]) -> Any:
    """Images in; label, abstention, radius and samples out; time and draws as parameters."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec

    columns = {
        "label": DataType.long,
        "abstain": DataType.boolean,
        "radius": DataType.double,
        "samples": DataType.long,
    }
    return ModelSignature(
        inputs=Schema([TensorSpec(np.dtype(np.float32), (-1, *shape))]),
        outputs=Schema([ColSpec(kind, name) for name, kind in columns.items()]),
        params=ParamSchema(
            [
                ParamSpec("seconds_per_image", DataType.double, 0.0),
                ParamSpec("num_estimate", DataType.long, 0),
                ParamSpec("seed", DataType.long, -1),
            ]
        ),
    )


def _find_or_create(
    client: MlflowClient,
    experiment: str,
    name: str,
    identity: Mapping[str, str],
    extra: Mapping[str, str],
) -> StepRun:
    """The run with these tags, running again if it had ended, or a new one."""
    terms = " and ".join(f"tags.`{k}` = '{v}'" for k, v in identity.items())
    found = client.search_runs([experiment], terms, max_results=20)
    live = [r for r in found if SUPERSEDED_TAG not in r.data.tags]
    if live:
        run = live[0]
        if run.info.status != "RUNNING":
            client.update_run(run.info.run_id, status="RUNNING")
        return StepRun(client, run.info.run_id)
    tags = {**identity, **extra, "mlflow.runName": name}
    return StepRun(client, client.create_run(experiment, tags=tags).info.run_id)


class Tracker:
    """A connected store and one experiment in it."""

    def __init__(self, *, uri: str | None, experiment: str, storage: Path) -> None:
        self.uri = uri or default_uri(storage)
        logging.getLogger("mlflow").setLevel(logging.ERROR)  # schema migrations, export hints
        logging.getLogger("alembic").setLevel(logging.ERROR)
        logging.getLogger("torch").setLevel(logging.ERROR)
        mlflow.set_tracking_uri(self.uri)
        try:
            self.client = MlflowClient(self.uri)
            self.experiment_id = self._experiment(experiment, None if uri else storage)
        except (MlflowException, OSError) as error:
            raise CasemateError(
                "tracking.uri", self.uri, f"cannot be used: {first_line(error)}"
            ) from error

    def _experiment(self, name: str, storage: Path | None) -> str:
        if found := self.client.get_experiment_by_name(name):
            return str(found.experiment_id)
        location = (storage / "mlartifacts").as_uri() if storage else None  # a server has its own
        return str(self.client.create_experiment(name, artifact_location=location))

    def flow_run(self, name: str, fingerprint: str, resolved: Mapping[str, object]) -> StepRun:
        """The parent run of the flow of a recipe: same recipe and inputs, same run."""
        run = _find_or_create(
            self.client,
            self.experiment_id,
            name,
            {FLOW_TAG: fingerprint},
            {"casemate.recipe": name},
        )
        run.params(resolved)
        return run

    def step_run(self, parent: StepRun, step: str, fingerprint: str) -> StepRun:
        """The child run of a step, continued if it was interrupted."""
        identity = {"mlflow.parentRunId": parent.run_id, STEP_TAG: step, PRINT_TAG: fingerprint}
        return _find_or_create(self.client, self.experiment_id, step, identity, {})

    def supersede(self, step: str, fingerprint: str) -> None:
        """Mark the runs of a step that will run again (`--force`)."""
        terms = f"tags.`{STEP_TAG}` = '{step}' and tags.`{PRINT_TAG}` = '{fingerprint}'"
        for run in self.client.search_runs([self.experiment_id], terms):
            self.client.set_tag(run.info.run_id, SUPERSEDED_TAG, "true")
