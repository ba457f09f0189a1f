"""`make smoke`: every ready recipe with `--smoke`, whole chains through the command line.

One driver, one Ray and one pool of attacking and certifying workers serve them all, whose imports
are no recipe's own work; Ray counts two CPUs for that pool besides two for trainings. What is left
of a recipe is mostly the start of its training workers.
`python -m tests.benchmarks.smoke NAME ...` runs only those.
"""

import argparse
import io
import os
import re
import secrets
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from pipelines.cli.main import main as casemate
from pipelines.recipe.load import available

POOL, TRAINING = 2, 2  # CPUs as Ray counts them
STEP = re.compile(r"(\S+) +([\d.]+) s ")  # what a flow says when a step is done


def run(name: str, *, storage: Path) -> tuple[bool, str]:
    """Whether `casemate run NAME --smoke` ended well; then the seconds of its steps, else why."""
    words = ["casemate", "run", name, "--smoke", "--storage", str(storage), "--json"]
    words += ["--set", f"cluster.num_actors={POOL}"]
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", words), redirect_stdout(out), redirect_stderr(err):
        try:
            casemate()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    lines = err.getvalue().strip().splitlines()
    steps = [found.groups() for line in lines if (found := STEP.match(line))]
    spent = ", ".join(f"{step} {float(seconds):.0f}" for step, seconds in steps)
    return code == 0, spent if code == 0 else (lines or ["no message"])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="ready recipes; default: all")
    names = parser.parse_args().names or available()
    failed: list[str] = []
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="cm-") as home:
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_TMPDIR": home,
        }
        os.environ.pop("RAY_ADDRESS", None)
        import ray  # after its settings

        from pipelines.recipe.schema.place import ClusterSection
        from pipelines.runtime.cluster import connect

        connect(ClusterSection(num_cpus=POOL + TRAINING), address=None)
        try:
            for name in names:
                began = time.monotonic()
                with mock.patch("pipelines.flow.execute.release_workers"):  # the pool stays
                    ok, about = run(name, storage=Path(home) / "runs")
                seconds.append(time.monotonic() - began)
                verdict = "ok" if ok else "FAILED"
                print(f"{name:<28} {seconds[-1]:6.1f} s  {verdict}  {about}", flush=True)
                failed += [] if ok else [name]
        finally:
            ray.shutdown()
    print(
        f"{len(names) - len(failed)} of {len(names)} recipes ran to their end; "
        f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
