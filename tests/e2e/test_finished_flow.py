"""What a finished flow leaves behind: files, certificates, MLflow store and report."""

import json
import shutil
import subprocess
from pathlib import Path

import mlflow
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mlflow import MlflowClient

from components.core.digests import digest_file
from components.core.shares import wilson_interval
from components.data.prepared import PreparedDataset
from components.models.checkpoint import load_model
from components.report.card.markdown import SHORTENED
from pipelines.stages.registry import STAGES
from tests.e2e.browser import find_chromium, visit
from tests.e2e.cli import ROOT, TINY, call, step_folder
from tests.steps import files_of

pytestmark = pytest.mark.e2e

TRAINED = {"model/model.safetensors", "model/model.json", "history.json", "metrics.json"}
CERTIFIED = {"votes.parquet", "certificates.parquet", "certificate.json", "challenge.json"}
FILES = {
    "prepare": {"dataset.json", *(f"{s}-00000.parquet" for s in ("train", "val", "test"))},
    "train.main": TRAINED,
    "train.columns": TRAINED,
    "train.cleaner": TRAINED,
    "attack.linf": {"attacks.parquet", "summary.json", "examples.npz"},
    "evaluate.clean": {"metrics.parquet", "predictions.parquet", "summary.json"},
    "certify.patch": CERTIFIED,
    "certify.l2": CERTIFIED,
    "certify.early": CERTIFIED - {"challenge.json"},
    "certify.denoised": CERTIFIED - {"challenge.json"},
    "report": {
        *("report.html", "tables/headline.csv"),
        *(f"cards/{model}.{kind}" for model in ("main", "columns") for kind in ("html", "md")),
    },
}
by_certificate = pytest.mark.parametrize("step", ["certify.patch", "certify.l2"])


def clean_accuracy(storage: Path, model: str) -> float:
    """Share of all test items that a trained model predicts correctly, without any stage."""
    test = PreparedDataset.open(step_folder(storage, "prepare")).load("test")
    network = load_model(step_folder(storage, f"train.{model}") / "model")
    with torch.no_grad():
        right = network(test.pixels()).argmax(dim=1) == test.labels
    return int(right.sum()) / len(right)


def rows_of(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def read(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.fixture
def copied(finished_flow, tmp_path):
    """A step's folder to spoil."""

    def copy(step: str) -> Path:
        return shutil.copytree(step_folder(finished_flow, step), tmp_path / step)

    return copy


@pytest.fixture(scope="module")
def client(finished_flow):
    uri = f"sqlite:///{finished_flow}/mlflow.db"
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)  # `models:/` addresses are looked up in the global store
    yield MlflowClient(uri)
    mlflow.set_tracking_uri(before)


@pytest.fixture(scope="module")
def runs(client):
    """(the one parent run, its children by name)."""
    experiment = client.get_experiment_by_name("tiny")
    found = client.search_runs([experiment.experiment_id])
    (parent,) = [r for r in found if "mlflow.parentRunId" not in r.data.tags]
    return parent, {r.info.run_name: r for r in found if r is not parent}


@pytest.mark.parametrize("step", FILES)
def test_a_step_is_sealed_with_the_digest_of_every_file(finished_flow, step):
    folder = step_folder(finished_flow, step)
    manifest = read(folder / "manifest.json")
    there = set(files_of(folder))
    assert FILES[step] <= there
    assert there == {"manifest.json", *manifest["files"]}  # nothing left over, nothing unlisted
    for name, entry in manifest["files"].items():
        path = folder / name
        assert entry == {"sha256": digest_file(path), "bytes": path.stat().st_size}
    assert folder.name == f"{step}-{manifest['fingerprint'][:12]}"
    for source in manifest["input_folders"].values():  # relative: a storage can be moved
        assert (folder / source / "manifest.json").is_file()


def test_a_second_run_is_json_on_stdout_and_never_loads_ray(cli, finished_flow, tmp_path):
    trap = "raise ImportError('nothing is left to do, so nobody needs this')\n"
    for name in ("ray", "mlflow"):
        (tmp_path / f"{name}.py").write_text(trap)
    command = ("run", finished_flow.parent / "tiny.yaml", "--storage", finished_flow, "--json")
    again = cli(*command, env={"PYTHONPATH": str(tmp_path)})
    assert again.code == 0, again.err
    lines = again.err.splitlines()
    assert len(lines) == len(FILES)
    assert all(" done before " in line for line in lines)
    assert set(again.json["steps"]) == set(FILES)
    assert all(Path(folder).is_dir() for folder in again.json["steps"].values())
    assert Path(again.json["report"]) == step_folder(finished_flow, "report") / "report.html"
    assert again.json["tracking_uri"] == f"sqlite:///{finished_flow}/mlflow.db"
    named = {row["what"] for row in again.json["summary"]}
    attacks = {f"{name} linf 0.05" for name in ("fgsm", "pgd-5-ce", "apgd-ce")}
    assert {"clean", *attacks, "certified patch 2px", "certified l2 0.1, denoised"} <= named
    judged = [row for row in again.json["summary"] if "verdict" in row]
    assert [row["what"] for row in judged] == ["apgd-ce linf 0.05"]  # with the last of the list
    for row in again.json["summary"]:
        assert 0 <= row["low"] <= row["value"] <= row["high"] <= 1
        # One interval for attacks, certificates and evaluations, whatever their files hold.
        found = wilson_interval(round(row["value"] * row["num_items"]), row["num_items"])
        assert (row["low"], row["high"]) == found, row["what"]

    fresh = cli("run", command[1], "--storage", tmp_path / "new", env={"PYTHONPATH": str(tmp_path)})
    assert fresh.code == 1
    assert "nobody needs this" in fresh.err  # the trap does catch what it is set for


def test_a_model_that_nothing_attacks_has_a_clean_accuracy_everywhere(finished_flow, runs):
    """In the summary, the report, the card, MLflow; `casemate evaluate` has made it before."""
    recipe = finished_flow.parent / "tiny.yaml"
    said = call("evaluate", recipe, "--storage", finished_flow, "--json")
    assert said.code == 0, said.err
    assert set(said.json["steps"]) == {"prepare", "train.columns", "evaluate.clean"}
    (row,) = said.json["summary"]
    assert (row["what"], row["model"], row["num_items"]) == ("clean", "columns", 24)
    assert row["value"] == clean_accuracy(finished_flow, "columns")
    parent, children = runs
    for run in (parent, children["evaluate.clean"]):
        assert run.data.metrics["evaluate/clean/accuracy"] == row["value"]
    shown = f"{100 * row['value']:.2f}"
    report = step_folder(finished_flow, "report")
    headline = (report / "tables" / "headline.csv").read_text().splitlines()
    (own,) = [line for line in headline if line.startswith("columns,")]
    assert str(row["value"]) in own
    assert shown in (report / "cards" / "columns.md").read_text()
    assert not (report / "cards" / "cleaner.md").exists()  # a denoiser has no accuracy


@by_certificate
def test_verify_takes_the_folder_and_both_files(finished_flow, step):
    folder = step_folder(finished_flow, step)
    num_items = len(rows_of(folder / "certificates.parquet"))
    for path in (folder, folder / "certificate.json", folder / "certificates.parquet"):
        said = call("verify", path)
        assert said.code == 0, said.out
        assert said.out == f"{path}: {num_items} items checked: every claim holds\n"


@by_certificate
def test_votes_drawn_again_are_the_same_bit_for_bit(finished_flow, step):
    said = call("verify", step_folder(finished_flow, step), "--resample", 3, "--json")
    assert said.code == 0, said.out + said.err
    assert said.json["problems"] == []
    assert said.json["resampled"] == 3


def test_a_certificate_signed_with_a_key_of_ssh(copied, tmp_path):
    folder, key, public = copied("certify.l2"), tmp_path / "key", tmp_path / "key.pub"
    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen on this machine")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    assert call("sign", folder, "--key", key).code == 0
    assert call("verify", folder, "--key", public).code == 0
    claims = rows_of(folder / "certificates.parquet")
    count = sum(row["correct"] and row["radius"] >= 0.05 for row in claims)
    wanted = f"certified.l2@0.05={count}/{len(claims)}"
    said = call("gate", folder, "--key", public, "--min", wanted)
    assert said.code == 0, said.out
    item = next(row["item_id"] for row in claims if not row["abstain"])
    flip_one_vote(folder, item=item, stream="estimate")
    said = call("verify", folder, "--key", public)
    assert (said.code, said.out) == (
        1, "problem: signature: votes.parquet: changed since it was signed\n"
    )  # fmt: skip


def test_minima_of_the_flow(finished_flow, tmp_path):
    rows = call("gate", finished_flow, "--json").json
    listed = {row["name"]: row["value"] for row in rows}
    attacked = read(step_folder(finished_flow, "attack.linf") / "summary.json")["models"]["main"]
    patch = read(step_folder(finished_flow, "certify.patch") / "certificate.json")["summary"]
    assert listed["robust.linf@0.05"] == attacked["robust_accuracy"]["value"]
    assert listed["attack.linf/clean"] == attacked["clean_accuracy"]["value"]
    assert listed["evaluate.clean/clean"] == clean_accuracy(finished_flow, "columns")
    assert listed["certified.patch@2"] == patch["certified"][1]["accuracy"]["value"]
    steps = ("l2", "early", "denoised")
    assert {f"certify.{step}/certified.l2@0.1" for step in steps} <= set(listed)
    counts = [round(row["value"] * row["num_items"]) for row in rows]
    shares = [f"{row['name']}={k}/{row['num_items']}" for row, k in zip(rows, counts, strict=True)]
    minima = [word for share in shares for word in ("--min", share)]
    out = tmp_path / "gate.xml"
    options = ("--allow-suspect", "--junit", out)
    assert call("gate", finished_flow / "tiny", *minima, *options).code == 0
    assert out.read_text().count("<testcase ") == len(listed)
    said = call("gate", finished_flow, *minima, *options, "--min", "attack.linf/main/clean=1")
    assert said.code == 1
    (failed,) = [line for line in said.out.splitlines() if line.startswith("FAILED: ")]
    assert failed.endswith(str(step_folder(finished_flow, "attack.linf")))
    assert call("gate", finished_flow, "--min", "certified.l2@0.1=0").code == 2  # three have it
    enough = f"columns/clean={listed['evaluate.clean/clean']!r}"
    assert call("gate", finished_flow, "--min", enough).code == 0


def test_results_of_the_flow_are_compared(finished_flow, tmp_path):
    """By MLflow's ids of a step and of the flow, against the same votes and against others."""
    steps = {name: step_folder(finished_flow, f"certify.{name}") for name in ("l2", "early")}
    run_id = read(steps["l2"] / "manifest.json")["mlflow_run_id"]
    again = tmp_path / "again"
    assert call("recertify", steps["l2"], "--out", again).code == 0
    uri, page = f"sqlite:///{finished_flow}/mlflow.db", tmp_path / "page.html"
    said = call("compare", f"A=mlflow:{run_id}", again, "--tracking", uri, "--out", page, "--json")
    assert said.code == 0, said.err
    assert said.json["models"][0]["places"] == [str(steps["l2"])]
    figures = [row["figure"] for row in said.json["comparisons"]]
    assert figures == ["smoothed.l2", "certified.l2@0.05", "certified.l2@0.1"]
    assert {(row["won"], row["lost"], row["p_value"]) for row in said.json["comparisons"]} == {
        (0, 0, 1.0)
    }
    assert "certified.l2: certified accuracy" in page.read_text()
    flow = MlflowClient(uri).get_run(run_id).data.tags["mlflow.parentRunId"]
    whole = call("compare", f"flow={flow}", again, "--tracking", uri, "--model", "main", "--json")
    assert whole.code == 0, whole.err
    assert {row["one"] for row in whole.json["comparisons"]} == {"flow"}
    said = call("compare", steps["l2"], steps["early"])
    assert said.code == 2
    assert "other draws declared" in said.err


def test_results_of_the_flow_are_ranked(finished_flow, tmp_path):
    """By the storage and by MLflow's runs; each certificate at every radius, on its own board."""
    files = [tmp_path / "board.html", tmp_path / "board.json"]
    given = ("--storage", finished_flow, "--out", files[0], "--out", files[1], "--json")
    said = call("leaderboard", *given)
    assert said.code == 0, said.err
    assert said.json["left_out"] == []
    tracked = call("leaderboard", "--tracking", f"sqlite:///{finished_flow}/mlflow.db", "--json")
    assert tracked.json == said.json, tracked.err
    boards = said.json["boards"]
    entries = {row: b for b in boards for e in b["entries"] for row in e["results"]}
    steps = [step_folder(finished_flow, f"certify.{n}") for n in ("l2", "early", "denoised")]
    assert {f"tiny/{folder.name}" for folder in steps} < set(entries)
    for folder in steps:
        summary = read(folder / "certificate.json")["summary"]
        found = {
            b["budget"]: e
            for b in boards
            for e in b["entries"]
            if b["threat"] == "certified.l2" and e["results"] == [f"tiny/{folder.name}"]
        }
        assert list(found) == ["0.05", "0.1"]
        for certified in summary["certified"]:
            share = certified["accuracy"]
            own = found[f"{certified['radius']:g}"]
            assert own["accuracy"]["value"] == share["value"]
            assert 0 <= share["value"] * 100 - float(own["certified_acc"]) < 0.01
    (clean,) = [b for b in boards if b["threat"] == "clean"]  # by an attack and by an evaluation
    steps = {place.partition("-")[0] for entry in clean["entries"] for place in entry["results"]}
    assert steps == {"tiny/attack.linf", "tiny/evaluate.clean"}
    (robust,) = [b for b in boards if b["threat"] == "robust.linf"]
    summary = read(step_folder(finished_flow, "attack.linf") / "summary.json")["models"]["main"]
    (entry,) = robust["entries"]
    assert entry["verdict"] == summary["sanity"]["verdict"]
    assert (entry["rank"] is None) == (entry["verdict"] == "suspect")
    assert (robust["dataset"], robust["small"]) == ("digits", True)
    assert str(finished_flow) not in files[0].read_text() + files[1].read_text()
    if find_chromium() is not None:
        seen = visit(files[0], width=390, height=844)
        assert seen.errors == seen.requests == ()
        assert seen.scroll_width <= seen.inner_width


def flip_one_vote(folder: Path, *, item: str, stream: str) -> None:
    """One vote of the winner goes to another class; header and all else stay."""
    claims = {row["item_id"]: row for row in rows_of(folder / "certificates.parquet")}
    table = pq.read_table(folder / "votes.parquet")
    rows = table.to_pylist()
    row = next(r for r in rows if r["item_id"] == item and r["stream"] == stream)
    winner = claims[item]["prediction"]
    row["predictions"][row["predictions"].index(winner)] = 9 if winner != 9 else 0
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), folder / "votes.parquet")


@pytest.mark.parametrize(
    ("step", "stream"), [("certify.patch", "columns"), ("certify.l2", "estimate")]
)
def test_one_changed_vote_is_found_and_its_item_named(copied, step, stream):
    folder = copied(step)
    claims = rows_of(folder / "certificates.parquet")
    item = next(row["item_id"] for row in claims if not row["abstain"])
    flip_one_vote(folder, item=item, stream=stream)
    said = call("verify", folder)
    assert said.code == 1
    assert f"problem: item {item}: " in said.out
    others = {row["item_id"] for row in claims} - {item}
    assert not any(other in said.out for other in others)
    again = call("recertify", folder, "--out", folder.parent / "new")
    assert again.code == 2  # new claims are not made from votes that changed
    assert again.err.startswith("casemate: votes: ")
    assert not (folder.parent / "new").exists()


def test_a_changed_vote_is_found_by_drawing_again(finished_flow, copied):
    folder = copied("certify.patch")
    rows = rows_of(folder / "certificates.parquet")
    for row in rows:
        flip_one_vote(folder, item=row["item_id"], stream="columns")
    source = step_folder(finished_flow, "train.columns") / "model"
    data = step_folder(finished_flow, "prepare")
    said = call("verify", folder, "--resample", 1, "--model", source, "--data", data)
    assert said.code == 1
    assert "1 of 8 columns votes differ" in said.out


@pytest.mark.parametrize("column", ["radius", "prediction", "correct"])
def test_a_changed_claim_is_found_and_its_item_named(copied, column):
    folder = copied("certify.l2")
    table = pq.read_table(folder / "certificates.parquet")
    rows = table.to_pylist()
    if column == "radius":
        rows[0]["radius"] = float(np.nextafter(rows[0]["radius"], np.inf))  # one last bit
    else:
        rows[0][column] = not rows[0]["correct"] if column == "correct" else 9
    changed = pa.Table.from_pylist(rows, schema=table.schema)
    pq.write_table(changed, folder / "certificates.parquet")
    said = call("verify", folder / "certificate.json")
    assert said.code == 1
    assert f"item {rows[0]['item_id']}: {column} is " in said.out


def test_recertify_l2_follows_alpha_and_radii(finished_flow, tmp_path):
    folder = step_folder(finished_flow, "certify.l2")
    before = {name: digest_file(p) for name, p in files_of(folder).items()}
    radii = {}
    for alpha in (0.0001, 0.001, 0.05):
        out = tmp_path / f"alpha-{alpha}"
        said = call("recertify", folder, "--failure-prob", alpha, "--radii", "0.07,0.02",
                    "--out", out, "--json")  # fmt: skip
        assert said.code == 0, said.err
        assert said.json["claim"] == {"failure_prob": alpha, "radii": [0.02, 0.07]}
        assert call("verify", out).code == 0
        assert digest_file(out / "votes.parquet") == before["votes.parquet"]
        radii[alpha] = [row["radius"] for row in rows_of(out / "certificates.parquet")]
    original = [row["radius"] for row in rows_of(folder / "certificates.parquet")]
    assert radii[0.001] == original  # alpha was the recipe's: radii do not move
    assert all(map(lambda a, b, c: a <= b <= c, *radii.values()))
    assert sum(radii[0.0001]) < sum(radii[0.05])  # more allowed error, larger radii
    assert {name: digest_file(p) for name, p in files_of(folder).items()} == before


def test_radii_leave_as_the_published_table_and_come_back(finished_flow, tmp_path):
    from components.certify.l2.cohen_tsv import read_cohen_tsv

    folder, out = step_folder(finished_flow, "certify.l2"), tmp_path / "l2.tsv"
    assert call("export-tsv", folder, "--out", out, "--json").json["num_items"] == 24
    claims = rows_of(folder / "certificates.parquet")
    for row, claim in zip(read_cohen_tsv(out), claims, strict=True):
        assert (row.label, row.prediction) == (claim["label"], claim["prediction"])
        assert row.radius <= claim["radius"] < row.printed + 1e-6
    refused = call("export-tsv", step_folder(finished_flow, "certify.patch"), "--out", out)
    assert (refused.code, "not an l2 certificate" in refused.err) == (2, True)
    refused = call("export-tsv", folder, "--out", tmp_path)
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)
    assert "is a folder; name the file" in refused.err


def test_recertify_patches_follows_sizes_and_rule(tmp_path):
    """On kept votes: on some processors the small flow's model certifies nothing."""
    folder = ROOT / "tests" / "golden" / "record" / "certificates" / "columns-b3-s1"
    certified = {}
    for rule in ("strict", "count", "loc"):
        out = tmp_path / rule
        claim = ("--patch-sizes", "1,3", "--rule", rule, "--second-rule", "none")
        said = call("recertify", folder, *claim, "--out", out)
        assert said.code == 0, said.err
        assert said.out.endswith(f"certificate: {out}\n")
        assert call("verify", out).code == 0
        rows = rows_of(out / "certificates.parquet")
        certified[rule] = {(r["item_id"], s) for r in rows for s in r["certified_patch_sizes"]}
    assert certified["strict"] <= certified["count"] <= certified["loc"]
    assert certified["loc"]
    same = rows_of(folder / "certificates.parquet")
    assert {i for i, size in certified["count"] if size == 1} == {
        row["item_id"] for row in same if 1 in row["certified_patch_sizes"]
    }


def test_a_printed_accuracy_is_never_above_the_measured_one(finished_flow, tmp_path):
    out = tmp_path / "new"
    said = call("recertify", step_folder(finished_flow, "certify.l2"), "--out", out)
    (entry, *_) = read(out / "certificate.json")["summary"]["certified"]
    assert 0 <= 100 * entry["accuracy"]["value"] - float(said.out.split()[3]) < 0.1


@by_certificate
def test_no_certificate_claims_more_than_an_attack_leaves_standing(finished_flow, step):
    folder = step_folder(finished_flow, step)
    result, settings = read(folder / "challenge.json"), TINY["certify"][step.split(".")[1]]
    challenge = settings["challenge"]
    dataset = PreparedDataset.open(step_folder(finished_flow, "prepare"))
    attacked = dataset.load("test", limit=challenge["num_items"]).item_ids
    claims = {row["item_id"]: row for row in rows_of(folder / "certificates.parquet")}

    def holds(row: dict) -> bool:
        if step == "certify.patch":
            return challenge["patch_size"] in row["certified_patch_sizes"]
        return row["radius"] >= challenge["eps"]

    certified = np.mean([claims[i]["correct"] and holds(claims[i]) for i in attacked])
    assert result["num_items"] == len(attacked) == challenge["num_items"]
    assert result["certified"]["value"] == certified
    assert certified <= result["standing"]["value"]
    assert result["broken_certified"] == 0
    summary = read(folder / "certificate.json")["summary"]
    accuracies = [entry["accuracy"]["value"] for entry in summary["certified"]]
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[0] <= summary["standard_accuracy"]["value"]
    if step == "certify.l2":
        assert any(holds(claims[i]) for i in attacked)  # the attack did meet a claim


def test_attack_results_say_what_happened_to_each_item(finished_flow):
    folder, eps = step_folder(finished_flow, "attack.linf"), TINY["attack"]["linf"]["eps"]
    dataset = PreparedDataset.open(step_folder(finished_flow, "prepare"))
    test = dataset.load("test")
    rows = rows_of(folder / "attacks.parquet")
    assert [row["item_id"] for row in rows] == list(test.item_ids)
    assert [row["label"] for row in rows] == test.labels.tolist()
    for row in rows:
        right = row["clean_prediction"] == row["label"]
        fell = row["adversarial_prediction"] != row["label"]
        assert (row["broken_by"] is not None) == (right and fell)
        assert row["broken_by"] in (None, "fgsm", "pgd-5-ce", "apgd-ce")
        assert row["num_evaluations"] >= 1
        if row["broken_by"]:
            assert row["adversarial_prediction"] != row["clean_prediction"]
            assert 0 < row["norm"] <= eps + 1e-6  # float32 differences of pixels in [0, 1]
        else:
            assert row["norm"] is None
    summary = read(folder / "summary.json")
    found = summary["models"]["main"]
    clean = np.mean([r["clean_prediction"] == r["label"] for r in rows])
    broken = np.mean([r["broken_by"] is not None for r in rows])
    assert found["clean_accuracy"]["value"] == pytest.approx(clean)
    assert found["robust_accuracy"]["value"] == pytest.approx(clean - broken)
    assert summary["threat"]["eps"] == eps
    left = [attack["robust_accuracy"]["value"] for attack in found["attacks"]]
    assert [found["clean_accuracy"]["value"], *left] == sorted([clean, *left], reverse=True)
    assert left[-1] == found["robust_accuracy"]["value"] < found["clean_accuracy"]["value"]
    assert {point["steps"] for point in found["curves"]["steps"]} == {1, 5}
    assert found["sanity"]["verdict"] in ("reliable", "suspect")
    assert any(f["name"].startswith("transfer") for f in found["sanity"]["findings"])


def test_kept_adversarial_images_stay_in_the_ball(finished_flow):
    eps = TINY["attack"]["linf"]["eps"]
    dataset = PreparedDataset.open(step_folder(finished_flow, "prepare"))
    with np.load(step_folder(finished_flow, "attack.linf") / "examples.npz") as arrays:
        clean, adversarial = arrays["main/clean"], arrays["main/adversarial"]
    assert np.array_equal(clean, dataset.load("test", limit=len(clean)).pixels().numpy())
    assert np.abs(adversarial - clean).max() <= eps + 1e-6
    assert adversarial.min() >= 0
    assert adversarial.max() <= 1
    assert not np.array_equal(adversarial, clean)


def test_mlflow_has_one_parent_and_a_child_per_step(runs, finished_flow):
    parent, children = runs
    assert set(children) == set(FILES)
    assert parent.info.run_name == "tiny"
    assert parent.data.params["train.epochs"] == str(TINY["train"]["epochs"])
    assert children["certify.l2"].data.params["certify.sigma"] == "0.1"
    for step, run in children.items():
        manifest = read(step_folder(finished_flow, step) / "manifest.json")
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["casemate.fingerprint"] == manifest["fingerprint"]
        assert manifest["mlflow_run_id"] == run.info.run_id
        section = STAGES[step.split(".")[0]].section
        assert any(key.startswith(f"{section}.") for key in run.data.params)
    assert parent.info.status == "FINISHED"


def test_mlflow_has_each_epoch_once(client, runs, finished_flow):
    variant = TINY["train"]["variants"]["columns"]
    for step, epochs in {"main": TINY["train"]["epochs"], "columns": variant["epochs"]}.items():
        run = runs[1][f"train.{step}"]
        rows = read(step_folder(finished_flow, f"train.{step}") / "history.json")["rows"]
        assert len(rows) == epochs
        for name in ("loss", "train_accuracy", "val_accuracy", "lr"):
            history = client.get_metric_history(run.info.run_id, f"train/{name}")
            assert sorted((m.step, m.value) for m in history) == [
                (row["epoch"], row[name]) for row in rows
            ]


def test_mlflow_has_the_figures_and_files_of_attack_certificates_and_report(
    client, runs, finished_flow
):
    children = runs[1]
    summary = read(step_folder(finished_flow, "attack.linf") / "summary.json")["models"]["main"]
    logged = children["attack.linf"].data.metrics
    assert logged["attack/linf/main/robust_accuracy"] == summary["robust_accuracy"]["value"]
    for attack in summary["attacks"]:
        after = logged[f"attack/linf/main/after_{attack['name']}"]
        assert after == attack["robust_accuracy"]["value"]
    tags = children["attack.linf"].data.tags
    assert tags["casemate.attack.linf.verdict"] == summary["sanity"]["verdict"]
    l2 = read(step_folder(finished_flow, "certify.l2") / "certificate.json")["summary"]
    at = {f"{e['radius']:.2f}": e["accuracy"]["value"] for e in l2["certified"]}
    assert set(at) == {"0.05", "0.10"}
    for radius, value in at.items():
        metrics = children["certify.l2"].data.metrics
        assert metrics[f"certify/l2/accuracy_at_{radius}"] == value
    for step in ("attack.linf", "certify.patch", "certify.l2", "report"):
        run_id = children[step].info.run_id
        names = {artifact.path for artifact in client.list_artifacts(run_id)}
        wanted = {n for n in FILES[step] if "/" not in n} - {"examples.npz"}
        assert wanted <= names, step
        for name in wanted:
            kept = Path(client.download_artifacts(run_id, name))
            assert digest_file(kept) == digest_file(step_folder(finished_flow, step) / name)


def test_mlflow_ties_every_step_to_the_dataset(runs, finished_flow):
    digest = read(step_folder(finished_flow, "prepare") / "dataset.json")["digest"]
    for step, run in runs[1].items():
        (entry,) = run.inputs.dataset_inputs
        assert digest.startswith(entry.dataset.digest), step
        assert len(entry.dataset.digest) == 36
        (tag,) = entry.tags
        kinds = {"prepare": "preparation", "train": "training"}
        assert tag.value == kinds.get(step.split(".")[0], "testing")


@pytest.mark.parametrize("name", ["main", "columns"])
def test_the_registered_candidate_gives_our_own_logits(client, runs, finished_flow, name):
    version = client.get_model_version_by_alias(f"tiny-{name}", "candidate")
    assert version.run_id == runs[1][f"train.{name}"].info.run_id
    served = mlflow.pytorch.load_model(version.source)
    ours = load_model(step_folder(finished_flow, f"train.{name}") / "model")
    pixels = PreparedDataset.open(step_folder(finished_flow, "prepare")).load("test").pixels()
    for size in (1, 3):  # the example that it was exported with had two rows
        with torch.no_grad():
            logits, expected = served(pixels[:size]), ours(pixels[:size])
        assert logits.shape == (size, 10)
        # Export may fuse operations differently: equal up to float32 rounding.
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(find_chromium() is None, reason="no chromium on this machine")
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_report_reads_well_in_a_browser(finished_flow, width, height):
    seen = visit(step_folder(finished_flow, "report") / "report.html", width=width, height=height)
    assert seen.errors == ()
    assert seen.requests == ()
    assert seen.scroll_width <= seen.inner_width
    charts = [figure for figure in seen.figures if figure[0].lower() == "svg"]
    pictures = [figure for figure in seen.figures if figure[0].lower() == "img"]
    assert len(charts) >= 7  # attack, its two curves and gaps, patches, radii, training
    assert pictures
    for tag, shown_width, shown_height, decoded in seen.figures:
        assert min(shown_width, shown_height) >= 40, tag
        assert decoded > 0
    assert seen.smallest_chart_text >= 10


def test_the_report_names_no_place_on_this_machine(finished_flow):
    folder = step_folder(finished_flow, "report")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert str(finished_flow) not in page
    assert str(ROOT) not in page
    for step in ("certify.patch", "certify.l2"):
        certificate = step_folder(finished_flow, step)
        assert f"casemate verify {certificate.name}" in page
        assert read(certificate / "certificate.json")["votes_sha256"] in page


def test_the_registered_smoothed_classifier_answers_with_a_radius(client, finished_flow):
    """Label, abstention, radius and samples; the same for a given seed, none without time."""
    version = client.get_model_version_by_alias("tiny-l2-smoothed", "candidate")
    model = mlflow.pyfunc.load_model(version.source)
    items = PreparedDataset.open(step_folder(finished_flow, "prepare")).load("test", limit=2)
    images, asked = items.pixels().numpy(), {"seed": 3, "num_estimate": 100}
    rows = model.predict(images, params=asked)
    assert list(rows.columns) == ["label", "abstain", "radius", "samples"]
    assert rows["samples"].tolist() == [120, 120]
    assert (rows["abstain"] == (rows["label"] == -1)).all()
    assert (rows["abstain"] == (rows["radius"] == 0)).all()
    assert rows.equals(model.predict(images, params=asked))
    hurried = model.predict(images[:1], params={"seconds_per_image": 1e-9})
    assert hurried["abstain"].tolist() == [True]
    with pytest.raises(mlflow.exceptions.MlflowException, match="enforce schema"):
        model.predict(images[:, :, :4], params=asked)


@pytest.mark.parametrize("name", ["main", "columns"])
def test_a_registered_version_is_described_by_its_model_card(client, finished_flow, name):
    described = client.get_model_version_by_alias(f"tiny-{name}", "candidate").description
    folder = step_folder(finished_flow, "report") / "cards"
    card = (folder / f"{name}.md").read_text(encoding="utf-8")
    kept = described.removesuffix(f"\n{SHORTENED}\n")
    assert len(described) <= 5000
    assert card.startswith(kept)
    assert kept.startswith(f"# {name}\n")
    assert "## Headline" in kept
    assert not (folder / "cleaner.md").exists()  # a denoiser classifies nothing


def test_cards_of_the_flow_by_the_command_line(finished_flow, runs, tmp_path):
    both = call("card", finished_flow / "tiny", "--json")
    assert both.code == 0, both.err
    cards = {card["model"]: card for card in both.json}
    assert set(cards) == {"main", "columns"}
    sources = {name: {f["result"] for f in c["figures"]} - {None} for name, c in cards.items()}
    l2 = {"certify.l2", "certify.early", "certify.denoised"}
    own = {"certify.patch", "evaluate.clean"}
    assert sources == {"main": {"attack.linf", *l2}, "columns": own}
    for card in cards.values():
        assert all(check["holds"] for check in card["checks"])
        for figure in card["figures"]:
            assert (figure["badge"] == "proven") == figure["title"].startswith("Certified ")
    uri = f"sqlite:///{finished_flow}/mlflow.db"
    run = runs[1]["train.main"].info.run_id
    for place in ("models:/tiny-main@candidate", "models:/tiny-l2-smoothed/1", f"mlflow:{run}"):
        (card,) = call("card", place, "--tracking", uri, "--json").json
        assert (card["digest"], card["figures"]) == (
            *(cards["main"]["digest"], cards["main"]["figures"]),
        )
    page = tmp_path / "card.html"
    assert call("card", finished_flow / "tiny", "--model", "main", "--out", page).code == 0
    if find_chromium() is None:
        pytest.skip("no chromium on this machine")
    for width in (1280, 390):
        seen = visit(page, width=width, height=900)
        assert (seen.errors, seen.requests) == ((), ())
        assert seen.scroll_width <= seen.inner_width
        assert seen.smallest_chart_text >= 10
