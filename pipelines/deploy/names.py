"""Names that Kubernetes and KubeRay take, and what recipes' names become."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from components.core.digests import digest_bytes
from components.core.settings import Problem

MAX_LABEL = 63  # RFC 1123
MAX_SUBDOMAIN = 253
MAX_RAYJOB = 47  # KubeRay adds to it and to the names of its services
GENERATED = 6  # `-x7k2p`, which Argo, or whoever creates the job repeatedly, adds
MAX_NAME = MAX_RAYJOB - GENERATED
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")


def name_problem(name: str, *, most: int = MAX_LABEL) -> str | None:
    """Why Kubernetes would refuse a name, as a remedy; None for a good one."""
    return _problem(name, _LABEL, "a-z, 0-9 and - inside", most)


def reference_problem(name: str) -> str | None:
    """The same for the name of a Secret, a claim or a queue, which may have dots."""
    return _problem(name, _SUBDOMAIN, "a-z, 0-9, - and . inside", MAX_SUBDOMAIN)


def _problem(name: str, form: re.Pattern[str], words: str, most: int) -> str | None:
    if not form.fullmatch(name):
        return f"is not a name of Kubernetes (RFC 1123): {words}"
    return f"has {len(name)} characters; at most {most}" if len(name) > most else None


def resource_name(text: str, *, most: int = MAX_NAME) -> str:
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
        elif why := reference_problem(self.name):
            yield Problem("claim", shown, why)

    @property
    def volume(self) -> str:
        """The name of its volume in a pod."""
        return resource_name(f"claim-{self.name}", most=MAX_LABEL)

    def holds(self, path: str) -> bool:
        """Whether a path is on it."""
        return f"{path}/".startswith(f"{self.path}/")


def claim_of(text: str) -> Claim:
    """`NAME:PATH` in its parts."""
    name, _, path = text.partition(":")
    return Claim(name, path.rstrip("/"))
