"""Names that Kubernetes and KubeRay take, and what recipes' names become."""

import re
from typing import NamedTuple

from components.core.digests import digest_bytes

MAX_LABEL = 63  # RFC 1123
MAX_SUBDOMAIN = 253
MAX_RAYJOB = 47  # KubeRay adds to it and to the names of its services
GENERATED = 6  # `-x7k2p`, which Argo or Airflow adds to each job
MAX_NAME = MAX_RAYJOB - GENERATED
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")
# What the image, Kubernetes or the pods' other volumes have there; a claim would hide it.
SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/home/casemate", "/home/ray", "/lib", "/lib32", "/lib64"),
    *("/opt", "/proc", "/root", "/run", "/sbin", "/sys", "/tmp/ray", "/usr", "/var"),
)


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

    @property
    def volume(self) -> str:
        """The name of its volume in a pod."""
        return resource_name(f"claim-{self.name}", most=MAX_LABEL)

    def holds(self, path: str) -> bool:
        """Whether a path is on it; one with `..` may lead out of it."""
        return not leads_up(path) and _is_below(path, self.path)


def claim_of(text: str) -> Claim:
    """`NAME:PATH` in its parts."""
    name, _, path = text.partition(":")
    return Claim(name, path.rstrip("/"))


def claim_problem(text: str) -> str | None:
    """Why pods cannot mount `NAME:PATH`, as a remedy; None for a good one."""
    name, path = claim_of(text)
    if text.endswith(":/") or _hides_the_system(path):
        return "would hide files that its pods need; choose another path, e.g. /runs or /mnt/data"
    if not _PATH.fullmatch(path):
        return "is not NAME:PATH with an absolute path, e.g. runs:/runs"
    if leads_up(path) or "." in path.split("/"):
        return "has . or .. in its path; write the path without them, e.g. runs:/runs"
    return reference_problem(name)


def leads_up(path: str) -> bool:
    """Whether a path has `..` in it."""
    return ".." in path.split("/")


def _hides_the_system(path: str) -> bool:
    """Whether a mount at a path is at, below or above a folder of the system."""
    return any(_is_below(path, own) or (path and _is_below(own, path)) for own in SYSTEM)


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")
