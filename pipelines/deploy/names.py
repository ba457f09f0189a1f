"""Names that Kubernetes and KubeRay take, and what recipes' names become."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from components.core.digests import digest_bytes
from components.core.settings import Problem

MAX_LABEL = 63  # RFC 1123
MAX_RAYJOB = 47  # KubeRay adds to it and to the names of its services
GENERATED = 6  # `-x7k2p`, which Argo adds
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")


def name_problem(name: str, *, most: int = MAX_LABEL) -> str | None:
    """Why Kubernetes would refuse a name, as a remedy; None for a good one."""
    if not _LABEL.fullmatch(name):
        return "is not a name of Kubernetes: a-z, 0-9 and - inside, at most 63 characters"
    return f"has {len(name)} characters; at most {most}" if len(name) > most else None


def resource_name(text: str, *, most: int = MAX_RAYJOB) -> str:
    """The name of a recipe as Kubernetes takes it: it starts with a letter and is not too long.

    A shortened name ends with a digest, so that two long names stay different.
    """
    name = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"flow-{name}".rstrip("-")
    if len(name) > most:
        name = f"{name[: most - 9].rstrip('-')}-{digest_bytes(text.encode())[:8]}"
    return name


class Claim(NamedTuple):
    """A PersistentVolumeClaim and where pods mount it."""

    name: str
    path: str

    def problems(self) -> Iterator[Problem]:
        """What is wrong with it."""
        shown = f"{self.name}:{self.path}"
        if not _PATH.fullmatch(self.path):
            yield Problem("claim", shown, "is not NAME:PATH with an absolute path, e.g. runs:/runs")
        elif why := name_problem(self.name):
            yield Problem("claim", shown, why)

    def holds(self, path: str) -> bool:
        """Whether a path is on it."""
        return f"{path}/".startswith(f"{self.path}/")


def claim_of(text: str) -> Claim:
    """`NAME:PATH` in its parts."""
    name, _, path = text.partition(":")
    return Claim(name, path.rstrip("/"))
