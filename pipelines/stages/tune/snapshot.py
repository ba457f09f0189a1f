"""Snapshots of a search: one file with its whole state, replaced atomically.

Ray copies its state to the storage file by file and in place, so that a kill leaves empty ones, or
some that are older than others.
"""

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from components.core.files import atomic
from pipelines.stages.tune.schedulers import KeptScheduler
from pipelines.stages.tune.training import MISTAKE

SNAPSHOT = "snapshot.zip"
STATE = "experiment_state-"  # how Ray's file of all trials begins; a session's name follows
TUNER = "tuner.pkl"


class Snapshots(tune.Callback):  # type: ignore[misc]
    """Takes a snapshot whenever Ray has saved its state, with the scheduler's in it.

    None is taken after a user's mistake: it ends trials that must go on when it is mended.
    """

    def __init__(self, scheduler: TrialScheduler) -> None:
        self.scheduler, self.taken, self.ended_by_mistake = scheduler, 0, False

    def get_state(self) -> dict[str, object] | None:
        """Part of what Ray saves."""
        return self.scheduler.state() if isinstance(self.scheduler, KeptScheduler) else None

    def set_state(self, state: dict[str, object]) -> None:
        """Before a resumed search adds its trials."""
        self.scheduler.restore(state)

    def on_trial_result(self, *, result: Mapping[str, object], **_: object) -> None:
        self.ended_by_mistake |= MISTAKE in result

    def on_step_end(self, *, trials: Sequence[Trial], **_: object) -> None:
        self._take(trials)

    def on_experiment_end(self, *, trials: Sequence[Trial], **_: object) -> None:
        self._take(trials)

    def _take(self, trials: Sequence[Trial]) -> None:
        """Ray writes in this thread, so its files are complete and consistent."""
        if not trials or self.ended_by_mistake:
            return
        place = Path(trials[0].storage.experiment_fs_path)
        written = Path(trials[0].storage.experiment_driver_staging_path)
        states = {path.stat().st_mtime_ns: path for path in written.glob(f"{STATE}*.json")}
        if not states or max(states) == self.taken:
            return
        self.taken = max(states)
        session = states[self.taken].stem.removeprefix(STATE)
        pack([*written.glob(f"[!.]*-{session}.*"), place / TUNER], place / SNAPSHOT)


def pack(files: Iterable[Path], target: Path) -> None:
    """Write one archive of some files atomically; it survives a power failure."""
    with atomic(target) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for file in files:
            archive.write(file, file.name)


def unpack(place: Path) -> str | None:
    """Unpack the last snapshot for Ray; else return why the search cannot be resumed."""
    try:
        with zipfile.ZipFile(place / SNAPSHOT) as archive:
            if archive.testzip():
                return "its snapshot is damaged"
            for stale in [*place.glob("*.json"), *place.glob("*.pkl")]:
                stale.unlink()
            archive.extractall(place)
    except FileNotFoundError:
        return "it was killed before its first snapshot"
    except (OSError, zipfile.BadZipFile) as error:
        return f"its snapshot cannot be read ({error})"
    try:
        tune.ExperimentAnalysis(str(place))  # Ray would log a traceback and continue without values
    except Exception as error:  # the error depends on the version of Ray
        return f"this version of Ray cannot read its state ({type(error).__name__})"
    return None
