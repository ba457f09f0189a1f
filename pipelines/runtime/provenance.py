"""Code, software and inputs of a result: what every manifest and certificate records."""

import os
from functools import cache
from importlib.metadata import version
from pathlib import Path
from subprocess import CalledProcessError, run
from typing import TypedDict

REVISION_ENV = "CASEMATE_REVISION"  # of code that was sent to a cluster, or of a container image


class InputEntry(TypedDict):
    """A step that another step was made from; `content` is the digest of its files."""

    fingerprint: str
    mlflow_run_id: str
    content: str


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
