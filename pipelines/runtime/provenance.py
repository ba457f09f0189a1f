"""Code, software and inputs of a result: what every manifest and certificate records."""

import os
import platform
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from subprocess import CalledProcessError, run
from typing import TypedDict

ACCELERATOR = "accelerator_type:"  # of a Ray resource that names a kind of GPU
REVISION_ENV = "CASEMATE_REVISION"  # of code that was sent to a cluster, or of a container image


class InputEntry(TypedDict):
    """A step that another step was made from; `content` is the digest of its files."""

    fingerprint: str
    mlflow_run_id: str
    content: str


class Execution(TypedDict):
    """When and where a step ran, in its last start; two runs of one step differ in it."""

    started: str  # UTC
    seconds: float
    machine: str


class Provenance(TypedDict):
    """Code, software and inputs of a result."""

    git_revision: str | None
    software: dict[str, str]
    fingerprint: str
    mlflow_run_id: str
    inputs: dict[str, InputEntry]


@cache
def software() -> dict[str, str]:
    """Versions of packages that can change a number; part of every certificate's provenance."""
    names = (
        "casemate",
        "torch",
        "torchvision",
        "timm",
        "numpy",
        "scipy",
        "ray",
        "mlflow",
        "pyarrow",
    )
    return {name: version(name) for name in names}


def execution(began: float) -> Execution:
    """The execution of a step that began at this POSIX time and ends now."""
    started = datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds")
    return {
        "started": started.replace("+00:00", "Z"),
        "seconds": round(time.time() - began, 1),
        "machine": machine(),
    }


def machine() -> str:
    """CPUs and GPUs of the connected Ray, else those of this machine."""
    import ray

    found = ray.cluster_resources() if ray.is_initialized() else {"CPU": os.cpu_count() or 1}
    kinds = sorted(name.removeprefix(ACCELERATOR) for name in found if name.startswith(ACCELERATOR))
    parts = [f"{found.get('CPU', 0):g} CPUs ({_cpu_name()})"]
    if gpus := found.get("GPU"):
        parts.append(f"{gpus:g} GPUs" + (f" ({', '.join(kinds)})" if kinds else ""))
    return ", ".join(parts)


@cache
def _cpu_name() -> str:
    """The model of this machine's CPU."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def git_revision() -> str | None:
    """The checkout's commit, with `-dirty` where files differ from it.

    Outside a checkout: the revision that a submission has sent along or an image was built
    from, else None.
    """
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return os.environ.get(REVISION_ENV) or None
    head = _git(here, "rev-parse", "HEAD")
    return head and head + ("-dirty" if _git(here, "status", "--porcelain") else "")


def _git(here: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails or git is not installed."""
    try:
        done = run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
    except (OSError, CalledProcessError):
        return None
    return done.stdout.strip()
