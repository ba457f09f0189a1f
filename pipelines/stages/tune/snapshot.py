"""Snapshots of a search: its whole state in one object, which is never overwritten.

Ray copies its state to the storage file by file and in place, so that a kill leaves empty ones, or
some that are older than others.
"""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from pipelines.runtime.store import Store, open_store
from pipelines.stages.tune.schedulers import KeptScheduler
from pipelines.stages.tune.training import EPOCHS, MISTAKE

SNAPSHOTS = "snapshots"  # below the place of the search, numbered
KEPT = 2  # snapshots
STATE = "experiment_state-"  # how Ray's file of all trials begins; a session's name follows
TUNER = "tuner.pkl"
REPORTED: dict[str, int] = {}  # epochs of the trials of this process's search


class Snapshots(tune.Callback):  # type: ignore[misc]
    """Takes a snapshot whenever Ray has saved its state, with the scheduler's in it.

    None is taken after a user's mistake: it ends trials that must go on when it is mended.
    """

    def __init__(self, scheduler: TrialScheduler, scheme: str = "") -> None:
        self.scheduler, self.taken, self.ended_by_mistake = scheduler, 0, False
        self.scheme = scheme  # of the storage's URI: Ray keeps the rest

    def get_state(self) -> dict[str, object] | None:
        """Part of what Ray saves."""
        return self.scheduler.state() if isinstance(self.scheduler, KeptScheduler) else None

    def set_state(self, state: dict[str, object]) -> None:
        """Before a resumed search adds its trials."""
        self.scheduler.restore(state)

    def on_trial_result(
        self, *, trial: Trial | None, result: Mapping[str, int], **_: object
    ) -> None:
        self.ended_by_mistake |= MISTAKE in result
        if trial is not None:
            REPORTED[trial.trial_id] = result.get(EPOCHS, 0)

    def on_step_end(self, *, trials: Sequence[Trial], **_: object) -> None:
        self._take(trials)

    def on_experiment_end(self, *, trials: Sequence[Trial], **_: object) -> None:
        self._take(trials)

    def _take(self, trials: Sequence[Trial]) -> None:
        """Ray writes in this thread, so its files are complete and consistent."""
        if not trials or self.ended_by_mistake:
            return
        written = Path(trials[0].storage.experiment_driver_staging_path)
        states = {path.stat().st_mtime_ns: path for path in written.glob(f"{STATE}*.json")}
        if not states or max(states) == self.taken:
            return
        self.taken = max(states)
        session = states[self.taken].stem.removeprefix(STATE)
        place = open_store(f"{self.scheme}{trials[0].storage.experiment_fs_path}")
        files = {path.name: path.read_bytes() for path in written.glob(f"[!.]*-{session}.*")}
        pack({**files, TUNER: place.get(TUNER)}, place)


def pack(files: Mapping[str, bytes], place: Store) -> None:
    """Write one archive of some files; the ones before the last are removed."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, file in files.items():
            archive.writestr(name, file)
    before = [entry.key for entry in place.listing(SNAPSHOTS)]
    number = _number_of(before[-1]) + 1 if before else 0
    while not place.put_new(f"{SNAPSHOTS}/{number:09d}.zip", content.getvalue()):
        number += 1
    place.delete(before[: 1 - KEPT])


def _number_of(key: str) -> int:
    return int(PurePosixPath(key).stem)


def unpack(place: Store) -> str | None:
    """Unpack the last snapshot for Ray; else return why the search cannot be resumed."""
    taken = [entry.key for entry in place.listing(SNAPSHOTS)]
    if not taken:
        return "it was killed before its first snapshot"
    try:
        with zipfile.ZipFile(io.BytesIO(place.get(taken[-1]))) as archive:
            if archive.testzip():
                return "its snapshot is damaged"
            files = {name: archive.read(name) for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile) as error:
        return f"its snapshot cannot be read ({error})"
    keys = [entry.key for entry in place.listing("")]
    place.delete([key for key in keys if "/" not in key and key.endswith((".json", ".pkl"))])
    for name, content in files.items():
        place.put_same(name, content)
    try:
        # Ray would log a traceback and continue without values.
        trials = tune.ExperimentAnalysis(place.root).trials or []
    except Exception as error:  # the error depends on the version of Ray
        return f"this version of Ray cannot read its state ({type(error).__name__})"
    REPORTED.update({t.trial_id: int((t.last_result or {}).get(EPOCHS, 0)) for t in trials})
    return None
