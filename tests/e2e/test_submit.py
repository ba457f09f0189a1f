"""Real job submission to a real head on this machine: run, stop, resubmit, finish."""

import json
import os
import shutil

import pyarrow.parquet as pq
import pytest

from tests.e2e.cli import (
    ROOT,
    TINY,
    Cli,
    check_same_data,
    step_folder,
    tiny_recipe,
    wait_until,
)
from tests.e2e.heads import ray_head

pytestmark = pytest.mark.e2e
LARGE = 600_000_000  # bytes; 200 MB were refused by the dashboard (413) when they were packed


@pytest.fixture
def head():
    with ray_head() as found:
        yield found


@pytest.fixture
def from_checkout(tmp_path) -> Cli:
    """The command line of a checkout with a dataset and weights beside the code."""
    checkout = tmp_path / "checkout"
    for name in ("components", "pipelines"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copyfile(ROOT / "pyproject.toml", checkout / "pyproject.toml")
    for name in ("weights/vit.safetensors", "data/imagenet.tar", "components/vit.pth"):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).touch()
        os.truncate(checkout / name, LARGE)
    return Cli(checkout)


@pytest.mark.timeout(900)
def test_stop_and_resubmit_finish_with_the_same_certificates(
    from_checkout, tmp_path, head, finished_flow
):
    cli, dashboard = from_checkout, head.dashboard
    storage = tmp_path / "storage"
    certify = {"l2": TINY["certify"]["l2"]}
    trained = step_folder(finished_flow, "train.main") / "model"  # trainings: `tests/cluster`
    given = {"model": {"pretrained": str(trained)}, "train": None, "attack": {}, "evaluate": None}
    recipe = tiny_recipe(tmp_path / "tiny.yaml", **given, certify=certify)
    sent = {"CASEMATE_REVISION": "0123abc-dirty"}  # the checkout has no .git
    submit = ("submit", recipe, "--address", dashboard, "--storage", storage)

    first = cli(*submit, "--json", env=sent)
    assert first.code == 0, first.err
    flow = first.json["flow"]
    assert cli(*submit, "--json").json == first.json  # a running flow is not doubled

    wait_until(lambda: any(storage.glob("tiny/prepare-*/manifest.json")), seconds=120)
    stopped = cli("stop", flow, "--address", dashboard)
    assert stopped.code == 0, stopped.err
    states = {j["status"] for j in cli("status", flow, "--address", dashboard, "--json").json}
    assert states <= {"STOPPED", "SUCCEEDED"}
    assert not any(storage.glob("tiny/report-*/manifest.json"))

    second = cli(*submit, "--wait", env=sent)
    logs = cli("logs", flow, "--address", dashboard)
    assert second.code == 0, second.out + second.err + logs.out
    assert "done before" in logs.out  # what the first attempt finished was kept
    for name in ("certificates.parquet", "votes.parquet"):  # with the fingerprint of another step
        ours, theirs = (step_folder(root, "certify.l2") / name for root in (storage, finished_flow))
        assert pq.read_table(ours).equals(pq.read_table(theirs))
    check_same_data(storage, finished_flow)
    report = step_folder(storage, "report") / "report.html"
    assert report.exists()
    assert second.out.splitlines()[-2] == f"report: {report}"  # the figures, as `run` prints them
    manifests = [json.loads(path.read_text()) for path in storage.glob("tiny/*/manifest.json")]
    assert {manifest["git_revision"] for manifest in manifests} == {"0123abc-dirty"}
    stages = [j["stage"] for j in cli("status", flow, "--address", dashboard, "--json").json]
    assert {"flow", "prepare", "certify", "report"} <= set(stages)

    unknown = cli("logs", "no-such-flow", "--address", dashboard)
    assert unknown.code == 2
    assert flow in unknown.err
