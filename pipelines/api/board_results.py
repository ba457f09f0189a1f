"""Figures of verified results that may be ranked, and what is left out of a leaderboard."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from components.core.errors import CasemateError, first_line
from components.evaluate.verdicts import Verdicts
from pipelines.api.figures import figures_of
from pipelines.api.found_results import RESULT_STAGES, FoundResult, LeftOut, results_at, survey
from pipelines.api.item_verdicts import ModelVerdicts, verdicts_of

UNKNOWN_DATASET = "its dataset is unknown: the prepared data are not beside it"
NAMING = frozenset({"dataset.json", "model/model.json"})  # files with a digest in them
CLEAN = ("clean", "smoothed.")  # figures without an adversary


@dataclass(frozen=True, eq=False)
class BoardResult:
    """One figure of one model in a result that verified."""

    model: str  # its name in the flow
    digest: str
    architecture: str
    dataset_name: str
    verdicts: Verdicts
    clean: Verdicts | None  # without the adversary, in the same result
    result: FoundResult

    @property
    def short_place(self) -> str:
        """FLOW/STEP-FINGERPRINT: the same wherever the storage is."""
        own = self.result
        return f"{own.flow}/{own.name}" if own.manifest else own.name

    @property
    def verdict(self) -> str:
        """`suspect`, `unchecked` or `reliable` attacks; `proven` or `measured` otherwise."""
        if self.verdicts.kind != "attacked":
            return self.verdicts.kind
        return self.verdicts.doubt.partition(":")[0].split(" ")[0] or "reliable"


def results_in(
    places: Sequence[str], tracking: str | None
) -> tuple[list[FoundResult], list[LeftOut]]:
    """Results of storages or of a tracking store, each once, and steps without one."""
    found: dict[str, FoundResult] = {}
    left_out: set[LeftOut] = set()
    surveys = [_tracked(tracking)] if tracking is not None else map(survey, places)
    for results, rest in surveys:
        found |= {r.place: r for r in results if r.stage in RESULT_STAGES}
        left_out |= set(rest)
    return [found[place] for place in sorted(found)], sorted(left_out)


def _tracked(uri: str) -> tuple[list[FoundResult], list[LeftOut]]:
    """The results that runs of MLflow stand for."""
    from pipelines.runtime.tracked_steps import all_steps

    results: list[FoundResult] = []
    rest: list[LeftOut] = []
    for step in all_steps(uri):
        if step.folder.partition(".")[0] not in RESULT_STAGES:
            continue
        place = f"{step.storage.rstrip('/')}/{step.flow}/{step.folder}"
        try:
            own = results_at(place) if step.storage else []
        except (CasemateError, OSError) as error:
            rest.append(LeftOut(place, f"cannot be read ({first_line(error)})"))
            continue
        if not step.storage:
            why = "its run does not tell its storage; rank that with --storage alone"
            rest.append(LeftOut(f"{step.flow}/{step.folder}", why))
        elif not own:
            rest.append(LeftOut(place, "is not finished; run its recipe again"))
        for result in own:
            is_current = result.manifest and result.manifest.mlflow_run_id == step.run_id
            if is_current:
                results.append(result)
            else:
                rest.append(LeftOut(place, f"run {step.run_id} is not its run: it ran again since"))
    return results, rest


def rankable(
    results: Iterable[FoundResult], progress: Callable[[str], None]
) -> tuple[list[BoardResult], list[LeftOut]]:
    """Verified figures of results, and why others are left out."""
    found: list[BoardResult] = []
    left_out: list[LeftOut] = []
    for result in results:
        progress(f"verifying {result.place}")
        try:
            every = verdicts_of(result)
            names = {figure.name: None for figure in figures_of(result)}
            changed = _changed_input(result)
        except CasemateError as error:
            left_out.append(LeftOut(result.place, first_line(error)))
            continue
        if changed:
            left_out.append(LeftOut(result.place, changed))
            continue
        left_out += _refusals(result, every, names)
        found += _accepted(result, every)
    return found, left_out


def _refusals(
    result: FoundResult, every: Sequence[ModelVerdicts], names: Mapping[str, None]
) -> Iterator[LeftOut]:
    """One line for each reason; it names figures if others of the result count."""
    reasons: dict[str, list[str]] = {}
    for own in every:
        if why := _refusal(own.verdicts):
            reasons.setdefault(why, []).append(own.verdicts.figure)
    if unread := [name for name in names if name not in {v.verdicts.figure for v in every}]:
        reasons["has no verdicts per item"] = unread
    for why, figures in reasons.items():
        which = list(dict.fromkeys(figures))
        is_whole = set(which) >= names.keys()
        yield LeftOut(result.place, why if is_whole else f"{', '.join(which)}: {why}")


def _refusal(own: Verdicts) -> str:
    return own.refusal or ("" if own.dataset else UNKNOWN_DATASET)


def _accepted(result: FoundResult, every: Sequence[ModelVerdicts]) -> Iterator[BoardResult]:
    """Whole figures; variants of suites are not ranked one by one."""
    name = _dataset_name(result)
    for own in every:
        if _refusal(own.verdicts) or own.verdicts.is_part:
            continue
        clean = None if is_clean(own.verdicts) else _clean_beside(own, every)
        yield BoardResult(
            own.model, own.digest, own.architecture, name, own.verdicts, clean, result
        )


def is_clean(own: Verdicts) -> bool:
    return own.base.startswith(CLEAN)


def _clean_beside(own: ModelVerdicts, every: Sequence[ModelVerdicts]) -> Verdicts | None:
    """Accuracy of the same model on the same items, in the same result."""
    for other in every:
        same = other.digest == own.digest and other.verdicts.item_ids == own.verdicts.item_ids
        if same and is_clean(other.verdicts):
            return other.verdicts
    return None


def _dataset_name(result: FoundResult) -> str:
    """The name of the dataset's source, where the prepared data or the metrics tell it."""
    from pipelines.api.item_verdicts import dataset_of

    return str(dataset_of(result).get("source", {}).get("name", ""))


def _changed_input(result: FoundResult) -> str:
    """Why an attack's inputs can no longer identify its dataset and models; empty: they can.

    Certificates and evaluations have both digests in their own files.
    """
    from components.core.digests import digest_file
    from pipelines.runtime.artifacts import manifest_of
    from pipelines.runtime.storage import input_of

    if result.manifest is None or result.stage != "attack":
        return ""
    known = result.manifest.inputs
    for name, relative in result.manifest.input_folders.items():
        folder = input_of(result.files, relative)
        with suppress(FileNotFoundError):  # gone: then its digest is unknown
            manifest = manifest_of(folder)
            if manifest is None or name not in known:
                continue
            if manifest.content != known[name]["content"]:
                return f"its input {name} was made again since"
            for file in NAMING & manifest.files.keys():
                if digest_file(folder / file) != manifest.files[file]["sha256"]:
                    return f"does not verify: {file} of its input {name} was changed"
    return ""
