"""Votes that a forger made consistent: only voting again with model and data finds them out."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from components.certify.certificate import write_certificate
from components.certify.votes import read_votes, write_votes
from pipelines.runtime.artifacts import StageDir
from tests.e2e.cli import call, step_folder

pytestmark = pytest.mark.e2e


@pytest.fixture
def forged(finished_flow, tmp_path):
    """Rewrites rows of a copied votes file and derives a certificate that fits them."""

    def forge(change):
        source = step_folder(finished_flow, "certify.patch")
        folder = shutil.copytree(source, tmp_path / "forged")
        (folder / "manifest.json").unlink()  # it lists digests: a forger would not leave it
        votes = read_votes(folder / "votes.parquet")
        claims = {
            r["item_id"]: r for r in pq.read_table(folder / "certificates.parquet").to_pylist()
        }
        rows = [
            replace(row, **new)
            for row in votes.rows()
            if (new := change(claims[row.item_id])) is not None
        ]
        header = votes.header.to_dict() | {"num_items": len(rows)}
        again = write_votes(folder / "votes.parquet", rows, header)
        write_certificate(folder, again, {"patch_sizes": [1, 2], "rule": "count"})
        assert call("verify", folder).code == 0  # consistent in itself
        return folder

    return forge


def vote_again(finished_flow, folder, *, count=24):
    model = step_folder(finished_flow, "train.columns") / "model"
    data = step_folder(finished_flow, "prepare")
    return call("verify", folder, "--resample", count, "--model", model, "--data", data)


def claims_of(finished_flow):
    folder = step_folder(finished_flow, "certify.patch")
    return pq.read_table(folder / "certificates.parquet").to_pylist()


def test_labels_bent_to_the_predictions_are_found(finished_flow, forged):
    wrong = [row for row in claims_of(finished_flow) if row["prediction"] != row["label"]]
    folder = forged(lambda claim: {"label": claim["prediction"]})
    said = vote_again(finished_flow, folder, count=1)
    assert said.code == 1
    assert said.out.count("dataset says") == min(len(wrong), 20) > 1  # one is drawn, all are asked


def test_items_left_out_are_found(finished_flow, forged):
    folder = forged(lambda claim: {} if claim["correct"] else None)
    said = vote_again(finished_flow, folder)
    assert said.code == 1
    assert "is missing from the votes" in said.out


def test_a_file_that_the_manifest_does_not_list_so_is_found(finished_flow, tmp_path):
    folder = shutil.copytree(step_folder(finished_flow, "certify.l2"), tmp_path / "edited")
    page = folder / "challenge.json"
    page.write_text(page.read_text().replace("SmoothAdv", "smoothadv"))
    said = call("verify", folder)
    assert said.code == 1
    assert "challenge.json" in said.out


def test_a_replaced_model_makes_its_certificates_unfinished(finished_flow, tmp_path):
    """Same recipe, other weights: what was made from the old ones is made again."""
    from pipelines.flow import plan
    from pipelines.flow import run as flow
    from pipelines.recipe import load as recipe

    storage = shutil.copytree(finished_flow, tmp_path / "storage")
    loaded = recipe.load(str(finished_flow.parent / "tiny.yaml"))
    steps = plan.plan(loaded, storage)
    assert flow._missing(steps, set()) == ([], set())
    (step,) = [step for step in steps if step.name == "train.main"]
    before = step.place.open()
    step.place.renew("test")
    step.place.work.mkdir(parents=True)
    run, inputs = SimpleNamespace(run_id="r"), {"prepare": steps[0].contents()}
    out = StageDir(step.place.work, step.name, step.fingerprint, run, inputs, step.place)
    for name in before.files:
        out.write_bytes(name, (before / name).read_bytes() + b"\n" * (name == "metrics.json"))
    out.finish()
    todo, again = flow._missing(steps, set())
    made_from_it = {f"certify.{name}" for name in ("l2", "early", "denoised")}
    assert {step.name for step in todo} == {"attack.linf", *made_from_it, "report"} == again
