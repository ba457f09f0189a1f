"""Models in MLflow: logged once per run, registered as a version with aliases and tags.

Every function may be repeated after a lost answer: it looks for what an earlier try has left.
"""

import os
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model

from pipelines.runtime.tracking_errors import EXISTS, MISSING, is_conflict
from pipelines.runtime.tracking_uri import URI_ENV

SMOOTHED = Path(__file__).with_name("smoothed_model.py")  # executed by MLflow where it is served
STATUS_TAG = "validation_status"
ORIGIN = ("mlflow.user", "mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit")
TRIES = 5  # of a registration, while another flow deletes or creates the same name
_EXPORT = threading.Lock()  # torch.export and MLflow's default store are global: one at a time


@dataclass(frozen=True)
class Registry:
    """The models of one experiment in one store."""

    client: MlflowClient
    uri: str
    experiment_id: str

    def publish_classifier(self, run_id: str, content: Mapping[str, Any]) -> None:
        """Log a trained model for serving (pt2: no pickle) and register it."""
        self._publish(run_id, content, self._log_classifier)

    def publish_smoothed(self, run_id: str, content: Mapping[str, Any]) -> None:
        """Log a smoothed classifier that predicts with a radius, and register it."""
        self._publish(run_id, content, self._log_smoothed)

    def model_of(self, run_id: str) -> LoggedModel | None:
        """The model that a run has logged to its end."""
        return next((m for m in self._logged(run_id) if m.status == "READY"), None)

    def version_of(self, run_id: str) -> ModelVersion | None:
        """The registered version of a run's model."""
        found = self.client.search_model_versions(f"run_id = '{run_id}'")
        return found[0] if found else None

    def _publish(self, run_id: str, content: Mapping[str, Any], log: Any) -> None:
        model = self.model_of(run_id)
        if model is None:
            self._delete_unfinished(run_id)
            try:
                with _EXPORT, default_store(self.uri):
                    log(run_id, self._new_model(run_id, content["name"]), content)
            except BaseException:
                with suppress(Exception):  # if the server is away, the next try does it
                    self._delete_unfinished(run_id)
                raise
            model = self.model_of(run_id)
            assert model is not None, f"MLflow lost the model of run {run_id}"
        version = self.version_of(run_id) or self._new_version(run_id, model, content)
        self._move_alias(version.name, content["alias"])

    def _new_model(self, run_id: str, name: str) -> str:
        """The id of a new logged model, with the origin that its run has."""
        data = self.client.get_run(run_id).data
        model = self.client.create_logged_model(
            self.experiment_id,
            name=name,
            source_run_id=run_id,
            params=data.params,
            tags={key: data.tags[key] for key in ORIGIN if key in data.tags},
        )
        return str(model.model_id)

    def _logged(self, run_id: str) -> list[LoggedModel]:
        """The models of a run; a shared one is in the experiment of the recipe that trained it."""
        try:
            experiment = self.client.get_run(run_id).info.experiment_id
        except MlflowException as error:
            if error.error_code == MISSING:  # in another store, or deleted
                return []
            raise
        terms = f"source_run_id = '{run_id}'"
        return list(self.client.search_logged_models([experiment], terms))

    def _delete_unfinished(self, run_id: str) -> None:
        """Delete what an interrupted try has left."""
        for model in self._logged(run_id):
            if model.status != "READY":
                self.client.delete_logged_model(model.model_id)

    def _new_version(
        self, run_id: str, model: LoggedModel, content: Mapping[str, Any]
    ) -> ModelVersion:
        """A new version under a name that may not exist yet; a failure leaves no empty name."""
        name = content["name"]
        for attempt in range(1, TRIES + 1):
            is_new = self._create_name(name, content.get("about", ""))
            try:
                return self.client.create_model_version(
                    name,
                    f"models:/{model.model_id}",
                    run_id,
                    tags={STATUS_TAG: "pending", **content["tags"]},
                    description=content["description"],
                    model_id=model.model_id,
                )
            except MlflowException as error:
                if error.error_code == MISSING and attempt < TRIES:
                    continue  # another flow removed the name that it had failed to fill
                if is_new:
                    with suppress(MlflowException):
                        self._remove_empty(name)
                raise
        raise AssertionError("unreachable")

    def _create_name(self, name: str, about: str) -> bool:
        try:
            self.client.create_registered_model(name, description=about)
        except MlflowException as error:
            if error.error_code != EXISTS:
                raise
            return False
        return True

    def _remove_empty(self, name: str) -> None:
        if not self.client.search_model_versions(f"name = '{name}'", max_results=1):
            self.client.delete_registered_model(name)

    def _move_alias(self, name: str, alias: str) -> None:
        """Point the alias at the newest version.

        Two flows that register at the same time agree: each looks again after it has written.
        """
        for _ in range(TRIES):
            newest = self._newest(name)
            try:
                self.client.set_registered_model_alias(name, alias, newest)
            except MlflowException as error:
                if not is_conflict(error):
                    raise
                continue
            if self._newest(name) == newest:
                return

    def _newest(self, name: str) -> str:
        found = self.client.search_model_versions(
            f"name = '{name}'", max_results=1, order_by=["version_number DESC"]
        )
        return str(found[0].version)

    def _log_classifier(self, run_id: str, model_id: str, content: Mapping[str, Any]) -> None:
        import torch
        from mlflow.models import infer_signature

        folder = Path(content["folder"])
        for path in sorted(folder.glob("model.*")):
            self.client.log_artifact(run_id, str(path), "model")
        from components.models.checkpoint import load_model  # timm: not every step needs it

        model = load_model(folder)
        spec = model.spec
        example = torch.zeros(2, spec.channels, spec.image_size, spec.image_size)
        self._log(
            mlflow.pytorch,
            run_id,
            model_id,
            content,
            step=content["step"],
            pytorch_model=model,
            signature=infer_signature(example.numpy(), model(example).detach().numpy()),
            input_example=example.numpy(),
            pip_requirements=["torch", "timm"],
        )

    def _log_smoothed(self, run_id: str, model_id: str, content: Mapping[str, Any]) -> None:
        settings = content["settings"]
        shape = (settings["channels"], settings["image_size"], settings["image_size"])
        with TemporaryDirectory() as place, warnings.catch_warnings():
            # MLflow recommends an input example, but would run all draws on it
            warnings.simplefilter("ignore", UserWarning)
            networks = Path(place) / "networks"
            shutil.copytree(content["classifier"], networks / "classifier")
            if content["denoiser"] is not None:
                shutil.copytree(content["denoiser"], networks / "denoiser")
            self._log(
                mlflow.pyfunc,
                run_id,
                model_id,
                content,
                python_model=str(SMOOTHED),
                artifacts={"networks": str(networks)},
                model_config=dict(settings),
                code_paths=[str(SMOOTHED.parents[2] / "components")],
                signature=_smoothed_signature(shape),
                pip_requirements=["mlflow", "torch", "timm", "diffusers", "scipy", "pyarrow"],
            )

    def _log(
        self, flavor: Any, run_id: str, model_id: str, content: Mapping[str, Any], **own: Any
    ) -> None:
        """Log a model under its id; `own` are arguments of its flavor."""
        names = {"artifact_path": None, "name": content["name"], "run_id": run_id}
        metadata = dict(content["metadata"])
        Model.log(**names, flavor=flavor, model_id=model_id, metadata=metadata, **own)


@contextmanager
def default_store(uri: str) -> Iterator[None]:
    """MLflow's own default, which it would leave in the environment as if a user had set it."""
    variable = os.environ.get(URI_ENV)
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        if variable is None:
            os.environ.pop(URI_ENV, None)
        else:
            os.environ[URI_ENV] = variable


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
