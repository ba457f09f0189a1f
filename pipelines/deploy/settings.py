"""Settings of a manifest: what a recipe does not say about the cluster it runs on."""

import re
from collections.abc import Collection, Iterator
from typing import Annotated, Literal

from annotated_types import Ge, Le

from components.core.settings import Count, Hint, Problem, Settings, settings
from pipelines.deploy.names import (
    MAX_LABEL,
    MAX_NAME,
    claim_of,
    claim_problem,
    name_problem,
    reference_problem,
)

Kind = Literal["rayjob", "raycluster", "argo", "ray-up", "skypilot"]
ON_KUBERNETES = ("rayjob", "raycluster", "argo")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
IMAGE = re.compile(
    r"[a-z0-9]+([._-]+[a-z0-9]+)*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"  # registry, path
    r"(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
SPOT_LABEL = re.compile(r"([A-Za-z0-9.-]+/)?[A-Za-z0-9._-]+=[A-Za-z0-9._-]+")
MAX_HOURS = 87_600  # ten years; Kubernetes counts seconds with 31 bits
MAX_RETRIES = 100
SET_BY_CASEMATE = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS")
# Flags with defaults that a kind has no use for.
UNUSED: dict[str, tuple[str, ...]] = {
    "raycluster": ("deadline", "retries"),
    "ray-up": ("deadline", "retries", "spot_label"),
    "skypilot": ("retries", "spot_label"),
}
Hours = Annotated[
    float, Ge(1 / 60), Le(MAX_HOURS), Hint(f"is outside 1/60 (a minute) to {MAX_HOURS} hours")
]
Retries = Annotated[int, Ge(0), Le(MAX_RETRIES), Hint(f"is outside 0 to {MAX_RETRIES}")]


@settings
class ManifestSettings(Settings):
    """What `casemate manifest` takes besides a recipe; each field is a flag."""

    kind: Kind = "rayjob"
    image: str | None = None
    """Container image with this version of Casemate and the locked packages."""
    name: str | None = None
    """Of the job or cluster; None: from the recipe's name."""
    namespace: str | None = None
    """None: the one that kubectl is asked for."""
    queue: str | None = None
    """Local queue of Kueue; the cluster then has a fixed size, since Kueue refuses autoscaling."""
    claim: tuple[str, ...] = ()
    """NAME:PATH of PersistentVolumeClaims that every pod mounts."""
    secret: str | None = None
    """Secret whose keys become variables of every pod; with `env`, only those."""
    env: tuple[str, ...] = ()
    """Names of variables that come from the Secret."""
    node_cpus: Count | None = None
    """Of a worker node; None: what the recipe's workers need, at least 4."""
    node_memory: Count | None = None
    """GiB; None: 4 per CPU, 32 per GPU."""
    node_gpus: Count | None = None
    """None: what one worker needs."""
    max_workers: Count | None = None
    """Worker nodes of a group at most; None: what the recipe asks for, else 4."""
    spot: bool = False
    """Workers, never the head, on machines that may be taken away."""
    spot_label: str = "cloud.google.com/gke-spot=true"
    """Label and taint of spot nodes on Kubernetes; this one is GKE's."""
    deadline: Hours = 24.0
    """Hours after which the flow is ended; the same file continues it."""
    retries: Retries = 2
    """New clusters after a failed one; finished work is kept."""

    @property
    def on_kubernetes(self) -> bool:
        return self.kind in ON_KUBERNETES

    def problems(self) -> Iterator[Problem]:
        if not self.image:
            remedy = "is needed: name the image that holds Casemate, e.g. registry/casemate:0.1.0"
            yield Problem("image", "", remedy)
        elif not IMAGE.fullmatch(self.image):
            yield Problem("image", self.image, "is not an image; write registry/path:tag")
        yield from self._names()
        for name in self.env:
            if not VARIABLE.fullmatch(name):
                shown = name.partition("=")[0]
                yield Problem("env", shown, "is not the name of a variable; write the name alone")
            elif name in SET_BY_CASEMATE:
                yield Problem("env", name, "is set by the file itself; leave it out")
        if not SPOT_LABEL.fullmatch(self.spot_label):
            yield Problem("spot_label", self.spot_label, "is not label=value")
        yield from self._misplaced()

    def _names(self) -> Iterator[Problem]:
        """Names that Kubernetes or KubeRay would refuse, and paths that are taken."""
        for field, most in (("name", MAX_NAME), ("namespace", MAX_LABEL)):
            value = getattr(self, field)
            if value is not None and (why := name_problem(value, most=most)):
                yield Problem(field, value, why)
        if self.name and self.name[0].isdigit():
            yield Problem("name", self.name, "does not start with a letter, as KubeRay demands")
        for field in ("queue", "secret"):
            value = getattr(self, field)
            if value is not None and (why := reference_problem(value)):
                yield Problem(field, value, why)
        taken: list[str] = []
        for text in self.claim:
            if why := claim_problem(text):
                yield Problem("claim", text, why)
            elif (path := claim_of(text).path) in taken:
                yield Problem("claim", path, "is mounted already; choose another path")
            else:
                taken.append(path)

    def _misplaced(self) -> Iterator[Problem]:
        """Settings that this kind of file would ignore."""
        only = "belongs to Kubernetes; leave it out"
        for field in () if self.on_kubernetes else ("namespace", "queue", "claim", "secret"):
            if value := getattr(self, field):
                yield Problem(field, " ".join(value) if field == "claim" else value, only)
        if self.env and self.on_kubernetes and not self.secret:
            remedy = "comes from a Secret; name it with --secret"
            yield Problem("env", self.env[0], remedy)
        if self.env and self.kind == "ray-up":
            remedy = "cannot be handed to machines by ray up; use their role, or submit --env"
            yield Problem("env", self.env[0], remedy)


def unused(own: ManifestSettings, given: Collection[str]) -> Iterator[Problem]:
    """Settings that were given, though they have defaults, and that this kind would ignore."""
    for field in UNUSED.get(own.kind, ()):
        if field in given:
            yield Problem(field, getattr(own, field), f"is not used by {own.kind}; leave it out")
    if "spot_label" in given and not own.spot:
        yield Problem("spot_label", own.spot_label, "is used with --spot only; add it")
