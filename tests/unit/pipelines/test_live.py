"""What a running stage shows: lines, the progress file, gauges and live metrics in MLflow."""

import io
import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from components.core.confidence_sequences import ShareSoFar
from components.core.units import SoFar
from pipelines.runtime import live as live_module
from pipelines.runtime import progress
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.gauges import GAUGES, TAGS, exporter
from pipelines.runtime.live import LiveMetrics, metrics_of
from pipelines.runtime.progress import Status, parse_line
from tests.e2e.cli import ROOT, wait_until

DASHBOARD = ROOT / "infra" / "grafana" / "casemate.json"


@pytest.fixture
def stderr(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=text, force_terminal=False))
    return text


def test_lines_are_read_back():
    full = Status(
        step="certify.l2", unit="items", done=120, total=1000, rate=3.2, eta_seconds=275.0,
        failures=2, workers=3, workers_wanted=4, waiting_seconds=7.0, note="certified at 0.5: 61%",
    )  # fmt: skip
    assert full.line() == (
        "progress certify.l2: 120/1000 items, 3.20/s, eta 275 s, failures 2, workers 3/4, "
        "waiting 7 s; certified at 0.5: 61%"
    )
    found = parse_line(f"(job 3) {full.line()}")
    names = ("step", "unit", "done", "total", "rate", "eta_seconds", "failures", "workers",
             "workers_wanted", "waiting_seconds", "note")  # fmt: skip
    assert found == {name: getattr(full, name) for name in names}
    empty = parse_line(Status(step="train.main", unit="trial epochs", done=0.5, total=9).line())
    assert empty["rate"] is empty["eta_seconds"] is empty["workers"] is empty["note"] is None
    assert (empty["step"], empty["unit"], empty["done"]) == ("train.main", "trial epochs", 0.5)
    assert parse_line("certify.l2        12.3 s     certify.l2-0123456789ab") is None


def test_off_a_terminal_a_line_comes_every_interval_also_without_results(stderr, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.2)
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.02)
    with progress.bar("attack.linf", total=10, unit="units", phase="pgd") as bar:
        bar.at(3)
        wait_until(lambda: stderr.getvalue().count("\n") >= 3, seconds=60)
    lines = [parse_line(line) for line in stderr.getvalue().splitlines()]
    assert all(line["done"] == 3 and line["note"] == "pgd" for line in lines)
    assert lines[0]["rate"] is None  # finished before, not by this start


def test_the_file_tells_the_state_and_the_last_one_stays(tmp_path, stderr, monkeypatch):
    monkeypatch.setattr(progress, "FILE_SECONDS", 0.05)
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.02)
    file, watched = tmp_path / progress.FILE_NAME, []
    shown = progress.bar("tune", total=8, unit="epochs", file=file, watch=watched.append)
    with shown as bar:
        wait_until(file.exists, seconds=60)
        bar.at(2)
        bar.at(4, "best 0.5")
        wait_until(lambda: json.loads(file.read_text())["eta_seconds"], seconds=60)
    status = json.loads(file.read_text())
    assert (status["done"], status["total"], status["note"]) == (4, 8, "best 0.5")
    assert status["rate"] > 0
    assert abs(status["updated"] - time.time()) < 600
    assert watched
    assert {p.name for p in tmp_path.iterdir()} == {progress.FILE_NAME}  # no temporary files
    file.unlink()
    bar.tick(time.monotonic() + 1000)  # a late tick of the thread
    assert not file.exists()


def test_a_file_that_cannot_be_written_fails_no_stage(tmp_path, stderr):
    with progress.bar("x", total=1, unit="units", file=tmp_path / "missing" / "file") as bar:
        bar.advance()


def test_live_metrics_name_the_band_and_their_phase():
    share = ShareSoFar(held=8, seen=10, total=100, least=8, most=98)
    found = metrics_of(
        SoFar(shares={"main/robust_accuracy": share}), done=3, failures=1, phase="pgd"
    )
    low, high = share.band()
    assert found == {
        "live/pgd/done": 3,
        "live/pgd/failures": 1,
        "live/pgd/main/robust_accuracy": 0.8,
        "live/pgd/main/robust_accuracy_low": low,
        "live/pgd/main/robust_accuracy_high": high,
        "live/pgd/main/robust_accuracy_items": 10,
    }
    assert metrics_of(SoFar(), done=3, failures=0, phase="").keys() == {
        "live/done",
        "live/failures",
    }


def test_a_server_that_fails_or_hangs_slows_nothing_and_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(live_module, "LIVE_SECONDS", 0.01)
    calls, hold = [], threading.Event()

    def send(values, step):
        calls.append(step)
        if step == 3:
            hold.wait(60)
        raise ConnectionError("http://alice:SECRET@host is down")

    live = LiveMetrics(send)
    for step in (1, 2):
        wait_until(live.is_due, seconds=60)
        live.offer({"live/done": step}, step)
        live.sender.join(60)
    assert live.pause > 0.02  # later and later
    live.due = 0
    live.offer({"live/done": 3}, 3)  # returns while the server hangs
    live.due = 0
    assert not live.is_due()  # one call at a time
    hold.set()
    live.close()
    assert calls == [1, 2, 3]
    assert len(caplog.records) == 1
    assert "SECRET" not in caplog.text


def test_a_step_shows_its_flow_and_its_scratch(tmp_path, monkeypatch):
    from pipelines.runtime import gauges

    exported = {}
    fake = SimpleNamespace
    monkeypatch.setattr(
        gauges, "_gauge", lambda name: fake(set=lambda v, tags: exported.update({name: (v, tags)}))
    )
    out = StageDir(tmp_path / "demo" / "certify.l2-0123", "certify.l2", "f", None)
    place = gauges.shown_at(out)
    assert place["file"] == out.path / "unfinished" / "progress.json"
    place["watch"](Status(step="certify.l2", unit="items", done=3, total=9, draws=12))
    tags = {"flow": "demo", "step": "certify.l2"}
    assert exported["casemate_units_done"] == (3, tags)
    assert exported["casemate_draws"] == (12, tags)
    assert "casemate_unit_rate" not in exported  # unknown so far


def test_gauges_that_cannot_be_exported_fail_no_stage(monkeypatch, caplog):
    from pipelines.runtime import gauges

    def fail(name):
        raise RuntimeError("Ray is gone")

    monkeypatch.setattr(gauges, "_gauge", fail)
    export = exporter("demo", "train.main")
    for _ in range(2):
        export(Status(step="train.main", unit="epochs", done=1, total=2))
    assert len(caplog.records) == 1


def test_the_dashboard_asks_for_what_is_exported_and_shows_all_of_it():
    board = json.loads(DASHBOARD.read_text())
    queries = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    queries += [v["query"] for v in board["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"\bray_\w+", query)}
    assert asked == {f"ray_{name}" for name in GAUGES}
    labels = {label for query in queries for label in re.findall(r"[{ ](\w+)=~", query)}
    assert labels == set(TAGS)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert Path(DASHBOARD).read_text() == json.dumps(board, indent=2) + "\n"
