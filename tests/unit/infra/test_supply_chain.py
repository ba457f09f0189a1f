"""The audit never says more than it looked up; the SBOM is valid, complete and names no machine."""

import json
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

import pytest

from infra.supply_chain import audit, sbom
from tests.e2e.cli import ROOT

GOOD = {"name": "good", "version": "1.0", "vulns": []}
BAD = {"name": "bad", "version": "2.0", "vulns": [{"id": "CVE-1"}, {"id": "CVE-2"}]}
ODD = {"name": "odd", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("dependencies", "code", "said"),
    [
        ([GOOD], 0, "audit: 1 packages looked up, 0 not, 0 with known vulnerabilities"),
        ([GOOD, ODD], 3, "audit: not looked up: odd"),
        ([GOOD, BAD, ODD], 1, "audit: bad 2.0: CVE-1, CVE-2"),
        ([ODD], 3, "NOT AUDITED"),  # pip-audit says "no known vulnerabilities" and ends with 0
        ([], 3, "NOT AUDITED"),
    ],
)
def test_the_exit_code_is_honest(dependencies, code, said):
    lines, found = audit.report(audit.findings({"dependencies": dependencies}))
    assert found == code
    assert any(said in line for line in lines)
    assert audit.report(None)[1] == 3


def test_ages_are_listed_oldest_first():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    dates = {"new 1": now, "old 1": now - timedelta(days=400), "lost 1": None}
    first, *lines = audit.in_lines(dates, now=now)
    assert first == "audit: 2 of 3 packages have a date; the oldest:"
    assert [line.split() for line in lines] == [
        ["400", "days", "2024-11-27", "old", "1"], ["0", "days", "2026-01-01", "new", "1"],
    ]  # fmt: skip
    assert audit.in_lines({"lost 1": None}, now=now) == [
        "audit: the registry does not tell ages either"
    ]


def test_every_package_of_the_lock_is_read_and_has_hashes():
    text = audit.LOCK.read_text()
    packages = audit.locked(text)
    assert ("ray", version("ray")) in packages
    assert len(packages) == text.count("==") - _in_conditions(text)
    assert text.count("--hash=sha256:") >= len(packages)


def _in_conditions(text: str) -> int:
    """`==` inside conditions."""
    return sum(line.partition(";")[2].count("==") for line in text.splitlines())


def test_the_runtime_environment_has_no_tools_of_developers():
    names = sbom.runtime_packages()
    assert {"casemate", "torch", "ray", "mlflow", "cryptography", "tensorboardx"} <= names
    assert not names & {"pytest", "mypy", "ruff", "moto", "hypothesis", "pip-audit"}


def _document(**changes):
    part = {"type": "library", "version": "1"}
    link = {"type": "distribution", "url": "file:///home/someone/casemate"}
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {},
        "components": [
            {**part, "name": "casemate", "bom-ref": "c", "externalReferences": [link]},
            {**part, "name": "Torch", "bom-ref": "t"}, {**part, "name": "pytest", "bom-ref": "p"},
        ],
        "dependencies": [{"ref": "c", "dependsOn": ["p", "t"]}, {"ref": "p"}, {"ref": "t"}],
        **changes,
    }  # fmt: skip


def test_the_sbom_is_valid_and_names_no_machine():
    made = sbom.reduced(_document(), {"casemate", "torch"})
    text = sbom.text_of(made)
    assert [part["name"] for part in made["components"]] == ["Torch"]
    assert made["metadata"]["component"]["name"] == "casemate"
    assert made["dependencies"][0]["dependsOn"] == ["t"]
    assert "file:" not in text
    assert text == sbom.text_of(json.loads(text))
    with pytest.raises(ValueError, match="not valid CycloneDX"):
        sbom.text_of({**made, "componentz": []})


@pytest.mark.cluster
def test_the_sbom_of_this_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(sbom, "OUT", tmp_path / "dist" / "sbom.json")
    monkeypatch.setattr(sbom, "ROOT", tmp_path)
    sbom.main()
    first = sbom.OUT.read_bytes()
    sbom.main()
    assert sbom.OUT.read_bytes() == first
    text = first.decode()
    assert str(ROOT) not in text
    assert "timestamp" not in text
    assert "serialNumber" not in text
    assert '"pkg:pypi/torch@' in text
