"""The doctor's findings: what each answer of a machine means."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.runtime import findings, node_probe
from pipelines.runtime.doctor import within
from pipelines.runtime.node_probe import NodeProbe
from pipelines.runtime.provenance import software
from pipelines.runtime.shipping import code_digest

GIB = 2**30
OURS = NodeProbe().versions(sorted(software()))


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, "ok", "all as here"),
        ({"timm": "0.9"}, "warn", "timm 0.9 (here"),
        ({"ray": "2.50.0"}, "FAIL", "ray 2.50.0 (here"),
        ({"python": "3.12.1"}, "FAIL", "python 3.12.1 (here"),
        ({"python": "3.11.99"}, "warn", "python 3.11.99 (here"),
        ({"torch": None}, "FAIL", "lacks torch; install requirements.lock"),
    ],
)
def test_versions(changes, status, words):
    found = findings.versions_finding("n1", {**OURS, **changes})
    assert found.status == status
    assert words in found.message


def test_code(monkeypatch):
    same = {"digest": code_digest(), "root": "/opt"}
    assert findings.code_finding("n1", same).status == "ok"
    other = findings.code_finding("n1", {"digest": "0" * 16, "root": "/opt"})
    assert (other.status, "00000000 in /opt" in other.message) == ("FAIL", True)
    assert findings.code_finding("n1", {"error": "no module"}).status == "FAIL"
    monkeypatch.setenv(findings.CODE_ENV, "1" * 16)  # a job: the client's code counts
    assert findings.code_finding("n1", same).status == "FAIL"


@pytest.mark.parametrize(
    ("seen", "num_gpus", "status", "words"),
    [
        (["A100", "A100"], 2, "ok", "torch sees 2 (A100)"),
        ([], 0, "ok", ""),
        ([], 2, "FAIL", "--num-gpus=0"),
        (["A100"], 0, "warn", "--num-gpus=1"),
    ],
)
def test_gpus(seen, num_gpus, status, words):
    found = findings.gpu_finding("n1", {"names": seen}, num_gpus=num_gpus)
    assert found.status == status
    assert words in found.message


@pytest.mark.parametrize(
    ("answer", "seen_here", "status", "words"),
    [
        ({"same": True, "refuses": True}, True, "ok", "shared and writable"),
        ({"same": False}, False, "FAIL", "is another folder"),
        (
            {"same": True, "refuses": True, "error": "cannot be written"},
            False,
            "FAIL",
            "written",
        ),
        ({"same": True, "refuses": True}, False, "FAIL", "are not here"),
        ({"same": True, "refuses": False}, True, "FAIL", "creates a key twice"),
    ],
)
def test_storage(answer, seen_here, status, words):
    found = findings.storage_finding("n1", answer, root=Path("/shared"), seen_here=seen_here)
    assert found.status == status
    assert words in found.message


def test_a_probe_reads_and_answers_on_the_storage(tmp_path):
    probe = NodeProbe()
    assert probe.storage(str(tmp_path), "t", "n1") == {"same": False}
    place = tmp_path / "probes" / "doctor-t"
    place.mkdir(parents=True)
    (place / "driver").write_text("other")
    assert probe.storage(str(tmp_path), "t", "n1") == {"same": False}
    (place / "driver").write_text("t")
    assert probe.storage(str(tmp_path), "t", "n1") == {"same": True, "refuses": True}
    assert (place / "n1").read_text() == "t"


def test_work_that_hangs_is_given_up():
    assert within(5, lambda: "done") == "done"
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.05, lambda: time.sleep(5))
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)


def test_a_probe_runs_on_a_machine_without_our_code(tmp_path):
    """Sent by value: the machine has Python and Ray, but neither of our packages."""
    script = (
        "import sys, pickle; sys.modules['pipelines'] = sys.modules['components'] = None;"
        "probe = pickle.load(open(sys.argv[1], 'rb'))();"
        "print(probe.code()['error'], probe.versions(['ray']))"
    )
    sent = tmp_path / "probe"
    sent.write_bytes(probe_by_value())
    said = subprocess.check_output([sys.executable, "-c", script, sent], text=True, cwd=tmp_path)
    assert "pipelines" in said
    assert software()["ray"] in said


def probe_by_value() -> bytes:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(node_probe)
    return cloudpickle.dumps(node_probe.NodeProbe)


@pytest.mark.parametrize(
    ("skew", "doubt", "status"),
    [(0.1, 0, "ok"), (-3, 0.5, "warn"), (3, 2.5, "ok"), (-60, 1, "FAIL"), (60, 59, "ok")],
)
def test_clocks_count_as_far_as_they_are_known(skew, doubt, status):
    assert findings.clock_finding("n1", skew=skew, doubt=doubt).status == status


def test_disk_and_memory():
    def disk(free: int) -> str:
        return findings.disk_finding("n1", {"total": 100 * GIB, "free": free * GIB}).status

    assert [disk(50), disk(8), disk(4)] == ["ok", "warn", "FAIL"]
    assert findings.disk_finding("n1", None).status == "FAIL"

    def memory(size: int) -> str:
        found = {"total": size * GIB, "free": 0}
        return findings.shm_finding("n1", found, object_store=4 * GIB).status

    assert [memory(8), memory(2)] == ["ok", "warn"]
    assert findings.shm_finding("n1", None, object_store=GIB).status == "warn"
