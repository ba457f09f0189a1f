"""Ray Tune for real: four trials, ranked on validation, the winner a recipe that runs."""

import json

import pytest
import yaml
from mlflow import MlflowClient

from pipelines import flow, recipe
from tests.e2e.cli import TINY, step_folder, tiny_recipe

pytestmark = pytest.mark.ray

SPACE = {
    "train.weight_decay": [0.0, 0.5],
    "train.objective.eps_warmup_epochs": [0, 1],
}


@pytest.mark.timeout(280)
def test_four_trials_give_a_ranked_table_and_a_recipe(ray_session, tmp_path):
    path = tiny_recipe(
        tmp_path / "tiny.yaml", tune={"space": SPACE, "epochs": 2, "train_items": 80}
    )
    storage = tmp_path / "storage"
    flow.run_flow(recipe.load(str(path)), storage=storage, until="tune")

    folder = step_folder(storage, "tune")
    trials = json.loads((folder / "trials.json").read_text())
    points = {tuple(row[key] for key in SPACE) for row in trials["rows"]}
    assert points == {(0.0, 0), (0.0, 1), (0.5, 0), (0.5, 1)}
    scores = [row["val_robust_accuracy"] for row in trials["rows"]]
    assert scores == sorted(scores, reverse=True)
    assert all(1 <= row["epochs"] <= 2 for row in trials["rows"])

    best = recipe.load(str(folder / "best.yaml"))
    winner = trials["rows"][0]
    assert best.train.weight_decay == winner["train.weight_decay"]
    assert (
        best.objective_of("main").eps_warmup_epochs == winner["train.objective.eps_warmup_epochs"]
    )
    assert best.name == "tiny-tuned"
    assert best.tune is None
    assert (
        yaml.safe_load((folder / "best.yaml").read_text())["train"]["epochs"]
        == TINY["train"]["epochs"]
    )

    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("casemate").experiment_id])
    stage = next(r for r in runs if r.info.run_name == "tune")
    children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == stage.info.run_id]
    assert sorted(r.info.run_name for r in children) == [f"trial-{i}" for i in range(4)]
    assert all(r.info.status == "FINISHED" for r in children)
