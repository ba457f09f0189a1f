"""What the answers of a machine mean: pure functions from plain values to findings."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.runtime.provenance import software
from pipelines.runtime.shipping import code_digest

CODE_ENV = "CASEMATE_CODE_DIGEST"  # of the client that started a doctor's job
MAX_SKEW, MIN_SKEW = 30.0, 2.0  # seconds: wrong, doubtful
GIB = 2**30
LITTLE_DISK = 10 * GIB
RAY_STOPS_AT = 0.05  # share of free disk below which Ray stores no objects on disk any more

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; a failed one says what to do."""

    check: str
    status: Status
    message: str

    def __str__(self) -> str:
        return f"{self.status:<4}  {self.check:<9} {self.message}"


def ok(check: str, message: str) -> Finding:
    return Finding(check, "ok", message)


def warn(check: str, message: str) -> Finding:
    return Finding(check, "warn", message)


def fail(check: str, message: str) -> Finding:
    return Finding(check, "FAIL", message)


def clock_finding(name: str, *, skew: float, doubt: float) -> Finding:
    """What a clock that differs by `skew` seconds, known up to `doubt`, means."""
    message = f"{name} differs by {skew:+.2f} s (+- {doubt:.2f})"
    if abs(skew) - doubt > MAX_SKEW:
        return fail("clock", f"{message}; start a time service (chrony, ntpd) on it")
    if abs(skew) - doubt > MIN_SKEW:
        return warn("clock", f"{message}; start a time service (chrony, ntpd) on it")
    return ok("clock", message)


def versions_finding(name: str, theirs: Mapping[str, str | None]) -> Finding:
    """Python and Ray must agree with the driver; other packages should."""
    ours: dict[str, str | None] = {"python": platform.python_version()}
    ours |= software()
    ours.pop("casemate")  # known better by its digest
    missing = [p for p in ours if theirs.get(p) is None]
    if missing:
        return fail("versions", f"{name} lacks {', '.join(missing)}; install requirements.lock")
    other = [f"{p} {theirs[p]} (here {ours[p]})" for p in ours if theirs[p] != ours[p]]
    minor = str(theirs["python"]).split(".")[:2] != str(ours["python"]).split(".")[:2]
    if minor or theirs["ray"] != ours["ray"]:
        remedy = "Ray and Python must be equal everywhere: install requirements.lock"
        return fail("versions", f"{name} has {', '.join(other)}; {remedy}")
    if other:
        remedy = "results may differ between machines: install requirements.lock"
        return warn("versions", f"{name} has {', '.join(other)}; {remedy}")
    return ok("versions", f"{name}: Python {ours['python']}, Ray {ours['ray']}, all as here")


def code_finding(name: str, theirs: Mapping[str, str]) -> Finding:
    """Workers must import the code that the driver runs."""
    if "error" in theirs:
        remedy = "install the wheel of this version there"
        return fail("code", f"{name} cannot import it ({theirs['error']}); {remedy}")
    ours = os.environ.get(CODE_ENV) or code_digest()
    if theirs["digest"] != ours:
        what = f"{name} has other code, {theirs['digest'][:8]} in {theirs['root']}"
        return fail("code", f"{what} (here {ours[:8]}); install the same version there")
    return ok("code", f"{name}: {ours[:8]} as here")


def gpu_finding(name: str, found: Mapping[str, Any], *, num_gpus: int) -> Finding:
    """Torch must see at least the GPUs that Ray hands out."""
    if "error" in found:
        return fail("gpus", f"{name}: {found['error']}; install requirements.lock and the driver")
    seen = len(found["names"])
    counts = f"{name}: Ray has {num_gpus}, torch sees {seen}"
    if seen < num_gpus:
        remedy = f"mend the driver (nvidia-smi), or start this node with --num-gpus={seen}"
        return fail("gpus", f"{counts}; {remedy}")
    if seen > num_gpus:
        return warn("gpus", f"{counts}; unused GPUs: start this node with --num-gpus={seen}")
    names = ", ".join(sorted(set(found["names"])))
    return ok("gpus", f"{counts}{f' ({names})' if names else ''}")


def storage_finding(
    name: str, found: Mapping[str, Any], *, root: object, seen_here: bool
) -> Finding:
    """A key written here is read there and the other way round, and is created once."""
    if not found.get("same"):
        why = found.get("error") or "is another folder: files that are written here are not there"
        remedy = "choose a --storage that all machines see: s3://bucket/runs, or a shared folder"
        return fail("storage", f"{name}: {root} {why}; {remedy}")
    if "error" in found:
        remedy = "give Ray's user the right to write there"
        return fail("storage", f"{name}: {root} {found['error']}; {remedy}")
    if not seen_here:
        remedy = "mount it without caching of names (NFS: lookupcache=positive)"
        return fail("storage", f"{name}: files that it writes to {root} are not here; {remedy}")
    if not found["refuses"]:
        remedy = "two runs would damage each other; use another storage"
        return fail("storage", f"{name}: {root} creates a key twice; {remedy}")
    return ok("storage", f"{name}: {root} is shared and writable")


def disk_finding(what: str, found: Mapping[str, int] | None) -> Finding:
    """Ray stops storing objects on a disk that is almost full."""
    if found is None:
        return fail("disk", f"{what} does not exist")
    free = f"{what} has {found['free'] / GIB:.1f} GiB free"
    if found["free"] < RAY_STOPS_AT * found["total"]:
        return fail("disk", f"{free}, below the 5 % at which Ray stops writing; free some space")
    if found["free"] < LITTLE_DISK:
        return warn("disk", f"{free}; long flows may need more")
    return ok("disk", free)


def space_finding(root: Path, found: Mapping[str, int], *, is_new: bool) -> Finding:
    """Free space of the storage; a mistyped folder is a new one."""
    new = " did not exist and was created; it" if is_new else ""
    free = f"{root}{new} has {found['free'] / GIB:.1f} GiB free"
    if found["free"] < GIB:
        return fail("storage", f"{free}; free some space, or choose another --storage")
    if found["free"] < LITTLE_DISK:
        return warn("storage", f"{free}; long flows may need more")
    return ok("storage", f"{free}, writable here")


def shm_finding(name: str, found: Mapping[str, int] | None, *, object_store: int) -> Finding:
    """Ray's object store must fit into the shared memory."""
    store = f"object store of {object_store / GIB:.1f} GiB"
    size = found["total"] if found else 0
    counts = f"{name}: {store} in {size / GIB:.1f} GiB of /dev/shm"
    if size < object_store:
        remedy = "Ray uses the disk instead, slowly: docker --shm-size, or a memory volume"
        return warn("memory", f"{counts}; {remedy}")
    return ok("memory", counts)
