"""Alerts and scraping: keys, gauges that exist, and what promtool says where it is installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pipelines.runtime.gauges import GAUGES, TAGS
from tests.e2e.cli import ROOT
from tests.unit.infra.misspelt import TEXT, TEXTS, closed, matches, misspellings, problems

FOLDER = ROOT / "infra" / "grafana"
TIME = {"type": "string", "pattern": "^[0-9]+[smh]$"}
RULE = closed(
    {
        "alert": TEXT,
        "expr": TEXT,
        "for": TIME,
        "labels": closed({"severity": {"enum": ["info", "warning", "critical"]}}),
        "annotations": closed({"summary": TEXT, "description": TEXT}),
    },
    optional="for",
)
GROUP = closed({"name": TEXT, "rules": {"type": "array", "items": RULE, "minItems": 1}})
RULES = closed({"groups": {"type": "array", "items": GROUP, "minItems": 1}})
FILES = {"type": "array", "items": closed({"files": TEXTS})}
JOB = closed({"job_name": TEXT, "file_sd_configs": FILES})
SCRAPING = closed(
    {
        "global": closed({"scrape_interval": TIME, "evaluation_interval": TIME}),
        "rule_files": TEXTS,
        "scrape_configs": {"type": "array", "items": JOB, "minItems": 1},
    }
)


def read(name: str):
    return yaml.safe_load((FOLDER / name).read_text())


def alerts() -> list[dict]:
    return [rule for group in read("rules.yaml")["groups"] for rule in group["rules"]]


@pytest.mark.parametrize(("name", "schema"), [("rules.yaml", RULES), ("prometheus.yaml", SCRAPING)])
def test_a_misspelt_key_is_found(name, schema):
    assert problems(read(name), schema) == []
    for path, wrong in misspellings(read(name)):
        # `for` is optional, but a misspelt one is an unknown key
        assert not matches(wrong, schema), path


def test_alerts_ask_for_gauges_that_exist():
    for rule in alerts():
        asked = set(re.findall(r"\bray_\w+", rule["expr"]))
        assert asked <= {f"ray_{name}" for name in GAUGES}
        assert asked, rule["alert"]
        shown = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert shown == set(TAGS)


def test_every_alert_is_shown_to_fire_and_to_stay_silent():
    cases = [case for test in read("rules.test.yaml")["tests"] for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in alerts()}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


def test_ray_writes_the_file_that_is_scraped():
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    (job,) = read("prometheus.yaml")["scrape_configs"]
    ((path,),) = [entry["files"] for entry in job["file_sd_configs"]]
    assert Path(path).name == PROMETHEUS_SERVICE_DISCOVERY_FILE


@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "rules.yaml"),
        ("test", "rules", "rules.test.yaml"),
        ("check", "config", "prometheus.yaml"),
    ],
)
def test_promtool_accepts_the_files(words):
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    done = subprocess.run(
        ["promtool", *words], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
