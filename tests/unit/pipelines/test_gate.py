"""`casemate gate`: minima against results that the real writers wrote; nothing is rounded up."""

import json
import math
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from components.certify.votes import write_votes
from pipelines import api
from pipelines.runtime.storage import Storage
from tests.e2e.cli import call, mistake_of
from tests.finished_results import attack_step, certify_step, evaluate_step
from tests.refusals import refusal_of
from tests.small_certificates import (
    COLUMNS_CLAIM,
    GAUSSIAN_CLAIM,
    columns_votes,
    gaussian_votes,
    write_small_certificate,
)
from tests.stored_steps import PRINT, finish, force, place_of, stage_of

MIN = "--min"


def make_flow(storage: Storage, made: Path) -> None:
    """A flow `demo` with an attack on two models, two certificates and an evaluation."""
    made.mkdir()
    attack_step(place_of(storage, "demo", "attack.linf"), {"main": (8, 6), "plain": (9, 1)})
    at = place_of(storage, "demo", "certify.l2")
    certify_step(at, made / "l2", gaussian_votes(), GAUSSIAN_CLAIM)
    at = place_of(storage, "demo", "certify.patch")
    certify_step(at, made / "patch", columns_votes(), COLUMNS_CLAIM | {"second_rule": "loc"})
    at = place_of(storage, "demo", "evaluate.corruptions")
    evaluate_step(at, made / "m.parquet", "corruptions", {"main": 59_999}, 100_000)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of the flow, which tests read."""
    root = tmp_path_factory.mktemp("gate")
    make_flow(Storage.at(root / "runs"), root / "made")
    return root / "runs" / "demo"


def step(flow: Path, name: str) -> Path:
    return flow / f"{name}-{PRINT[:12]}"


def certified(flow: Path, name: str, index: int = 0) -> float:
    summary = json.loads((step(flow, name) / "certificate.json").read_text())["summary"]
    return summary["certified"][index]["accuracy"]["value"]


def failure_of(*arguments: object) -> str:
    """The one line of a gate that fails."""
    said = call("gate", *arguments)
    assert said.code == 1, said.out + said.err
    (line,) = said.out.splitlines()
    return line.removeprefix("FAILED: ")


def opens(*arguments: object) -> bool:
    said = call("gate", *arguments)
    assert said.code in (0, 1), said.err
    return said.code == 0


def rewrite(path: Path, content: bytes) -> None:
    """A changed file; the file of the storage, which it is a link to, stays."""
    path.unlink()
    path.write_bytes(content)


# -- names and values


def test_the_list_shows_what_can_be_gated_and_every_name_works(finished):
    said = call("gate", finished)
    names = [line.split()[0] for line in said.out.splitlines()]
    assert names == [
        *("main/clean", "main/robust.linf@8/255", "plain/clean", "plain/robust.linf@8/255"),
        *("smoothed.l2", "certified.l2@0.25", "certified.l2@0.5"),
        *("smoothed.patch", "certified.patch@1", "certified.patch.loc@1"),
        *("certified.patch@2", "certified.patch.loc@2", "corruptions.mean95"),
    ]
    assert "main/robust.linf@8/255   0.6 (6 of 10 items)\n" in said.out
    table = api.figures(finished)
    assert table["name"].tolist() == names
    for record in call("gate", finished, "--json").json:
        count = round(record["value"] * record["num_items"])
        exactly = f"{record['name']}={count}/{record['num_items']}"
        assert opens(finished, MIN, exactly), exactly
        above = f"{record['name']}={math.nextafter(record['value'], 1)!r}"
        assert record["value"] == 1 or not opens(finished, MIN, above), above


def test_values_are_compared_without_rounding(finished):
    name = "main/robust.linf@8/255"
    assert opens(finished, MIN, f"{name}=0.6")
    assert opens(finished, MIN, f"{name}=3/5")
    assert opens(finished, MIN, f"{name}=0.599999999999999999")
    line = failure_of(finished, MIN, f"{name}=0.600000000000000001")
    assert line.startswith(f"{name}: 0.6 (6 of 10 items) is below 0.600000000000000001: ")
    line = failure_of(finished, MIN, "corruptions.mean95=0.6")
    place = step(finished, "evaluate.corruptions")
    assert line == f"corruptions.mean95: 0.59999 (59999 of 100000 items) is below 0.6: {place}"
    gate = api.gate(finished, {name: np.float64(0.6), "corruptions.mean95": "0.59999"})
    assert gate.passed
    assert gate.table["passed"].tolist() == [True, True]


@pytest.mark.parametrize("eps", ["8/255", "16/510", "0.03137254901960784"])
def test_budgets_are_numbers(finished, eps):
    assert opens(finished, MIN, f"main/robust.linf@{eps}=0.5", MIN, "certified.l2@0.50=0")


def test_a_budget_that_was_not_measured_or_claimed_is_refused(finished):
    for name in ("robust.linf@0.0314", "certified.l2@0.3", "certified.patch@3", "robust.linf"):
        line = mistake_of("gate", finished, MIN, f"{name}=0.1")
        assert line.startswith(f"--min: {name} is not a figure of {finished}; it has: main/clean")
        assert "certified.patch.loc@2" in line


def test_an_ambiguous_name_lists_the_exact_ones(finished, flow):
    line = mistake_of("gate", finished, MIN, "clean=0.5")
    assert line == "--min: clean stands for 2 figures; write one of: main/clean, plain/clean"
    assert opens(finished, MIN, "attack.linf/main/clean=0.8")
    assert opens(finished, MIN, f"demo/attack.linf-{PRINT[:12]}/main/clean=0.8")
    other = flow.parent / "demo2"
    shutil.copytree(flow, other)
    line = mistake_of("gate", flow.parent, MIN, "certified.l2@0.5=0")
    names = [f"{f}/certify.l2/certified.l2@0.5" for f in ("demo", "demo2")]
    assert line.endswith(f"write one of: {', '.join(names)}")
    for name in names:
        assert opens(flow.parent, MIN, f"{name}=0")


def test_one_model_measured_twice_with_one_outcome_is_not_ambiguous(flow, tmp_path):
    storage = Storage.at(flow.parent)
    place = place_of(storage, "demo", "evaluate.clean")
    evaluate_step(place, tmp_path / "m", "clean", {"main": 8}, 10)
    assert opens(flow, MIN, "main/clean=0.8")
    at = place_of(storage, "demo", "attack.again")
    attack_step(at, {"main": (7, 5)}, eps=0.1)
    assert "stands for 3 figures" in mistake_of("gate", flow, MIN, "main/clean=0.8")
    assert opens(flow, MIN, "robust.linf@0.1=0.5")


def test_the_lower_end_of_the_interval(finished):
    name = "main/robust.linf@8/255"
    low = api.figures(finished).set_index("name").loc[name, "low"]
    assert low == pytest.approx(0.3127, abs=1e-3)  # Wilson's of 6 of 10
    assert opens(finished, "--lower-bound", MIN, f"{name}=0.31")
    assert "0.312673 is below 0.32" in failure_of(finished, "--lower-bound", MIN, f"{name}=0.32")


# -- places


def test_a_storage_a_flow_a_step_and_a_certificate(finished, tmp_path):
    bare = shutil.copytree(step(finished, "certify.l2"), tmp_path / "copied")
    for name in ("files", "generations"):
        shutil.rmtree(bare / name, ignore_errors=True)
    (bare / "000000.manifest.json").unlink()
    own = write_small_certificate(tmp_path / "own", gaussian_votes(), GAUSSIAN_CLAIM)
    inside = step(finished, "certify.l2")
    for path in (finished.parent, finished, inside, inside / "certificate.json", bare, own):
        assert opens(path, MIN, "certified.l2@0.25=0.1"), path
        assert not opens(path, MIN, "certified.l2@0.25=1"), path


def test_a_bucket_its_flow_and_its_steps(s3_root, tmp_path):
    storage = Storage.at(s3_root)
    make_flow(storage, tmp_path / "made")
    at = place_of(storage, "demo", "certify.l2")
    for uri in (storage.root, f"{storage.root}/demo", f"{storage.root}/demo/", at):
        assert opens(uri, MIN, "certified.l2@0.25=0.1"), uri
    attack = str(place_of(storage, "demo", "attack.linf"))
    assert attack in failure_of(f"{storage.root}/demo", MIN, "main/robust.linf@8/255=0.7")
    force(at)
    assert "holds no finished" in mistake_of("gate", at, MIN, "certified.l2@0.25=0.1")
    line = mistake_of("gate", f"{storage.root}/demo", MIN, "certified.l2@0.25=0.1")
    assert "certified.l2@0.25 is not a figure" in line


def test_unfinished_steps_do_not_count(flow, tmp_path):
    place = place_of(Storage.at(flow.parent), "demo", "certify.l2")
    force(place)
    for path in (flow, flow.parent):
        assert "is not a figure" in mistake_of("gate", path, MIN, "certified.l2@0.5=0")
    assert "is not a finished step" in mistake_of("gate", place.path, MIN, "certified.l2@0.5=0")
    begun = stage_of(place_of(Storage.at(tmp_path / "new"), "demo", "certify.l2"))
    write_small_certificate(tmp_path / "made", gaussian_votes(), GAUSSIAN_CLAIM)
    for path in (tmp_path / "made").iterdir():
        begun.write_bytes(path.name, path.read_bytes())
    assert begun.scratch.is_dir()
    assert "is not a finished step" in refusal_of(api.gate, begun.path, {"certified.l2@0.5": 0})


# -- results that do not count


def test_a_changed_certificate_fails(flow):
    folder = step(flow, "certify.l2")
    document = json.loads((folder / "certificate.json").read_text())
    document["summary"]["certified"][1]["accuracy"]["value"] = 1.0
    rewrite(folder / "certificate.json", json.dumps(document).encode())
    line = failure_of(flow, MIN, "certified.l2@0.5=0.9")
    told = "does not verify: certificate.json: is not the file of the step (and 2 more)"
    assert f"certified.l2@0.5: {told}" in line  # without the number that it claims
    for path in folder.glob("*manifest.json"):
        path.unlink()
    shutil.rmtree(folder / "files")
    line = failure_of(folder, MIN, "certified.l2@0.5=0.9")
    assert "summary.certified[1].accuracy.value is 1.0, should be " in line
    assert opens(flow, MIN, "certified.patch@1=0")  # others count


def test_a_certificate_that_cannot_be_read_hides_its_own_figures_alone(flow):
    file = step(flow, "certify.l2") / "certificate.json"
    rewrite(file, file.read_bytes()[:300])
    assert opens(flow, MIN, "main/clean=0")
    for place in ("certify.patch", "demo/certify.patch"):
        assert opens(flow, MIN, f"{place}/certified.patch@1=0")
    for name in ("certified.patch@1", "demo/certified.patch@1"):  # it may have had that, too
        line = mistake_of("gate", flow, MIN, f"{name}=0")
        assert "may also stand for a figure of" in line
    line = mistake_of("gate", flow, MIN, "certified.l2@0.5=0")
    assert "is not a figure of" in line
    assert "certificate.json is truncated or damaged: " in line
    assert "truncated or damaged" in mistake_of("gate", step(flow, "certify.l2"), MIN, "clean=0")


def test_votes_that_cannot_be_read_fail(flow):
    rewrite(step(flow, "certify.l2") / "votes.parquet", b"PAR1")
    assert "votes.parquet" in failure_of(flow, MIN, "certified.l2@0.5=0")


def test_claims_are_recomputed_though_every_digest_fits(tmp_path):
    header, rows = gaussian_votes()
    made = write_small_certificate(tmp_path / "made", (header, rows), GAUSSIAN_CLAIM)
    for row in rows:
        row.predictions[:] = (row.label + 1) % 3
    write_votes(made / "votes.parquet", rows, header)
    place = place_of(Storage.at(tmp_path / "runs"), "demo", "certify.l2")
    finish(place, {path.name: path.read_bytes() for path in made.iterdir()})
    line = failure_of(place.path, MIN, "certified.l2@0.25=0.1")
    assert "does not verify: " in line
    assert "certificate.json: summary." in line


@pytest.mark.parametrize("changed", ["value", "low", "num_items"])
@pytest.mark.parametrize("resealed", [False, True])
def test_a_changed_attack_fails(flow, resealed, changed):
    folder = step(flow, "attack.linf")
    summary = json.loads((folder / "summary.json").read_text())
    forged = {"value": 0.9, "low": 0.9, "num_items": 20}[changed]
    summary["models"]["main"]["robust_accuracy"][changed] = forged
    content = json.dumps(summary).encode()
    told = "summary.json: is not the file of the step"
    if resealed:  # as a new step with another summary
        rows = (folder / "attacks.parquet").read_bytes()
        shutil.rmtree(folder)
        place = place_of(Storage.at(flow.parent), "demo", "attack.linf")
        finish(place, {"summary.json": content, "attacks.parquet": rows})
        told = "summary.json: robust_accuracy of main is not that of attacks.parquet"
    else:
        rewrite(folder / "summary.json", content)
    line = failure_of(flow, MIN, "main/robust.linf@8/255=0.1")
    assert f"does not verify: {told}" in line


def test_a_changed_evaluation_fails_even_without_the_copy_of_the_manifest(flow, tmp_path):
    folder = step(flow, "evaluate.corruptions")
    (folder / "manifest.json").unlink()
    other = place_of(Storage.at(tmp_path / "other"), "demo", "evaluate.corruptions")
    evaluate_step(other, tmp_path / "m", "corruptions", {"main": 70}, 100)
    rewrite(folder / "metrics.parquet", (other.path / "metrics.parquet").read_bytes())
    line = failure_of(flow, MIN, "corruptions.mean95=0.6")
    assert "corruptions.mean95: does not verify: metrics.parquet" in line


def test_what_is_not_sound_never_satisfies_certified(tmp_path):
    place = place_of(Storage.at(tmp_path / "runs"), "demo", "certify.patch")
    claim = COLUMNS_CLAIM | {"delta_rule": "paper_reference"}
    certify_step(place, tmp_path / "made", columns_votes(), claim)
    assert "does not count: its certificate is not sound" in call("gate", place.path).out
    line = failure_of(place.path, "--allow-suspect", MIN, "certified.patch@1=0")
    assert "its certificate is not sound" in line


def test_a_suspect_attack_counts_only_on_request(tmp_path):
    place = place_of(Storage.at(tmp_path), "demo", "attack.linf")
    attack_step(place, {"main": (8, 6)}, suspect="half of the gradients are zero")
    line = failure_of(place.path, MIN, "robust.linf@8/255=0.5")
    assert "the attack is suspect: half of the gradients are zero" in line
    assert opens(place.path, MIN, "robust.linf@8/255=0.5", "--allow-suspect")
    assert opens(place.path, MIN, "clean=0.8")


def test_with_a_key_certificates_must_be_signed(flow, tmp_path):
    key = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
    secret = (ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption())
    (tmp_path / "k").write_bytes(key.private_bytes(*secret))
    public = key.public_key().public_bytes(ser.Encoding.OpenSSH, ser.PublicFormat.OpenSSH)
    (tmp_path / "k.pub").write_bytes(public)
    command = (flow, MIN, "certified.l2@0.25=0.1", "--key", tmp_path / "k.pub")
    assert "is missing or unreadable; casemate sign writes it" in failure_of(*command)
    absent = call("gate", flow, MIN, "certified.l2@0.25=0.1", "--key", tmp_path / "none")
    assert (absent.code, absent.err.count("\n")) == (2, 1)
    assert "cannot be read" in absent.err
    api.sign(step(flow, "certify.l2"), tmp_path / "k")
    assert opens(*command)


# -- outputs and bad input


def test_the_command_says_what_failed_and_what_did_not(finished):
    value = certified(finished, "certify.l2", 1)
    wanted = (MIN, "certified.l2@0.5=0", MIN, "plain/robust.linf@8/255=0.4")
    said = call("gate", finished, *wanted)
    first, second = said.out.splitlines()
    assert said.code == 1
    assert first.startswith("ok: certified.l2@0.5: ")
    place = step(finished, "attack.linf")
    assert second == (f"FAILED: plain/robust.linf@8/255: 0.1 (1 of 10 items) is below 0.4: {place}")
    said = call("gate", finished, *wanted, "--json")
    assert (said.code, said.json["passed"]) == (1, False)
    assert [row["value"] for row in said.json["minima"]] == [value, 0.1]
    assert [row["passed"] for row in said.json["minima"]] == [True, False]


def test_junit_is_valid_whatever_the_names_are(tmp_path):
    odd = "<m&\"'\x1b\x00\ufffe]]>"
    place = place_of(Storage.at(tmp_path / "runs"), "demo", "attack.linf")
    attack_step(place, {odd: (8, 6), "main": (9, 9)}, suspect="")
    out = tmp_path / "gate.xml"
    command = (MIN, f"{odd}/robust.linf@8/255=0.9", MIN, "main/clean=0.9")
    assert call("gate", place.path, *command, "--junit", out).code == 1
    suite = ElementTree.parse(out).getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    bad, good = suite.findall("testcase")
    assert bad.get("name") == "<m&\"'???]]>/robust.linf@8/255 >= 0.9"
    assert bad.get("classname") == "casemate.attack.linf"
    assert "0.6 (6 of 10 items) is below 0.9" in bad.find("failure").get("message")
    assert good.find("failure") is None
    assert "0.9 (9 of 10 items) >= 0.9" in good.find("system-out").text


@pytest.mark.parametrize(
    ("minimum", "told"),
    [
        ("certified.l2@0.5", "is not NAME=SHARE"),
        ("=0.5", "is not NAME=SHARE"),
        ("smoothed.l2=", "is not NAME=SHARE"),
        ("smoothed.l2=high", "is not a share"),
        ("smoothed.l2=nan", "is not a share"),
        ("smoothed.l2=1e9999999", "is not a share"),
        ("smoothed.l2=1/0", "is not a share"),
        ("smoothed.l2=60", "is outside [0, 1]; write 0.6 for 60 %"),
        ("smoothed.l2=-0.1", "is outside [0, 1]"),
        ("certified.l2@half=0.1", "is not a number or a fraction"),
        ("certified.l2@=0.1", "is not a number or a fraction"),
        ("acc=0.1", "is not a figure of"),
    ],
)
def test_a_malformed_minimum_is_one_line(finished, minimum, told):
    line = mistake_of("gate", finished, MIN, minimum)
    assert line.startswith("--min")
    assert told in line


def test_other_bad_input_is_one_line(finished, tmp_path):
    twice = (MIN, "smoothed.l2=0", MIN, "smoothed.l2=1")
    assert "names the same figure twice" in mistake_of("gate", finished, *twice)
    assert "holds no finished attack" in mistake_of("gate", tmp_path)
    assert "neither a folder" in mistake_of("gate", tmp_path / "nowhere", MIN, "clean=0")
    assert "--junit" in mistake_of(
        "gate", finished, MIN, "smoothed.l2=0", "--junit", tmp_path / "no" / "x.xml"
    )
    assert "only listed" in mistake_of("gate", finished, "--junit", tmp_path / "x.xml")
    assert "are missing" in refusal_of(api.gate, finished, {})
    assert "has a scheme that cannot be read" in mistake_of("gate", "ftp://host/runs", MIN, "a=0")
    (tmp_path / "certificate.json").write_text('{"kind": "gaussian"}')
    assert "cannot be read as a result" in mistake_of("gate", tmp_path, MIN, "clean=0")
