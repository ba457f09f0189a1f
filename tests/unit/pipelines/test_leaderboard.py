"""`casemate leaderboard`: stored results, verified and ranked; everything else is left out."""

import json
import shutil
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

import pytest
from mlflow import MlflowClient

from pipelines import api
from pipelines.runtime.run_writer import SUPERSEDED_TAG
from pipelines.runtime.step_locks import hold
from pipelines.runtime.storage import Storage
from tests.e2e.cli import call, mistake_of
from tests.finished_results import (
    NUM_ITEMS,
    attack_step,
    attacked_flow,
    certificate,
    certify_step,
    evaluate_step,
    model_step,
)
from tests.refusals import refusal_of
from tests.small_certificates import (
    COLUMNS_CLAIM,
    GAUSSIAN_CLAIM,
    columns_votes,
    gaussian_votes,
)
from tests.stored_steps import PRINT, begin, finish, force, place_of

MANY = 200
SUSPICION = "<i>gradients</i> vanish"


def step(flow: str, name: str = "attack.linf") -> str:
    return f"{flow}/{name}-{PRINT[:12]}"


def many(storage: Storage, flow: str, counts: tuple[int, int], seed: int, **changes) -> Path:
    """An attacked flow on a dataset with a name, large enough not to count as small."""
    named = {"source": {"name": "cifar10", "fit": "pad", "resize": None}}
    given = {"num_items": MANY, "data": named} | changes
    return attacked_flow(storage, flow, counts, seed=seed, **given)


@pytest.fixture(scope="module")
def storage(tmp_path_factory) -> Storage:
    """Three models under one attack, one of them tied; others differ in one thing each."""
    found = Storage.at(tmp_path_factory.mktemp("board") / "runs")
    many(found, "best", (180, 120), 1)
    many(found, "tied", (190, 118), 2)
    many(found, "worst", (170, 40), 3)
    many(found, "doubtful<b>", (195, 190), 4, suspect=SUSPICION)
    many(found, "half-eps", (180, 150), 5, eps="4/255", attacks=[{"kind": "autoattack"}])
    many(found, "few", (20, 10), 6, num_items=24)
    header, rows = gaussian_votes()
    certify_step(place_of(found, "l2", "certify.l2"), found.path.parent / "made-l2",
                 (header, rows), GAUSSIAN_CLAIM)  # fmt: skip
    return found


@pytest.fixture(scope="module")
def document(storage) -> dict:
    said = call("leaderboard", "--storage", storage.path, "--json")
    assert said.code == 0, said.err
    return said.json


def boards_with(document: Mapping, threat: str, **values: object) -> list[dict]:
    wanted = {"threat": threat, **values}
    return [b for b in document["boards"] if all(b[k] == v for k, v in wanted.items())]


def why_left_out(document: Mapping, short_place: str) -> list[str]:
    return [o["why"] for o in document["left_out"] if o["place"].endswith(short_place)]


# -- ranks, ties, verdicts


def test_results_are_ranked_with_ties_and_a_suspect_attack_has_no_rank(document):
    (board,) = boards_with(document, "robust.linf", budget="8/255", num_items=MANY)
    rows = [(e["label"], e["rank"], e["rank_at_best"], e["rank_at_worst"], e["ties"])
            for e in board["entries"]]  # fmt: skip
    assert rows == [
        ("best/main", 1, 1, 2, ["tied/main"]),
        ("tied/main", 2, 1, 2, ["best/main"]),
        ("worst/main", 3, 3, 3, []),
        ("doubtful<b>/main", None, None, None, []),
    ]
    suspect = board["entries"][-1]
    assert (suspect["verdict"], suspect["unreliable"]) == ("suspect", True)
    assert suspect["footnote"] == f"suspect: {SUSPICION}"
    assert {e["verdict"] for e in board["entries"][:3]} == {"unchecked"}
    assert not board["small"]
    assert document["left_out"] == []


def test_ties_are_those_of_compare(storage, document):
    (board,) = boards_with(document, "robust.linf", budget="8/255", num_items=MANY)
    root = storage.path
    compared = api.compare({f"{n}/main": root / n for n in ("best", "tied", "worst")}).records()
    robust = [c for c in compared["comparisons"] if c["figure"] == "robust.linf@8/255"]
    ties = {e["label"]: e["ties"] for e in board["entries"]}
    for found in robust:
        assert (found["other"] in ties[found["one"]]) == (found["outcome"] == "tie")


def test_other_budgets_protocols_and_items_are_on_boards_of_their_own(document):
    found = boards_with(document, "robust.linf")
    assert [(b["budget"], b["num_items"], b["small"], len(b["entries"])) for b in found] == [
        *(("4/255", MANY, False, 1), ("8/255", MANY, False, 4), ("8/255", 24, True, 1))
    ]
    (clean,) = boards_with(document, "clean", num_items=MANY)
    assert len(clean["entries"]) == 5  # accuracy without an attack has neither
    sizes = [b["small"] for b in document["boards"]]
    assert sizes == sorted(sizes)  # small boards come last


def test_certificates_are_ranked_at_each_radius_and_rounded_down(document):
    quarter, half = boards_with(document, "certified.l2")
    assert (quarter["budget"], half["budget"]) == ("0.25", "0.5")
    (entry,) = quarter["entries"]
    assert entry["accuracy"]["value"] == pytest.approx(1 / 6)
    assert entry["certified_acc"] == entry["reported"] == "16.66"  # never 16.67
    assert entry["clean_acc"] == "50.00"
    assert quarter["protocol"]["failure_prob"] == 0.001
    assert "sigma 0.5" in entry["defence"]


def test_fields_are_those_of_robustbench(document):
    """As in model_info/cifar10/Linf/*.json of RobustBench."""
    (board,) = boards_with(document, "robust.linf", budget="4/255")
    (entry,) = board["entries"]
    told = {"dataset": "cifar10", "eps": "4/255", "clean_acc": "90.00", "reported": "75.00"}
    told |= {"autoattack_acc": "75.00", "architecture": "tiny_vit", "name": "half-eps/main"}
    told |= {"number_forward_passes": 1, "unreliable": False}
    unknown = {"link": "", "authors": "", "venue": "", "additional_data": None}
    assert {name: entry[name] for name in told | unknown} == told | unknown
    (board,) = boards_with(document, "robust.linf", budget="8/255", num_items=MANY)
    assert {e["autoattack_acc"] for e in board["entries"]} == {""}  # one step is not AutoAttack


def test_the_terminal_shows_each_board(storage):
    said = call("leaderboard", "--storage", storage.path, "--allow-suspect")
    assert said.code == 0, said.err
    text = said.out.split("robust.linf@8/255")[1]
    assert text.splitlines()[1] == "  attacks: fgsm (num_steps = 1, random_start = True)"
    rows = [line.split() for line in text.splitlines()[3:7]]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("1", "1-1", "doubtful<b>/main"),  # counts, since suspect attacks were allowed
        ("2", "2-3", "best/main"),
        ("3", "2-3", "tied/main"),
        ("4", "4-4", "worst/main"),
    ]
    assert rows[0][3:5] == ["95.00", "%"]
    assert "suspect: " in text
    assert "24 items only, which hardly tell models apart" in said.out


def test_the_order_and_the_place_of_storages_change_no_file(storage, tmp_path):
    """Four flows in three storages, in any order, and moved elsewhere."""
    parts = [tmp_path / name for name in ("x", "y", "z")]
    for part, flows in zip(parts, (("best", "few"), ("tied",), ("doubtful<b>",)), strict=True):
        for flow in flows:
            shutil.copytree(storage.path / flow, part / flow)
    texts = set()
    for order in list(permutations(parts))[::2]:
        files = [tmp_path / "board.json", tmp_path / "board.html"]
        api.leaderboard(order, out=files)
        texts.add(tuple(file.read_text() for file in files))
    assert len(texts) == 1
    data, page = texts.pop()
    assert str(tmp_path) not in data + page
    assert "<i>gradients" not in page
    assert "&lt;i&gt;gradients&lt;/i&gt; vanish" in page
    assert "://" not in page


# -- one result of a model


def test_equal_results_of_a_model_are_one_entry(storage, tmp_path):
    again = shutil.copytree(storage.path / "best", tmp_path / "again" / "other-name")
    found = api.leaderboard([storage.path, again.parent]).records()
    (board,) = boards_with(found, "robust.linf", budget="8/255", num_items=MANY)
    assert len(board["entries"]) == 4
    assert board["entries"][0]["results"] == [step("best"), step("other-name")]


def test_the_strongest_of_equal_attacks_on_a_model_counts(tmp_path):
    storage = Storage.at(tmp_path / "runs")
    attacked_flow(storage, "a", (36, 20))
    inputs = {"prepare": storage.path / f"a/prepare-{PRINT[:12]}",
              "train.main": storage.path / f"a/train.main-{PRINT[:12]}"}  # fmt: skip
    for name, robust in (("weaker", 30), ("stronger", 10)):
        place = place_of(storage, "a", f"attack.{name}")
        attack_step(place, {"main": (36, robust)}, num_items=NUM_ITEMS, inputs=inputs)
    found = api.leaderboard(storage.path).records()
    (board,) = boards_with(found, "robust.linf")
    assert [e["reported"] for e in board["entries"]] == ["25.00"]
    for name in ("linf", "weaker"):
        (why,) = why_left_out(found, f"attack.{name}-{PRINT[:12]}")
        assert why.endswith(f"as strong or stronger in {step('a', 'attack.stronger')}")


def test_models_of_one_name_are_told_apart(storage, tmp_path):
    other = tmp_path / "elsewhere"
    many(Storage.at(other), "best", (150, 100), 7)
    found = api.leaderboard([storage.path / "best", other]).records()
    (board,) = boards_with(found, "robust.linf")
    labels = [e["label"] for e in board["entries"]]
    assert labels == [f"best/main {e['model_digest'][:12]}" for e in board["entries"]]
    assert len(set(labels)) == 2


# -- what is left out


def test_unfinished_running_refuted_and_damaged_steps(storage, tmp_path):
    root = Storage.at(shutil.copytree(storage.path, tmp_path / "runs"))
    begin(place_of(root, "new", "attack.linf"), {"summary.json": b"{}"})
    begin(place_of(root, "new", "certify.l2"), {"certificate.refuted.json": b"{}"})
    begin(place_of(root, "new", "train.main"), {"history.json": b"{}"})  # not a result
    force(place_of(root, "tied", "attack.linf"))
    damaged = place_of(root, "best", "attack.linf")
    (manifest,) = damaged.path.glob("0*.manifest.json")
    text = manifest.read_text().replace('"bytes": ', '"bytes": 1', 1)
    manifest.unlink()
    manifest.write_text(text)
    busy = place_of(root, "busy", "evaluate.clean")
    with hold(busy.store, [busy.key]):
        found = api.leaderboard(root.path).records()
    assert len(found["left_out"]) == 5
    unfinished = ["is not finished; run its recipe again"]
    assert why_left_out(found, step("new")) == unfinished
    assert why_left_out(found, step("tied")) == unfinished
    assert why_left_out(found, step("new", "certify.l2")) == [
        "refuted by its challenge: a certified item was broken"
    ]
    assert why_left_out(found, step("busy", "evaluate.clean")) == ["is running"]
    (why,) = why_left_out(found, step("best"))
    assert "is damaged (it does not match its own digest)" in why
    (board,) = boards_with(found, "robust.linf", budget="8/255", num_items=MANY)
    assert [e["label"] for e in board["entries"]] == ["worst/main", "doubtful<b>/main"]


def test_changed_files_and_unsound_rules(storage, tmp_path):
    root = Storage.at(shutil.copytree(storage.path, tmp_path / "runs"))
    spoil(root.path / step("worst") / "attacks.parquet")
    spoil(root.path / step("l2", "certify.l2") / "votes.parquet")
    unsound = COLUMNS_CLAIM | {"delta_rule": "paper_reference"}
    made = tmp_path / "unsound"
    certify_step(place_of(root, "u", "certify.p"), made, columns_votes(), unsound)
    out = tmp_path / "board.json"
    found = api.leaderboard(root.path, out=out).records()
    assert str(tmp_path) not in out.read_text()  # also not in reasons
    for name, file in ((step("worst"), "attacks"), (step("l2", "certify.l2"), "votes")):
        (why,) = why_left_out(found, name)
        assert why.startswith("does not verify: ")
        assert f"{file}.parquet" in why
    (why,) = why_left_out(found, step("u", "certify.p"))
    assert why.startswith("certified.patch@1, certified.patch@2: not sound: delta_rule")
    assert boards_with(found, "certified.patch") == boards_with(found, "certified.l2") == []
    (board,) = boards_with(found, "robust.linf", budget="8/255", num_items=MANY)
    assert "worst/main" not in [e["label"] for e in board["entries"]]


def spoil(path: Path) -> None:
    """Other bytes under the same name; the file may be a second name of a stored one."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-8] + b"12345678")


def test_a_summary_that_its_rows_do_not_give(storage, tmp_path):
    """Sealed by a manifest of its own: only the rows tell."""
    folder = storage.path / step("worst")
    summary = json.loads((folder / "summary.json").read_text())
    summary["models"]["main"]["robust_accuracy"]["value"] = 0.99
    files = {"attacks.parquet": (folder / "attacks.parquet").read_bytes(),
             "summary.json": json.dumps(summary).encode()}  # fmt: skip
    other = Storage.at(tmp_path / "runs")
    finish(place_of(other, "liar", "attack.linf"), files)
    line = mistake_of("leaderboard", "--storage", other.path)
    assert f"has no result that counts: {step('liar')}: does not verify: summary.json: " in line
    assert "robust_accuracy of main is not that of attacks.parquet" in line


def test_a_claim_that_does_not_follow_from_the_votes(tmp_path):
    made = certificate(tmp_path / "made")
    document = json.loads((made / "certificate.json").read_text())
    document["summary"]["certified"][0]["accuracy"]["value"] = 1.0
    (made / "certificate.json").write_text(json.dumps(document))
    line = mistake_of("leaderboard", "--storage", made)
    assert "has no result that counts: " in line
    assert "does not verify: " in line


def test_inputs_that_are_not_what_the_attack_has_read(tmp_path):
    storage = Storage.at(tmp_path / "runs")
    gone = attacked_flow(storage, "gone", (36, 30))
    shutil.rmtree(gone / f"prepare-{PRINT[:12]}")
    renamed = attacked_flow(storage, "renamed", (36, 30))
    path = renamed / f"prepare-{PRINT[:12]}" / "dataset.json"
    text = path.read_text().replace("d" * 64, "e" * 64)
    path.unlink()
    path.write_text(text)
    again = attacked_flow(storage, "again", (36, 30))
    shutil.rmtree(again / f"train.main-{PRINT[:12]}")
    shutil.rmtree(storage.path / "locks" / "again", ignore_errors=True)
    model_step(storage, "again", tmp_path / "other-model", seed=9)
    attacked_flow(storage, "good", (36, 30))
    found = api.leaderboard(storage.path).records()
    (why,) = why_left_out(found, step("gone"))
    assert why == "its dataset is unknown: the prepared data are not beside it"
    (why,) = why_left_out(found, step("renamed"))
    assert why == "does not verify: dataset.json of its input prepare was changed"
    assert why_left_out(found, step("again")) == ["its input train.main was made again since"]
    assert {e["label"] for b in found["boards"] for e in b["entries"]} == {"good/main"}


def test_results_without_verdicts_per_item(tmp_path):
    storage = Storage.at(tmp_path / "runs")
    place = place_of(storage, "a", "evaluate.clean")
    evaluate_step(place, tmp_path / "metrics.parquet", "clean", {"main": 30}, 40)
    line = mistake_of("leaderboard", "--storage", storage.path)
    assert line.endswith(f"counts: {step('a', 'evaluate.clean')}: has no verdicts per item")


# -- places


def test_single_results_flows_and_certificates(storage, tmp_path):
    made = certificate(tmp_path / "alone", model_digest="c" * 64)
    places = [storage.path / step("best"), storage.path / "tied", made]
    found = api.leaderboard(places)
    assert found.table["label"].drop_duplicates().tolist() == ["best/main", "tied/main", "alone"]
    begin(place_of(Storage.at(tmp_path / "runs"), "a", "attack.linf"), {"x": b""})
    line = mistake_of("leaderboard", "--storage", tmp_path / "runs")
    assert line.endswith(f"{step('a')}: is not finished; run its recipe again")


def test_bad_places_and_files(storage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = storage.path
    assert mistake_of("leaderboard") == "storage: runs does not exist; run a recipe first"
    assert "does not exist" in mistake_of("leaderboard", "--storage", tmp_path / "no")
    (tmp_path / "empty").mkdir()
    line = mistake_of("leaderboard", "--storage", tmp_path / "empty")
    assert line.endswith("empty holds no finished attack, evaluation or certificate")
    line = mistake_of("leaderboard", "--storage", root, "--tracking", "sqlite:///x.db")
    assert line == "leaderboard: sqlite:///x.db is given beside a storage; name one of both"
    line = mistake_of("leaderboard", "--tracking", "sqlite:////no/x.db")
    assert line.endswith("sqlite:////no/x.db does not exist")
    assert "ends in neither .html nor .json" in mistake_of("leaderboard", "--out", "x.csv")
    line = refusal_of(api.leaderboard, root, out=tmp_path / "no" / "x.html")
    assert "is not a folder" in line
    spoiled = shutil.copytree(root / "worst", tmp_path / "runs" / "worst")
    spoil(spoiled / f"attack.linf-{PRINT[:12]}" / "attacks.parquet")
    line = mistake_of("leaderboard", "--out", tmp_path / "x.html")
    assert "leaderboard: runs has no result that counts: worst/attack.linf" in line
    assert not (tmp_path / "x.html").exists()


def test_the_runs_of_a_tracking_store(storage, tmp_path, monkeypatch):
    """Runs in several experiments; those that no longer stand for a result are left out."""
    storage = Storage.at(shutil.copytree(storage.path, tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    artifacts = {name: (storage.path / "mlartifacts").as_uri() for name in ("one", "other")}
    artifacts["server"] = "mlflow-artifacts:/"
    experiments = {
        n: client.create_experiment(n, artifact_location=at) for n, at in artifacts.items()
    }

    def track(experiment: str, flow: str, folder: str, **tags: str) -> str:
        place = experiments[experiment]
        parent = client.create_run(place, tags={"casemate.flow": "f" * 64, "casemate.recipe": flow})
        own = {"mlflow.parentRunId": parent.info.run_id, "casemate.folder": folder, **tags}
        return client.create_run(place, tags=own).info.run_id

    attack = f"attack.linf-{PRINT[:12]}"
    ran_again = track("one", "best", attack)
    stale = track("other", "tied", attack)
    track("other", "worst", attack, **{SUPERSEDED_TAG: "yes"})
    track("one", "worst", f"train.main-{PRINT[:12]}")
    track("one", "missing", attack)
    track("server", "far", attack)
    line = mistake_of("leaderboard", "--tracking", uri)  # the stored run is mlflow-1
    assert f"{step('tied')}: run {stale} is not its run: it ran again since" in line
    current = track("other", "tracked", attack)
    many(storage, "tracked", (180, 90), 8, run_id=current)
    served = track("server", "served", attack, **{"casemate.storage": storage.root})
    many(storage, "served", (180, 90), 9, run_id=served)
    said = call("leaderboard", "--tracking", uri, "--json")
    assert said.code == 0, said.err
    assert {e["label"] for b in said.json["boards"] for e in b["entries"]} == {
        "served/main",
        "tracked/main",
    }
    (why,) = why_left_out(said.json, step("best"))
    assert why == f"run {ran_again} is not its run: it ran again since"
    (why,) = why_left_out(said.json, step("missing"))
    assert why.startswith("cannot be read (")
    (why,) = why_left_out(said.json, step("far"))
    assert why == "its run does not tell its storage; rank that with --storage alone"
    assert len(said.json["left_out"]) == 4


def test_a_bucket_and_one_flow_of_it(s3_root, storage, tmp_path):
    bucket = Storage.at(s3_root)
    for flow, wrong in (("one", 0), ("other", 6)):
        header, rows = gaussian_votes()
        for row in rows[:wrong]:
            row.predictions[:] = (row.label + 1) % 3
        made, digest = tmp_path / flow, f"{flow[-1] * 64}"
        votes = ({**header, "model_digest": digest}, rows)
        certify_step(place_of(bucket, flow, "certify.l2"), made, votes, GAUSSIAN_CLAIM)
    begin(place_of(bucket, "other", "certify.more"), {"x": b""})
    found = api.leaderboard(s3_root).records()
    quarter, _ = boards_with(found, "certified.l2")
    assert len(quarter["entries"]) == 2
    assert all(place.startswith("s3://") for e in quarter["entries"] for place in e["places"])
    (why,) = why_left_out(found, step("other", "certify.more"))
    assert why == "is not finished; run its recipe again"
    flow = api.leaderboard(f"{s3_root}/one").records()
    assert flow["left_out"] == []
    assert {e["results"][0] for b in flow["boards"] for e in b["entries"]} == {
        step("one", "certify.l2")
    }
