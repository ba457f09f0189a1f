"""`make audit`: known vulnerabilities of the locked packages; their ages where none can be asked.

Exit code 0: every package was looked up and none has a known vulnerability. 1: some have.
3: some could not be looked up, so nothing is known about them.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import requests
from pip._internal.models.index import PyPI

LOCK = Path(__file__).resolve().parents[2] / "requirements.lock"
LOCKED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
REGISTRY = PyPI.pypi_url  # one document per package, with the dates of its releases
SECONDS = 10.0  # without a byte before a request counts as lost
SHOWN = 15  # oldest packages
FOUND, UNKNOWN = 1, 3  # exit codes


class Findings(NamedTuple):
    """What pip-audit reports: packages with vulnerabilities, and those it could not look up."""

    num_audited: int
    vulnerable: dict[str, list[str]]
    skipped: list[str]


def locked(text: str) -> list[tuple[str, str]]:
    """Names and versions in a lock, which may have two of a package: for other Pythons."""
    found: list[tuple[str, str]] = LOCKED.findall(text)
    return found


def audited(lock: Path) -> Findings | None:
    """The report of pip-audit on a lock; None if it cannot be made."""
    program = Path(sys.executable).with_name("pip-audit")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        words = [program, "-r", lock, "--disable-pip", "--require-hashes", "-f", "json"]
        words += ["-o", report, "--progress-spinner", "off", "--timeout", str(int(SECONDS))]
        subprocess.run([str(word) for word in words], capture_output=True, check=False)
        return findings(json.loads(report.read_text())) if report.is_file() else None


def findings(report: Mapping[str, Any]) -> Findings:
    """The report in short. pip-audit ends with 0 also if it could not look up a single package."""
    packages = report["dependencies"]
    asked = [package for package in packages if "skip_reason" not in package]
    return Findings(
        len(asked),
        {
            f"{package['name']} {package['version']}": [found["id"] for found in package["vulns"]]
            for package in asked
            if package["vulns"]
        },
        [package["name"] for package in packages if "skip_reason" in package],
    )


def released(name: str, version: str) -> datetime | None:
    """When a version was uploaded; None if the registry does not answer or does not know it."""
    try:
        answer = requests.get(f"{REGISTRY}/{name}/json", timeout=SECONDS)
        files = answer.json()["releases"][version]
        return min(datetime.fromisoformat(file["upload_time_iso_8601"]) for file in files)
    except (requests.RequestException, ValueError, KeyError, TypeError):
        return None


def ages(packages: Sequence[tuple[str, str]]) -> dict[str, datetime | None]:
    """Dates of packages by name and version, asked for side by side."""
    with ThreadPoolExecutor(16) as pool:
        dates = pool.map(lambda package: released(*package), packages)
        return {" ".join(package): date for package, date in zip(packages, dates, strict=True)}


def in_lines(dates: Mapping[str, datetime | None], *, now: datetime) -> list[str]:
    """The oldest packages first, and how many have no date."""
    known = sorted((date, name) for name, date in dates.items() if date is not None)
    lines = [f"  {(now - date).days:5d} days  {date:%Y-%m-%d}  {name}" for date, name in known]
    lines = [f"audit: {len(known)} of {len(dates)} packages have a date; the oldest:", *lines]
    return lines[: SHOWN + 1] if known else ["audit: the registry does not tell ages either"]


def report(found: Findings | None) -> tuple[list[str], int]:
    """What to print, and the exit code."""
    if found is None or not found.num_audited:
        why = "audit: NOT AUDITED: the vulnerability service cannot be reached from here"
        return [f"{why}; ages of the locked packages instead"], UNKNOWN
    lines = [f"audit: {name}: {', '.join(ids)}" for name, ids in sorted(found.vulnerable.items())]
    if found.skipped:
        lines.append(f"audit: not looked up: {', '.join(sorted(found.skipped))}")
    counts = f"{found.num_audited} packages looked up, {len(found.skipped)} not"
    lines.append(f"audit: {counts}, {len(found.vulnerable)} with known vulnerabilities")
    return lines, FOUND if found.vulnerable else UNKNOWN if found.skipped else 0


def main(arguments: Sequence[str]) -> int:
    lock = Path(arguments[0]) if arguments else LOCK
    packages = locked(lock.read_text())
    found = audited(lock)
    lines, code = report(found)
    print("\n".join(lines), flush=True)
    if found is None or not found.num_audited:
        print("\n".join(in_lines(ages(packages), now=datetime.now(UTC))))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
