"""`make smoke`: every ready recipe with `--smoke`, whole chains through the command line.

One Ray serves them all. `python -m tests.benchmarks.smoke NAME ...` runs only those.
"""

import argparse
import io
import os
import secrets
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from pipelines.cli import main as casemate
from pipelines.recipe import available


def run(name: str, *, storage: Path) -> tuple[bool, str]:
    """Whether `casemate run NAME --smoke` ended well, and the last line that it wrote."""
    words = ["casemate", "run", name, "--smoke", "--storage", str(storage), "--json"]
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", words), redirect_stdout(out), redirect_stderr(err):
        try:
            casemate()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    lines = err.getvalue().strip().splitlines()
    return code == 0, "" if code == 0 else (lines or ["no message"])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="ready recipes; default: all")
    names = parser.parse_args().names or available()
    failed = []
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

        from pipelines.runtime.cluster import connect
        from pipelines.sections import ClusterSection

        connect(ClusterSection(), address=None)
        try:
            for name in names:
                began = time.monotonic()
                ok, why = run(name, storage=Path(home) / "runs")
                print(
                    f"{name:<28} {time.monotonic() - began:7.1f} s  {'ok' if ok else 'FAILED'} "
                    f"{why}",
                    flush=True,
                )
                failed += [] if ok else [name]
        finally:
            ray.shutdown()
    print(f"{len(names) - len(failed)} of {len(names)} recipes ran to their end")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
