"""Patch certificates of every kind through the command line: one run, then verify and recertify."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient

from components.certify.patch import certificate as patch_certificate
from tests.e2e.cli import call, step_folder, tiny_recipe

pytestmark = pytest.mark.e2e

CHALLENGE = {"patch_size": 1, "num_items": 2, "num_steps": 1, "num_positions": 1}
COMMON = {"model": "columns", "patch_sizes": [1, 2], "num_items": 8, "challenge": CHALLENGE}
SECTIONS = {
    "rows": {"kind": "rows", "band": 4, **COMMON},
    "blocks": {"kind": "blocks", "band": 5, "stride": 3, "delta_rule": "paper_reference", **COMMON},
    "both": {"kind": "both", "band": 4, "stride": 2, "second_rule": "loc", **COMMON},
    "pairs": {"kind": "double_masking", "mask_patch": 2, "num_masks": 2, **COMMON},
    "early": {"kind": "columns", "band": 5, "stop_early": True, **COMMON},
    "swept": {
        "kind": "columns",
        "model": "columns",
        "patch_sizes": [1, 2],
        "num_items": 8,
        "sweep": {"band": [2, 5], "stride": [1, 2]},
    },
}
SWEPT = {f"swept-b{band}-s{stride}" for band in (2, 5) for stride in (1, 2)}
NAMES = sorted({*SECTIONS, *SWEPT} - {"swept"})


@pytest.fixture(scope="module")
def trained(finished_flow, tmp_path_factory):
    """A storage with the data and models of the finished flow."""
    storage = tmp_path_factory.mktemp("kinds")
    for step in ("prepare", "train.main", "train.columns"):
        source = step_folder(finished_flow, step)
        shutil.copytree(source, storage / "tiny" / source.name)
    return storage


@pytest.fixture(scope="module")
def flow(ray_session, trained, tmp_path_factory):
    """All kinds in one run, with their report."""
    folder = tmp_path_factory.mktemp("recipe")
    recipe = tiny_recipe(folder / "tiny.yaml", certify=SECTIONS, attack={})
    result = call("run", recipe, "--storage", trained, "--json")
    assert result.code == 0, result.err
    return result


@pytest.fixture(scope="module")
def folders(flow):
    return {name: Path(flow.json["steps"][f"certify.{name}"]) for name in NAMES}


def document_of(folder):
    return json.loads((folder / "certificate.json").read_text())


def test_every_entry_is_a_step_and_a_line_of_the_summary(flow):
    made = {name for name in flow.json["steps"] if name.startswith("certify.")}
    assert made == {f"certify.{name}" for name in NAMES}
    said = {row["what"] for row in flow.json["summary"]}
    assert {"certified patch 2px, swept-b2-s1", "certified patch 1px, pairs"} <= said
    assert "certified patch 1px, blocks (not sound)" in said
    assert not any("(not sound)" in line for line in said if "blocks" not in line)


@pytest.mark.parametrize("name", NAMES)
def test_every_certificate_verifies_and_its_votes_repeat(folders, name):
    result = call("verify", folders[name], "--resample", 2)
    assert result.code == 0, result.out + result.err
    assert document_of(folders[name])["sound"] is (name != "blocks")
    challenged = (folders[name] / "challenge.json").exists()
    assert challenged == (name not in SWEPT)


def test_coarser_strides_take_the_votes_of_finer_ones(folders):
    for band in (2, 5):
        fine, coarse = (
            pq.read_table(folders[f"swept-b{band}-s{stride}"] / "votes.parquet").to_pylist()
            for stride in (1, 2)
        )
        for many, few in zip(fine, coarse, strict=True):
            assert few["predictions"] == many["predictions"][::2]
    settings = document_of(folders["swept-b5-s2"])["evidence"]["settings"]
    assert (settings["stride"], settings["asked_stride"]) == (2, 1)
    assert "asked_stride" not in document_of(folders["swept-b5-s1"])["evidence"]["settings"]


def test_recertify_answers_what_the_votes_hold(folders, tmp_path):
    for name in ("rows", "both", "swept-b5-s2"):
        out = tmp_path / name
        result = call("recertify", folders[name], "--patch-sizes", "1,3", "--out", out, "--json")
        assert result.code == 0, result.err
        sizes = [entry["patch_size"] for entry in document_of(out)["summary"]["certified"]]
        assert sizes == [1, 3]
        assert call("verify", out).code == 0


@pytest.mark.parametrize(
    ("name", "option", "value", "said"),
    [
        ("early", "--patch-sizes", "3", "certify.patch_sizes: 3 cannot be derived: voting stopp"),
        ("early", "--rule", "loc", "certify.rule: loc cannot be derived: voting stopped early"),
        ("early", "--delta-rule", "paper_reference", "cannot be derived"),
        ("pairs", "--patch-sizes", "3", "certify.patch_sizes: 3 is larger than the 2 pixels"),
        ("pairs", "--rule", "loc", "certify.rule: loc does not apply to double_masking"),
        ("swept-b2-s2", "--patch-sizes", "9", "certify.patch_sizes: 9 is not in 1..8 pixels"),
    ],
)
def test_recertify_refuses_what_the_votes_cannot_answer(
    folders, tmp_path, name, option, value, said
):
    result = call("recertify", folders[name], option, value, "--out", tmp_path / "new")
    assert result.code == 2
    assert said in result.err
    assert len(result.err.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_the_report_has_the_sweep_and_says_what_is_not_sound(flow):
    report = Path(flow.json["report"])
    text = report.read_text()
    assert "sound: false" in text
    table = (report.parent / "tables" / "sweep-columns-0.csv").read_text().splitlines()
    assert len(table) == 1 + len(SWEPT)
    assert "2 of 4 certificates use a subset of the votes of a finer stride" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("certify.swept.sweep.band=[2, 9]", "certify.swept.sweep.band: 9 is larger than the image"),
        ("certify.rows.stride=0", "certify.rows.stride: 0"),
        ("certify.rows.band=9", "certify.rows.band: 9 is larger than the image (8)"),
        ("certify.rows.patch_sizes=[1, 9]", "certify.rows.patch_sizes: 9 is larger than the image"),
        ("certify.pairs.mask_patch=9", "certify.pairs.mask_patch: 9 is larger than the image"),
        ("certify.rows.token_policy=mask", "is not the training policy of model columns (drop)"),
    ],
)
def test_what_cannot_be_is_refused_before_any_vote(kept_workers, trained, tmp_path, change, said):
    recipe = tiny_recipe(tmp_path / "tiny.yaml", certify=SECTIONS, attack={})
    seed = "certify.rows.num_items=7"  # so that nothing finished is skipped
    before = set(trained.glob("tiny/certify.*/votes.parquet"))
    result = call("certify", recipe, "--set", seed, "--set", change, "--storage", trained)
    complaints = [line for line in result.err.splitlines() if line.startswith("casemate: ")]
    assert result.code == 2, result.err
    assert len(complaints) == 1
    assert said in complaints[0]
    assert set(trained.glob("tiny/certify.*/votes.parquet")) == before


def test_one_fallen_certificate_fails_the_flow_loudly(kept_workers, trained, tmp_path, monkeypatch):
    """Everything is called certified; the attack on the workers is the real one."""
    honest = patch_certificate.certify

    def everything(*args, **kwargs):
        claims = honest(*args, **kwargs)
        return replace(claims, certified=np.ones_like(claims.certified))

    monkeypatch.setattr(patch_certificate, "certify", everything)
    wrong = {
        "kind": "columns", "model": "main", "band": 6, "patch_sizes": [4], "num_items": 24,
        "delta_rule": "paper_reference",
        "challenge": {"patch_size": 4, "num_items": 24, "num_steps": 3, "num_positions": 2},
    }  # fmt: skip
    recipe = tiny_recipe(tmp_path / "tiny.yaml", certify={"wrong": wrong}, attack={})
    result = call("run", recipe, "--storage", trained)
    assert result.code == 1
    assert "the certificate is wrong, do not use it" in result.err
    folder = step_folder(trained, "certify.wrong")
    assert not (folder / "certificate.json").exists()
    assert not (folder / "manifest.json").exists()
    assert json.loads((folder / "certificate.refuted.json").read_text())["sound"] is False
    client = MlflowClient(f"sqlite:///{trained}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    (run,) = [r for r in found if r.info.run_name == "certify.wrong"]
    assert run.info.status == "FAILED"
