"""`casemate card`: results that the real writers wrote, by every way to name a model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient

from components.models.checkpoint import read_header, save_model
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from pipelines import api
from pipelines.runtime.storage import Storage
from tests.e2e.cli import call, mistake_of
from tests.finished_results import attack_step, certify_step, evaluate_step
from tests.small_certificates import GAUSSIAN_CLAIM, gaussian_votes, write_small_certificate
from tests.stored_steps import PRINT, finish, place_of

OPTIONS = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}
ENDING = f"-{PRINT[:12]}"


def saved_model(made: Path, seed: int) -> str:
    torch.manual_seed(seed)
    spec = ModelSpec("tiny_vit", 10, 1, 8, (0.5,), (0.5,), options=OPTIONS)
    return save_model(made, PixelModel(spec).eval(), recipe_digest="")


def training(storage: Storage, flow: str, name: str, made: Path) -> Path:
    history = {"rows": [{"epoch": 0, "loss": 1.0, "train_accuracy": 0.5, "seconds": 2.0}]}
    files = {f"model/{path.name}": path.read_bytes() for path in made.iterdir()}
    place = place_of(storage, flow, f"train.{name}")
    finish(place, {"history.json": json.dumps(history).encode(), **files})
    return place.open()


def make_flow(storage: Storage, made: Path, flow: str = "demo") -> str:
    """`main`: an attack, an evaluation, a certificate; `other`: the same attack. Digest of main."""
    made.mkdir()
    digests = {n: saved_model(made / n, seed) for seed, n in enumerate(("main", "other"))}
    document = {
        **{"format": "casemate-dataset/1", "channels": 1, "height": 8, "width": 8},
        **{"source": {"name": "digits"}, "classes": ["a", "b", "c"], "digest": "d" * 64},
    }
    place = place_of(storage, flow, "prepare")
    finish(place, {"dataset.json": json.dumps(document).encode()})
    inputs = {f"train.{n}": training(storage, flow, n, made / n) for n in digests}
    inputs["prepare"] = place.open()
    at = place_of(storage, flow, "attack.linf")
    attack_step(at, {"main": (8, 6), "other": (9, 1)}, inputs=inputs, suspect="gradients vanish")
    header, rows = gaussian_votes()
    evidence = ({**header, "model_digest": digests["main"]}, rows)
    certify_step(place_of(storage, flow, "certify.l2"), made / "l2", evidence, GAUSSIAN_CLAIM)
    about = {"model_digest": digests["main"]}
    at = place_of(storage, flow, "evaluate.clean")
    evaluate_step(at, made / "m.parquet", "clean", {"main": 17}, 20, **about)
    return digests["main"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("card")
    make_flow(Storage.at(root / "runs"), root / "made")
    return root / "runs" / "demo"


def record_of(*arguments: object) -> dict:
    said = call("card", *arguments, "--json")
    assert said.code == 0, said.err
    (record,) = said.json
    return record


def figures_of(record: dict) -> dict[str, dict]:
    """Figures by their result and title."""
    return {f"{f['result']} {f['title']}": f for f in record["figures"] if f["result"]}


EXPECTED = {
    "attack.linf Clean accuracy": "measured",
    "attack.linf After fgsm": "attacked",
    "certify.l2 Smoothed vote, no adversary": "measured",
    "certify.l2 Certified l2": "proven",
    "evaluate.clean Clean accuracy": "measured",
}


# -- ways to name a model


def test_a_flow_a_training_a_model_and_a_copied_model_have_one_card(finished, tmp_path):
    step = finished / f"train.main{ENDING}"
    alone = shutil.copytree(step / "model", tmp_path / "mine")
    for path in (step, step / "model"):
        record = record_of(path)
        assert (record["model"], record["identity"]["Recipe"]) == ("main", "demo")
        assert {n: f["badge"] for n, f in figures_of(record).items()} == EXPECTED
    assert figures_of(record_of(finished, "--model", "main")) == figures_of(record)
    copied = record_of(alone, "--storage", finished.parent)
    assert copied["model"] == "mine"
    assert figures_of(copied) == figures_of(record)
    assert copied["digest"] == read_header(alone)["digest"]
    both = call("card", finished, "--json").json
    assert [one["model"] for one in both] == ["main", "other"]
    assert set(figures_of(both[1])) == {"attack.linf Clean accuracy", "attack.linf After fgsm"}


def test_values_are_those_of_the_gate(finished):
    gated = api.figures(finished).set_index("name")["value"]
    own = figures_of(record_of(finished / f"train.main{ENDING}"))
    assert own["attack.linf After fgsm"]["value"] == gated["main/robust.linf@8/255"] == 0.6
    assert own["certify.l2 Certified l2"]["value"] == gated["certified.l2@0.5"]
    assert own["certify.l2 Certified l2"]["budget"] == 0.5
    assert own["evaluate.clean Clean accuracy"]["text"] == "85.00%"
    assert own["attack.linf After fgsm"]["state"] == "suspect"
    assert own["attack.linf After fgsm"]["note"] == "gradients vanish"


def test_a_certificate_outside_of_the_storage_is_added(finished, tmp_path):
    digest = read_header(finished / f"train.other{ENDING}" / "model")["digest"]
    header, rows = gaussian_votes()
    evidence = ({**header, "model_digest": digest}, rows)
    own = write_small_certificate(tmp_path / "own", evidence, GAUSSIAN_CLAIM)
    step = finished / f"train.other{ENDING}"
    record = record_of(step, "--storage", finished, "--storage", own)
    badges = {f["badge"] for f in record["figures"] if f["title"] == "Certified l2"}
    assert badges == {"proven"}
    assert len(figures_of(record)) == 4


def test_two_results_of_one_name_are_told_apart(finished, tmp_path):
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        shutil.copytree(finished, runs / name)
    record = record_of(runs / "one" / f"train.main{ENDING}", "--storage", runs)
    sources = {f["result"] for f in record["figures"] if f["title"] == "Certified l2"}
    assert sources == {"one.certify.l2", "two.certify.l2"}
    best = next(f for f in record["headline"] if f["title"] == "Certified l2")
    assert best["note"] == "the highest of 2 certificates, chosen on these items"
    assert call("card", runs / "one", "--storage", runs, "--out", tmp_path).code == 0


def test_a_bucket_its_flow_and_its_training(s3_root, tmp_path):
    storage = Storage.at(s3_root)
    digest = make_flow(storage, tmp_path / "made")
    step = f"{storage.root}/demo/train.main{ENDING}"
    for place in (step, f"{step}/model"):
        record = record_of(place)
        assert record["digest"] == digest
        assert {n: f["badge"] for n, f in figures_of(record).items()} == EXPECTED
    assert figures_of(record_of(f"{storage.root}/demo", "--model", "main")) == figures_of(record)
    line = mistake_of("card", f"{storage.root}/demo/attack.linf{ENDING}")
    assert line.endswith("is not a model, a training or a flow")


# -- what does not verify


def spoil(path: Path, content: bytes) -> None:
    path.unlink()  # the file of the storage, which it is a link to, stays
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["votes.parquet", "certificates.parquet", "certificate.json"])
def test_a_tampered_certificate_is_never_proven(flow, name):
    folder = flow / f"certify.l2{ENDING}"
    content = (folder / name).read_bytes()
    if name == "certificate.json":
        content = content.replace(b'"sound": true', b'"sound":  true')  # says the same
        assert content != (folder / name).read_bytes()
    else:
        content = content[:-20] + b"x" * 20
    spoil(folder / name, content)
    record = record_of(flow / f"train.main{ENDING}")
    (figure,) = [f for f in record["figures"] if f["result"] == "certify.l2"]
    assert figure["badge"] == "not verified"
    assert figure["value"] is None
    assert figure["note"].startswith("does not verify: ")
    assert not any(f["badge"] == "proven" for f in record["figures"] + record["headline"])
    said = call("card", flow, "--model", "main")
    assert f"FAILED: certify.l2 {figure['note'].rstrip('.')}." in said.out.splitlines()
    assert str(flow) not in figure["note"]


def test_a_changed_attack_is_shown_with_the_reason_to_both_models(flow):
    path = flow / f"attack.linf{ENDING}" / "summary.json"
    spoil(path, path.read_bytes().replace(b'"main"', b'"mine"'))
    for name in ("main", "other"):
        record = record_of(flow, "--model", name)
        (figure,) = [f for f in record["figures"] if f["result"] == "attack.linf"]
        assert figure["badge"] == "not verified"
        assert figure["note"].startswith("does not verify: ")


# -- output


def test_pages_markdown_and_folders(finished, tmp_path):
    step = finished / f"train.main{ENDING}"
    for name in ("a.html", "b.html", "a.md"):
        said = call("card", step, "--out", tmp_path / name)
        assert said.code == 0, said.err
        assert said.out.splitlines()[-1] == f"card: {tmp_path / name}"
    html = (tmp_path / "a.html").read_text()
    assert html == (tmp_path / "b.html").read_text()
    assert str(finished.parent) not in html
    assert f"casemate verify demo/certify.l2{ENDING}" in html
    assert (tmp_path / "a.md").read_text().startswith("# main\n")
    said = call("card", finished, "--out", tmp_path / "cards")
    assert sorted(path.name for path in (tmp_path / "cards").iterdir()) == [
        *("main.html", "main.md", "other.html", "other.md")
    ]
    assert (tmp_path / "cards" / "main.html").read_text() == html


def test_what_the_command_prints(finished):
    said = call("card", finished, "--model", "main")
    lines = {line.split("  ")[0]: line for line in said.out.splitlines()}
    assert "  proven  l2 radius 0.25, pixels in [0, 1]" in lines["Certified l2"]
    assert lines["Certified patch"].endswith("not evaluated")
    assert "attacked (suspect)  l∞, eps 8/255" in lines["After fgsm"]
    assert "suspect: attack.linf, main: gradients vanish" in said.out
    table = api.card(finished, names=["main"])[0].table
    assert {"suite", "badge", "value", "low", "high", "num_items"} <= set(table.columns)


def test_refusals(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step = finished / f"train.main{ENDING}"
    assert mistake_of("card") == "card: needs a model folder, a training, a flow or models:/NAME"
    assert mistake_of("card", tmp_path / "no").endswith("does not exist")
    assert "is a file; name a model" in mistake_of("card", step / "history.json")
    (tmp_path / "empty").mkdir()
    assert "holds no finished model" in mistake_of("card", tmp_path / "empty")
    line = mistake_of("card", finished / f"certify.l2{ENDING}")
    assert "holds no finished model" in line
    line = mistake_of("card", finished, "--model", "main,mine")
    assert line == f"model: mine is not a model of {finished}; it has main, other"
    line = mistake_of("card", finished, "--out", tmp_path / "a.html")
    assert "is one file for 2 models (main, other)" in line
    assert "is not a folder" in mistake_of("card", step, "--out", tmp_path / "no" / "a.html")
    (tmp_path / "a.txt").write_text("")
    assert "ends in neither .html nor .md" in mistake_of("card", step, "--out", tmp_path / "a.txt")
    pdf = mistake_of("card", step, "--out", tmp_path / "a.pdf")
    assert pdf.startswith(f"--out: {tmp_path}/a.pdf ends in neither .html nor .md; a new folder")
    assert not (tmp_path / "a.pdf").exists()
    assert "does not exist" in mistake_of("card", step, "--storage", tmp_path / "no")
    assert "is not a run of MLflow" in mistake_of("card", "mlflow:12")
    assert "name its store with --tracking" in mistake_of("card", "models:/demo-main@candidate")
    uri = f"sqlite:///{tmp_path}/no.db"
    assert "does not exist" in mistake_of("card", "models:/x@y", "--tracking", uri)
    assert "name its store with --tracking" in mistake_of("card", step, "--publish")
    shutil.copytree(finished, tmp_path / "runs" / "second")
    shutil.copytree(finished, tmp_path / "runs" / "first")
    line = mistake_of("card", tmp_path / "runs")
    assert line.endswith("is a storage of 2 flows; name one: first, second")
    assert not (tmp_path / "a.html").exists()


# -- MLflow


@pytest.fixture
def tracked(finished, tmp_path):
    """(client, URI, run of the training) of a store with a registered version of `main`."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    artifacts = (finished.parent / "mlartifacts").as_uri()
    experiment = client.create_experiment("casemate", artifact_location=artifacts)
    tags = {"casemate.flow": "f" * 64, "casemate.recipe": "demo"}
    flow = client.create_run(experiment, tags=tags).info.run_id
    tags = {"mlflow.parentRunId": flow, "casemate.folder": f"train.main{ENDING}"}
    run = client.create_run(experiment, tags=tags).info.run_id
    client.create_registered_model("demo-main")
    client.create_model_version("demo-main", f"runs:/{run}/model", run, description="before")
    client.set_registered_model_alias("demo-main", "candidate", "1")
    return client, uri, run


def test_registered_versions_and_runs_of_mlflow(finished, tracked, monkeypatch):
    client, uri, run = tracked
    line = mistake_of("card", f"mlflow:{run}", "--tracking", uri)
    assert "which was run again since" in line  # the manifest names the run mlflow-1
    own = api.card(finished, names=["main"])[0]
    monkeypatch.setattr("pipelines.api.card_models.results_of_run", results_whatever_run(finished))
    for name in ("models:/demo-main@candidate", "models:/demo-main/1"):
        record = record_of(name, "--tracking", uri)
        assert record["identity"]["Registered as"] == "models:/demo-main/1"
        assert record["digest"] == own.content.subject.digest
    assert client.get_model_version("demo-main", "1").description == "before"
    said = call("card", "models:/demo-main@candidate", "--tracking", uri, "--publish")
    assert said.out.splitlines()[-1] == "description of models:/demo-main/1"
    described = client.get_model_version("demo-main", "1").description
    assert described.startswith("# main\n")
    assert "| Certified l2 | **" in described
    assert len(described) <= 5000
    for wrong in ("models:/demo-main@none", "models:/none/1"):
        assert "cannot be found or changed" in mistake_of("card", wrong, "--tracking", uri)
    assert "write models:/NAME@ALIAS" in mistake_of("card", "models:/x", "--tracking", uri)
    step = finished / f"train.other{ENDING}"
    line = mistake_of("card", step, "--publish", "--tracking", uri)
    assert line.startswith("publish: other is not registered in MLflow")


def results_whatever_run(finished: Path):
    """The results of a run that made them, as its manifest would say."""
    from pipelines.api.found_results import results_at

    return lambda run_id, **_: results_at(finished / f"train.main{ENDING}")
