"""Run the flows of this folder in two checkouts and compare what they leave, file by file.

    python -m tests.golden.compare OLD NEW --storage DIR

The run of OLD is kept in DIR under its commit: a second comparison runs NEW alone. Exit code 1
means a difference, or a certificate of OLD that NEW does not verify. Words of the report that were
changed on purpose are let through by `--allow '*/words of report.html'`.
"""

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.golden.contents import Difference, compare_storages
from tests.golden.documents import digest, file_digest, read_json, write_json
from tests.golden.layout import FLOWS, HERE, KEYS, keys_of

DONE = "finished.json"
# Inputs of `given.yaml`: what the first flow trained.
GIVEN = {
    "model.pretrained": ("train.noisy", ""),
    "certify.l2.denoiser": ("train.cleaner", "model:"),
}
PLACE = "import components, pipelines; print(components.__file__, pipelines.__file__)"
# The console entry once, and in one process for a list of calls: imports take longer than checks.
CALL = (
    "import sys; from {module} import {function}; sys.argv[0] = 'casemate'; sys.exit({function}())"
)
CALLS = """
import io, json, sys
from contextlib import redirect_stdout
from {module} import {function}
for arguments in json.load(sys.stdin):
    sys.argv, out, code = ["casemate", *arguments], io.StringIO(), 0
    with redirect_stdout(out):
        try:
            {function}()
        except SystemExit as stop:
            code = int(stop.code or 0)
    print(json.dumps([arguments, code, out.getvalue()]), flush=True)
"""


class Checkout:
    """A checkout of the project, called by its console entry in processes of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        project = tomllib.loads((self.root / "pyproject.toml").read_text())["project"]
        module, _, function = project["scripts"]["casemate"].partition(":")
        self.entry = {"module": module, "function": function}
        self.env = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "OMP_NUM_THREADS": "1",
            "RAY_worker_niceness": "0",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        }
        self.env.pop("RAY_ADDRESS", None)
        self._check_place()

    def _check_place(self) -> None:
        """Another installation of the project must not answer in the place of this one."""
        for file in self._python(PLACE).split():
            if not Path(file).is_relative_to(self.root):
                raise SystemExit(f"{self.root}: imports {file}, which is another checkout")

    def _python(self, code: str, *arguments: str, stdin: str | None = None) -> str:
        command = [sys.executable, "-c", code, *arguments]
        result = subprocess.run(
            command,
            cwd=self.root,
            env=self.env,
            input=stdin,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if result.returncode:
            raise SystemExit(f"{self.root}: {' '.join(arguments)}: exit code {result.returncode}")
        return result.stdout

    def casemate(self, *arguments: object) -> str:
        """What a command prints; a failed one ends the comparison."""
        return self._python(CALL.format(**self.entry), *map(str, arguments))

    def casemate_each(self, calls: list[list[str]]) -> list[tuple[list[str], int, str]]:
        """Arguments, exit code and output of many commands in one process."""
        out = self._python(CALLS.format(**self.entry), stdin=json.dumps(calls))
        return [tuple(json.loads(line)) for line in out.splitlines()]

    def revision(self) -> str | None:
        """The commit; None where files differ from it."""
        git = ["git", "-C", str(self.root)]
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "components", "pipelines", "pyproject.toml"],
            capture_output=True,
            text=True,
            check=True,
        )
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        return None if changed.stdout.strip() else head.stdout.strip()


def run_flows(checkout: Checkout, storage: Path) -> None:
    """All recipes of this folder, from nothing, into an empty storage."""
    shutil.rmtree(storage, ignore_errors=True)
    storage.mkdir(parents=True)
    for name in FLOWS:
        given = _given(storage) if name == "given" else {}
        sets = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
        print(f"{checkout.root}: {name}.yaml", flush=True)
        checkout.casemate("run", HERE / f"{name}.yaml", *sets, "--storage", storage, "--json")
    write_json(storage / DONE, {"flows": flows_digest()})


def _given(storage: Path) -> dict[str, str]:
    """The folders of trained models, as keys of a recipe name them."""
    return {
        key: f"{prefix}{next(storage.glob(f'golden/{step}-*/model'))}"
        for key, (step, prefix) in GIVEN.items()
    }


def flows_digest() -> str:
    """The recipes that a kept run must be of."""
    return digest({name: file_digest(HERE / f"{name}.yaml") for name in FLOWS})


@contextmanager
def locked(storage: Path) -> Iterator[None]:
    """One comparison at a time works in a storage."""
    storage.parent.mkdir(parents=True, exist_ok=True)
    with storage.with_name(f"{storage.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def kept_run(checkout: Checkout, root: Path) -> Path:
    """The storage of a run of this commit, made unless it is there already."""
    revision = checkout.revision()
    if revision is None:
        raise SystemExit(f"{checkout.root}: has uncommitted changes; commit them, or name a clone")
    storage = root / f"old-{revision[:12]}-{flows_digest()[:8]}"
    with locked(storage):
        if not (storage / DONE).is_file():
            run_flows(checkout, storage)
    return storage


def unverified(checkout: Checkout, storage: Path) -> list[Difference]:
    """Certificates below a storage that a checkout does not confirm, votes drawn again too."""
    folders = sorted(path.parent for path in storage.glob("*/certify.*/manifest.json"))
    calls = [
        ["verify", str(folder), *again, "--json"]
        for folder in folders
        for again in ([], ["--resample", "2"])
    ]
    found = []
    for arguments, code, out in checkout.casemate_each(calls):
        place = Path(arguments[1]).relative_to(storage).as_posix()
        what = " ".join(["verify", *arguments[2:-1]])
        problems = "; ".join(json.loads(out)["problems"][:3]) if out else "no output"
        found.append(Difference(place, what, problems if code else None))
    return found


def recorded_keys(storage: Path) -> list[Difference]:
    """Key sets of the files of a storage beside those of the committed record."""
    recorded: Mapping[str, Any] = {f: e["keys"] for e in read_json(KEYS) for f in e["files"]}
    found, rows = keys_of(storage), []
    for name in sorted(recorded.keys() | found.keys()):
        changed = set(recorded.get(name, ())) ^ set(found.get(name, ()))
        place, _, file = name.rpartition("/")
        said = f"keys {sorted(changed)[:5]} are not as recorded" if changed else None
        rows.append(Difference(place, f"keys of {file}", said))
    return rows


def show(title: str, rows: list[Difference], *, allowed: list[str]) -> int:
    """A table: a line for each step, one for each difference; how many are not allowed."""
    print(f"\n{title}")
    by_place: dict[str, list[Difference]] = {}
    for row in rows:
        by_place.setdefault(row.place, []).append(row)
    bad = 0
    for place, own in by_place.items():
        if equal := [row.what for row in own if row.how is None]:
            print(f"  equal      {place:<52} {', '.join(equal)}")
        for row in own:
            if row.how is None:
                continue
            meant = any(fnmatch(f"{place}/{row.what}", pattern) for pattern in allowed)
            bad += not meant
            print(f"  {'allowed' if meant else 'DIFFERENT':<9}  {place:<52} {row.what}: {row.how}")
    equal_rows = sum(row.how is None for row in rows)
    print(f"  {equal_rows} of {len(rows)} equal, {bad} different")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="checkout whose results are right")
    parser.add_argument("new", type=Path, help="checkout that must give the same")
    parser.add_argument("--storage", type=Path, help="where runs are kept; default: nowhere")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PATTERN",
        help="differences that are meant, as `*/words of report.html`; may be repeated",
    )
    asked = parser.parse_args()
    allow = asked.allow
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        root = (asked.storage or Path(temporary)).resolve()
        old, new = Checkout(asked.old), Checkout(asked.new)
        before = kept_run(old, root)
        after = root / f"new-{digest(str(new.root))[:12]}"
        with locked(after):
            run_flows(new, after)
            bad = show("files of both runs", compare_storages(before, after), allowed=allow)
            bad += show(
                "keys of the new run and of the record", recorded_keys(after), allowed=allow
            )
            verified = unverified(new, before)
            bad += show("old certificates, by the new code", verified, allowed=allow)
    print(f"\n{'equal' if not bad else f'{bad} differences'}: {before} and {after}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
