"""Models that no flow has made, as finished steps of a storage: workers anywhere can read them."""

import shutil
from pathlib import Path

from components.models.checkpoint import read_header
from pipelines.flow.plan import fingerprint_of
from pipelines.runtime.provenance import git_revision, software
from pipelines.runtime.step_locks import in_turn
from pipelines.runtime.storage import StepPlace, open_storage
from pipelines.stages.train.steps import given_step


def store_model(folder: Path, *, storage: str | Path, recipe: str) -> StepPlace:
    """Publish the files of a model folder as the step `model.main` of a recipe, if it is not there.

    Its fingerprint is that of the model's digest, as for a folder that a recipe names.
    """
    step = given_step(str(read_header(folder)["digest"]))
    fingerprint = fingerprint_of(step, {})
    root = open_storage(storage)
    place = root.step(recipe, f"{step.name}-{fingerprint[:12]}")
    with in_turn(root.store, place.key):
        if not place.is_finished(fingerprint):
            shutil.copytree(folder, place.work, dirs_exist_ok=True)
            facts = {
                "step": step.name,
                "input_folders": {},
                "git_revision": git_revision(),
                "software": software(),
                "fingerprint": fingerprint,
                "mlflow_run_id": "",
                "inputs": {},
            }
            place.publish(facts, stored={})
    return place
