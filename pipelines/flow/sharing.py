"""Equal datasets and models of several recipes in one storage are made once.

A finished step of a shared stage is announced under its fingerprint:
`shared/<fingerprint>/<digest of its key>` holds its key. A recipe without an own one uses
it where it is. Announcements of steps that are gone, or were replaced, are passed over.
"""

from contextlib import suppress
from dataclasses import replace

from components.core.digests import digest_bytes
from components.core.errors import CasemateError
from components.core.folders import is_below
from pipelines.flow.plan import PlannedStep
from pipelines.runtime.storage import StepPlace
from pipelines.stages.registry import STAGES

SHARED = "shared"


def announce(step: PlannedStep) -> None:
    """Let other recipes find a finished step."""
    if _is_shared(step):
        key = step.place.key.encode()
        step.place.store.put_new(f"{_folder(step)}/{digest_bytes(key)[:16]}", key)


def is_own(step: PlannedStep) -> bool:
    """Whether it is a step of the recipe itself."""
    return step.place == step.own


def own(step: PlannedStep) -> PlannedStep:
    """The step in the recipe's own folder."""
    return replace(step, place=step.own)


def _is_shared(step: PlannedStep) -> bool:
    return not step.given and STAGES[step.step.stage].shared


def _folder(step: PlannedStep) -> str:
    return f"{SHARED}/{step.fingerprint}"


def shared(step: PlannedStep) -> PlannedStep:
    """The step, or an equal finished one of another recipe if the own one is not finished."""
    step = own(step)
    if not _is_shared(step) or step.finished:
        return step
    store = step.place.store
    for entry in store.listing(_folder(step)):
        key = (store.find(entry.key) or b"").decode(errors="replace")
        if not is_below(key) or key.count("/") != 1:  # not written by `announce`
            continue
        there = StepPlace(step.place.storage, key)
        with suppress(CasemateError):  # damaged: the other recipe's to mend
            if there.is_finished(step.fingerprint):
                return replace(step, place=there)
    return step
