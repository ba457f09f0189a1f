"""`casemate analyze`: studies through the command line; kills and workers change no byte.

Those of attention and from noise run in `tests/unit/pipelines/test_analyze.py`, without Ray.
"""

from functools import partial

import numpy as np
import pytest
from mlflow import MlflowClient

from components.evaluate.metrics import read_metrics
from tests.e2e.cli import call, mistake_of, step_folder
from tests.steps import files_of

pytestmark = pytest.mark.e2e
STUDIES = ("correlation", "lesions", "perturbations")
NUM_ITEMS = 16


@pytest.fixture
def places(finished_flow):
    """(model folder, prepared dataset) of a finished flow."""
    return step_folder(finished_flow, "train.main") / "model", step_folder(finished_flow, "prepare")


def results(storage, study) -> dict[str, bytes]:
    """The files of a step; the manifest also has times."""
    folder = step_folder(storage, f"analyze.{study}")
    files = list(files_of(folder).values())
    named = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {
        name: data for name, data in named.items() if name.endswith(("parquet", "npy", "ary.json"))
    }


def command(places, other, storage, *, workers: int):
    """Studies of two models, two items per unit in those of blocks."""
    model, data = places
    return ("analyze", "--model", model, "--data", data, "--storage", storage,
            "--study", ",".join(STUDIES), "--json", "--set", "analyze.micro_batch=2",
            "--num-items", NUM_ITEMS, "--set", "analyze.lesions.num_samples=3",
            "--set", "analyze.perturbations.num_steps=3",
            "--set", f"analyze.other_models.columns={other}",
            "--set", f"analyze.perturbations.judges.judge={other}",
            "--set", f"cluster.num_actors={workers}", "--set", "cluster.num_cpus=2")  # fmt: skip


@pytest.mark.cluster
@pytest.mark.ray
def test_workers_and_a_kill_change_no_byte(kept_workers, cli, places, finished_flow, tmp_path):
    """One worker; and killed in the middle of the lesions with one worker, ended by two."""
    other = step_folder(finished_flow, "train.columns") / "model"
    run = partial(command, places, other)

    def num_parts() -> int:
        return len(list(tmp_path.glob("2/*/analyze.lesions-*/unfinished/parts/*/*.arrow")))

    cli.kill_when(lambda: num_parts() >= 3, *run(tmp_path / "2", workers=1))
    assert 3 <= num_parts() < NUM_ITEMS  # two models, two items each
    assert not (step_folder(tmp_path / "2", "analyze.lesions") / "manifest.json").exists()
    said = {}
    for workers in (1, 2):
        said[workers] = call(*run(tmp_path / str(workers), workers=workers))
        assert said[workers].code == 0, said[workers].err
    assert "done before" in said[2].err  # the correlation
    assert said[1].json["summary"] == said[2].json["summary"]
    for study in STUDIES:
        one, two = (results(tmp_path / str(workers), study) for workers in (1, 2))
        assert {"metrics.parquet", "summary.json"} <= set(one)
        assert one == two, study
    folder = step_folder(tmp_path / "1", "analyze.correlation")
    matrix = np.load(folder / "matrices" / "main.all.npy")
    assert 0 < matrix[0, 1] == matrix[1, 0] < 1
    lesions = read_metrics(step_folder(tmp_path / "1", "analyze.lesions") / "metrics.parquet")
    assert {row.model for row in lesions} == {"main", "columns"}
    found = {(row.item, row.level, row.metric): row for row in lesions if row.model == "main"}
    whole = found["none", None, "accuracy"]
    training = step_folder(finished_flow, "train.main").name  # of the model that was named
    assert (whole.n, whole.recipe) == (NUM_ITEMS, f"analyze-{training.replace('.', '-')}")
    assert found["block", 0.0, "single_accuracy"].value < whole.value
    runs = MlflowClient(f"sqlite:///{tmp_path}/1/mlflow.db").search_runs(["1"])
    logged = {name: value for run in runs for name, value in run.data.metrics.items()}
    assert logged["analyze/lesions/main/none/accuracy"] == whole.value
    assert 0 < logged["analyze/correlation/main/all/neighbours/mean_similarity"] <= 1


mistake = partial(mistake_of, "analyze")


def test_mistakes_are_one_line(places, tmp_path):
    both = ("--model", places[0], "--data", places[1])
    missing = "is missing; name a RECIPE, or --model, --data and --study"
    assert mistake() == f"analyze: --model {missing}"
    assert mistake(*both) == f"analyze: --study {missing}"
    told = mistake("demo", "--study", "lesions")
    assert told.startswith("--study: lesions cannot be combined with RECIPE")
    assert "did you mean 'lesions'?" in mistake(*both, "--study", "lesion")
    deep = ("--study", "lesions", "--set", "analyze.lesions.counts=[7]")
    told = mistake(*both, *deep, "--storage", tmp_path / "s")
    assert "analyze.lesions.counts: 7 is too many: 2 blocks have block" in told
    where = ("--study", "gaps", "--set", "analyze.gaps.positions=[9]", "--storage", tmp_path / "s")
    assert "analyze.gaps.positions: 9 is not an attention module" in mistake(*both, *where)
