"""`casemate compare`: results that the real writers wrote, paired item by item, or refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from mlflow import MlflowClient
from scipy.stats import binomtest

from components.evaluate.metrics import read_metrics
from pipelines import api
from pipelines.runtime.storage import Storage
from pipelines.runtime.tracked_steps import steps_of_run
from tests.e2e.cli import call, mistake_of
from tests.finished_results import (
    NUM_ITEMS,
    attack_step,
    attacked_flow,
    certificate,
    certify_step,
    data_step,
)
from tests.refusals import refusal_of
from tests.small_certificates import (
    COLUMNS_CLAIM,
    GAUSSIAN_CLAIM,
    columns_votes,
    gaussian_votes,
)
from tests.stored_steps import PRINT, finish, place_of


@pytest.fixture(scope="module")
def storage(tmp_path_factory) -> Storage:
    """Flows `a` and `b`; `c` and others differ from `a` in one thing."""
    found = Storage.at(tmp_path_factory.mktemp("compare") / "runs")
    attacked_flow(found, "a", (36, 30), seed=1)
    attacked_flow(found, "b", (38, 12), seed=2)
    attacked_flow(found, "a<b>&c", (38, 30), seed=3, suspect="<i>gradients</i> vanish")
    return found


def record_of(found: api.Comparison, figure: str) -> dict:
    (row,) = [r for r in found.records()["comparisons"] if r["figure"] == figure]
    return row


# -- figures and tests


def test_differences_counts_and_exact_p_values(storage):
    root = storage.path
    found = api.compare({"A": root / "a", "B": root / "b"})
    robust = record_of(found, "robust.linf@8/255")
    assert (robust["won"], robust["lost"], robust["num_items"]) == (18, 0, NUM_ITEMS)
    assert robust["value"] == pytest.approx(18 / 40)
    assert robust["low"] < robust["value"] < robust["high"]
    assert robust["p_value"] == pytest.approx(binomtest(18, 18).pvalue)
    clean = record_of(found, "clean")
    assert (clean["won"], clean["lost"]) == (0, 2)
    assert clean["p_value"] == pytest.approx(binomtest(0, 2).pvalue)
    assert robust["adjusted"] == pytest.approx(2 * robust["p_value"])  # the smaller of two
    assert clean["adjusted"] == pytest.approx(clean["p_value"])
    assert (robust["outcome"], clean["outcome"]) == ("A", "tie")
    shares = found.shares.set_index(["figure", "model"])
    assert shares.loc[("robust.linf@8/255", "B"), "value"] == 12 / 40
    assert found.table["num_tests"].tolist() == [2, 2]
    assert found.refused.empty


def test_the_command_prints_the_same_as_the_api(storage):
    root = storage.path
    arguments = ("compare", f"A={root}/a", f"B={root}/b")
    said = call(*arguments)
    assert said.code == 0, said.err
    assert "robust.linf@8/255: A - B: +45.00 points [" in said.out
    assert "won 18, lost 0 of 40" in said.out
    assert "adjusted for 2 tests by the method of Holm" in said.out
    assert ": A is better" in said.out
    assert "(McNemar): tie" in said.out
    found = api.compare({"A": root / "a", "B": root / "b"}).records()
    assert call(*arguments, "--json").json == found


def test_three_models_are_compared_in_pairs_and_doubts_are_marked(storage):
    found = api.compare([storage.path / name for name in ("a", "b", "a<b>&c")])
    assert [m.label for m in found.models] == ["a", "b", "a<b>&c"]
    robust = [r for r in found.records()["comparisons"] if r["figure"].startswith("robust")]
    assert [(r["one"], r["other"]) for r in robust] == [
        *(("a", "b"), ("a", "a<b>&c"), ("b", "a<b>&c"))
    ]
    assert "a<b>&c: suspect: <i>gradients</i> vanish" in robust[1]["note"]
    assert robust[1]["p_value"] == 1  # equal verdicts


def test_one_flow_with_two_models_and_a_choice_of_models(storage, tmp_path):
    inputs = {"prepare": data_step(storage, "two")}
    place = place_of(storage, "two", "attack.linf")
    attack_step(place, {"main": (9, 2), "plain": (8, 1)}, inputs=inputs)
    found = api.compare([storage.path / "two"])
    assert {m.label for m in found.models} == {"two/main", "two/plain"}
    assert len(found.table) == 2
    line = mistake_of("compare", storage.path / "two", "--model", "main")
    assert line == "compare: two is one model; name results of at least two"
    line = mistake_of("compare", storage.path / "two", "--model", "main,other")
    assert line == "models: other is not a model of these results; they have main, plain"


# -- the page


def test_the_page_is_escaped_and_self_contained(storage, tmp_path):
    out, root = tmp_path / "page.html", storage.path
    said = call("compare", root / "a", root / "a<b>&c", "--out", out)
    assert said.code == 0, said.err
    page = out.read_text()
    assert "a&lt;b&gt;&amp;c" in page
    assert "<i>gradients</i>" not in page
    assert "&lt;i&gt;gradients&lt;/i&gt; vanish" in page
    assert "http://" not in page.replace("http://www.w3.org/", "")
    assert "https://" not in page
    again = tmp_path / "again.html"
    call("compare", root / "a", root / "a<b>&c", "--out", again)
    assert again.read_bytes() == out.read_bytes()


def test_certified_curves_are_on_one_chart(tmp_path):
    a = certificate(tmp_path / "a")
    header, rows = gaussian_votes()
    for row in rows[:6]:
        row.predictions[:] = (row.label + 1) % 3
    b = certificate(tmp_path / "b", (header, rows), model_digest="c" * 64)
    out = tmp_path / "page.html"
    found = api.compare([a, b], out=out)
    assert found.table["figure"].tolist() == [
        "smoothed.l2",
        "certified.l2@0.25",
        "certified.l2@0.5",
    ]
    assert set(found.table["kind"]) == {"measured", "proven"}
    page = out.read_text()
    assert "certified.l2: certified accuracy" in page
    assert page.count("<svg") == 2
    patches = [certificate(tmp_path / n, columns_votes(), COLUMNS_CLAIM, band=w)
               for n, w in (("p", 1), ("q", 2))]  # fmt: skip
    found = api.compare(patches, out=out)
    assert "side of the square patch" in out.read_text()
    assert "bands of 2 columns" in record_of(found, "certified.patch@1")["defences"]


def test_a_page_needs_a_name_and_a_folder(storage, tmp_path):
    arguments = ("compare", storage.path / "a", storage.path / "b", "--out")
    assert "does not end in .html" in mistake_of(*arguments, tmp_path / "x.svg")
    assert "is not a folder" in mistake_of(*arguments, tmp_path / "no" / "x.html")


# -- refusals


def refused(*places) -> str:
    """The one line that says why nothing compares."""
    return mistake_of("compare", *places)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"item": "j{}"}, "other items: a has 40, b 40; 80 are in one only, e.g. i0"),
        ({"num_items": 39}, "other items: a has 40, b 39; 1 are in one only, e.g. i39"),
        ({"label": 1}, "other labels: of i0: a 0, b 1"),
        ({"data": {"digest": "e" * 64}}, "other dataset: digests a dddddddddddd, b eeeeeeeeeeee"),
        (
            {"data": {"channels": 3, "digest": "e" * 64}},
            "other preprocessing, image size: a 1x8x8, b 3x8x8",
        ),
        (
            {"data": {"source": {"fit": "crop"}, "digest": "e" * 64}},
            "other preprocessing, fit: a pad, b crop",
        ),
    ],
)
def test_other_items_labels_data_or_preprocessing(tmp_path, changes, why):
    storage = Storage.at(tmp_path / "runs")
    a = attacked_flow(storage, "a", (36, 30))
    b = attacked_flow(storage, "b", (30, 20), seed=1, **changes)
    line = refused(a, b)
    assert line.startswith("compare: a and b cannot be compared: clean, robust.linf@8/255: ")
    assert why in line


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"eps": "4/255"}, "robust.linf: a and b: other budget: a 8/255; b 4/255"),
        (
            {"attacks": [{"kind": "fgsm", "random_start": False}]},
            "robust.linf@8/255: a and b: other attacks 1 random start: a True, b False",
        ),
        (
            {"attacks": [{"kind": "fgsm"}, {"kind": "square"}]},
            "robust.linf@8/255: a and b: other attacks: a fgsm, b fgsm, square",
        ),
    ],
)
def test_another_budget_or_attack_list_leaves_clean_accuracy(tmp_path, changes, why):
    storage = Storage.at(tmp_path / "runs")
    a = attacked_flow(storage, "a", (36, 30))
    b = attacked_flow(storage, "b", (30, 20), seed=1, **changes)
    said = call("compare", a, b)
    assert said.code == 0, said.err
    assert f"not comparable: {why}\n" in said.out
    assert [r["figure"] for r in api.compare([a, b]).records()["comparisons"]] == ["clean"]


def test_a_dataset_that_is_not_known(tmp_path):
    storage = Storage.at(tmp_path / "runs")
    a = attacked_flow(storage, "a", (36, 30), inputs={})
    b = attacked_flow(storage, "b", (36, 30), seed=1)
    assert "the dataset of a is unknown" in refused(a, b)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"claim": GAUSSIAN_CLAIM | {"failure_prob": 0.01}}, "other failure prob: a 0.001, b 0.01"),
        ({"image": {"channels": 1, "height": 9, "width": 8}}, "image size: a 1x8x8, b 1x9x8"),
    ],
)
def test_another_failure_probability_or_size(tmp_path, changes, why):
    a = certificate(tmp_path / "a")
    b = certificate(tmp_path / "b", **changes)
    assert why in refused(a, b)


def test_other_draws(tmp_path):
    header, rows = gaussian_votes()
    fewer = [row for row in rows if row.stream == "select" or row.start < 40]
    a = certificate(tmp_path / "a")
    b = certificate(tmp_path / "b", (header, fewer), num_estimate=40)
    assert "other draws num estimate: a 100, b 40" in refused(a, b)


def test_radii_that_one_does_not_claim(tmp_path):
    a = certificate(tmp_path / "a", claim=GAUSSIAN_CLAIM | {"radii": [0.25]})
    b = certificate(tmp_path / "b", model_digest="c" * 64)
    said = call("compare", a, b)
    assert "not comparable: certified.l2@0.5: a and b: a has no result of this budget" in said.out


def test_other_pixels_under_the_same_names(tmp_path):
    header, rows = gaussian_votes()
    changed = [replace(row, image_sha256="f" * 64) for row in rows]
    a, b = certificate(tmp_path / "a"), certificate(tmp_path / "b", (header, changed))
    assert "other images: item-0 has other pixels" in refused(a, b)


def test_equal_pixels_of_another_dataset_compare(tmp_path):
    a = certificate(tmp_path / "a")
    b = certificate(tmp_path / "b", dataset_digest="c" * 64)
    assert len(api.compare([a, b]).table) == 3


def test_an_unsound_rule_is_refused(tmp_path):
    a = certificate(tmp_path / "a", columns_votes(), COLUMNS_CLAIM)
    unsound = COLUMNS_CLAIM | {"delta_rule": "paper_reference"}
    b = certificate(tmp_path / "b", columns_votes(), unsound)
    said = call("compare", a, b)
    assert said.code == 0, said.err
    assert "not comparable: certified.patch@1" in said.out
    assert "b: not sound: " in said.out
    assert [r["figure"] for r in api.compare([a, b]).records()["comparisons"]] == ["smoothed.patch"]


def test_results_that_do_not_verify(storage, tmp_path):
    flow = shutil.copytree(storage.path / "b", tmp_path / "runs" / "b")
    attack = flow / f"attack.linf-{PRINT[:12]}"
    summary = json.loads((attack / "summary.json").read_text())
    summary["models"]["main"]["robust_accuracy"]["value"] = 1.0
    (attack / "summary.json").unlink()
    (attack / "summary.json").write_text(json.dumps(summary))
    line = refused(storage.path / "a", flow)
    assert "b: does not verify: summary.json: is not the file of the step" in line
    made = certificate(tmp_path / "x")
    other = certificate(tmp_path / "y", model_digest="c" * 64)
    (made / "votes.parquet").write_bytes(b"PAR1")
    line = refused(made, other)
    assert "x: does not verify: " in line
    assert "votes.parquet" in line


def test_a_certificate_that_cannot_be_read(storage, tmp_path):
    """It is refused beside what compares, and does not matter to other models."""
    root = Storage.at(shutil.copytree(storage.path, tmp_path / "runs"))
    main = f"train.main-{PRINT[:12]}"
    folders = {}
    for flow in ("b", "a<b>&c"):
        step, made = place_of(root, flow, "certify.l2"), tmp_path / f"made {flow}"
        certify_step(step, made, gaussian_votes(), GAUSSIAN_CLAIM)
        folders[flow] = step.path
        cut = (step.path / "certificate.json").read_text()[:500]
        (step.path / "certificate.json").unlink()
        (step.path / "certificate.json").write_text(cut)
    found = api.compare({"A": root.path / "a" / main, "B": root.path / "b"})
    assert record_of(found, "robust.linf@8/255")["won"] == 18
    (refused,) = found.records()["not_comparable"]
    assert refused["figures"] == ["certify.l2"]
    assert refused["why"].startswith("B: does not verify: ")
    alone = mistake_of("compare", folders["b"], folders["a<b>&c"])
    assert "does not verify" in alone


def test_one_result_that_does_not_compare_leaves_the_others(storage, tmp_path):
    at = place_of(storage, "mixed", "certify.l2")
    certify_step(at, tmp_path / "made", gaussian_votes(), GAUSSIAN_CLAIM)
    a = certificate(tmp_path / "a", model_digest="c" * 64)
    b = certificate(tmp_path / "b", claim=GAUSSIAN_CLAIM | {"failure_prob": 0.01})
    found = api.compare([storage.path / "mixed", a, b])
    assert set(found.table["one"]) == {"mixed"}
    assert set(found.table["other"]) == {"a"}
    assert {tuple(r) for r in found.refused[["one", "other"]].to_numpy()} == {
        *(("mixed", "b"), ("a", "b"))
    }


# -- places


def test_a_model_folder_stands_for_its_results(storage, tmp_path):
    step = storage.path / "a" / f"train.main-{PRINT[:12]}"
    by_model = api.compare({"A": step / "model", "B": storage.path / "b"})
    assert record_of(by_model, "robust.linf@8/255")["won"] == 18
    assert by_model.models[0].places == (str(storage.path / "a" / f"attack.linf-{PRINT[:12]}"),)
    assert len(api.compare({"A": step, "B": storage.path / "b"}).table) == 2
    alone = shutil.copytree(step / "model", tmp_path / "alone")
    found = api.compare({"A": alone, "B": storage.path / "b"}, storage=storage.path)
    assert len(found.table) == 2
    line = mistake_of("compare", alone, storage.path / "b", "--storage", storage.path / "b")
    assert "has no finished attack, evaluation or certificate in" in line


def test_a_model_without_a_storage(storage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step = storage.path / "a" / f"train.main-{PRINT[:12]}"
    alone = shutil.copytree(step / "model", tmp_path / "alone")
    line = mistake_of("compare", alone, storage.path / "b")
    assert "is a model without results; name their storage with --storage" in line


def test_bad_places(storage, tmp_path):
    a = storage.path / "a"
    assert mistake_of("compare") == "compare: needs runs, steps, models or certificates"
    assert "does not exist" in mistake_of("compare", a, tmp_path / "no")
    assert "is named twice" in mistake_of("compare", a, a)
    assert "is the label of two" in mistake_of("compare", f"x={a}", f"x={storage.path}/b")
    assert "is not a run of MLflow" in mistake_of("compare", a, "mlflow:12")
    assert "is one place; give a list" in refusal_of(api.compare, str(a))
    (tmp_path / "empty").mkdir()
    assert "holds no finished" in mistake_of("compare", a, tmp_path / "empty")


def test_runs_of_mlflow(storage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    artifacts = (storage.path / "mlartifacts").as_uri()
    experiment = client.create_experiment("casemate", artifact_location=artifacts)
    flow = client.create_run(
        experiment, tags={"casemate.flow": "f" * 64, "casemate.recipe": "a"}
    ).info.run_id
    folder = f"attack.linf-{PRINT[:12]}"
    tags = {"mlflow.parentRunId": flow, "casemate.folder": folder}
    step = client.create_run(experiment, tags=tags).info.run_id
    for run in (flow, step):
        (found,) = steps_of_run(run, uri)
        assert (found.flow, found.folder, found.storage) == ("a", folder, str(storage.path))
    b = storage.path / "b"
    line = mistake_of("compare", f"mlflow:{step}", b, "--tracking", uri)
    assert "which was run again since; name the folder" in line  # its run is mlflow-1
    line = mistake_of("compare", "0" * 32, b, "--tracking", uri)
    assert line.startswith(f"mlflow: {'0' * 32} is not a run of {uri}")
    assert "name its store with --tracking" in mistake_of("compare", step, b, "--storage", b)
    missing = f"sqlite:///{tmp_path}/no.db"
    assert "does not exist" in mistake_of("compare", step, b, "--tracking", missing)


def test_the_sign_of_a_difference_follows_the_order(storage):
    root = storage.path
    one = record_of(api.compare([root / "a", root / "b"]), "robust.linf@8/255")
    other = record_of(api.compare([root / "b", root / "a"]), "robust.linf@8/255")
    assert np.isclose(one["value"], -other["value"])
    assert (one["low"], one["high"]) == pytest.approx((-other["high"], -other["low"]))
    assert (one["won"], one["outcome"]) == (other["lost"], other["outcome"])


# -- evaluations


def test_suites_agree_with_the_tests_that_they_store(run_step, tmp_path):
    """The p-values and differences of metrics.parquet, which the stage computed by itself."""
    storage = Storage.at(tmp_path / "runs")
    names = {"names": ["brightness", "contrast"], "severities": [1, 5]}
    grid = {"grid": {"max_shift": 1, "num_shifts": 3, "num_angles": 3}}
    clean = run_step("evaluate", "clean", {}).path
    further = {"evaluate.clean": clean}
    corrupted = run_step("evaluate", "corruptions", {"corruptions": names}, further=further).path
    spatial = run_step("evaluate", "spatial", {"spatial": grid}).path
    expected = {}
    for folder, suite in ((clean, "clean"), (corrupted, "corruptions"), (spatial, "spatial")):
        files = {path.name: path.read_bytes() for path in folder.glob("*.*") if path.is_file()}
        finish(place_of(storage, "x", f"evaluate.{suite}"), files)
        for row in read_metrics(folder / "metrics.parquet"):
            if row.model == "main" and row.metric.partition("/")[0] in (
                "difference_to",
                "mcnemar_p",
            ):
                parts = [row.suite, *([] if row.item == "all" else [row.item])]
                parts += ["accuracy"] if suite == "spatial" else []
                at = "" if row.level is None else f"@{row.level:g}"
                expected[".".join(parts) + at, row.metric.partition("/")[0]] = row.value
    found = api.compare([storage.path / "x"]).table
    assert set(found["figure"]) == {figure for figure, _ in expected}
    assert len(found) == 6
    for row in found.to_dict("records"):
        assert row["one"] == "x/main"
        assert row["p_value"] == expected[row["figure"], "mcnemar_p"]
        assert row["value"] == expected[row["figure"], "difference_to"]
    parts = found[found["is_part"]]
    assert set(parts["num_tests"]) == {4}
    assert set(found[~found["is_part"]]["num_tests"]) == {2}
    said = call("compare", storage.path / "x")
    assert "4 tests of variants: " in said.out
