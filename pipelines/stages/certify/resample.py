"""`verify --resample`: repeat the votes of random items and compare every prediction."""

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from components.certify.registry import family_of
from components.certify.tasks import DataSource, ModelSource, VoteTask, digest_of, open_data
from components.certify.vote_rows import VOTES_NAME, ItemVotes, Votes
from components.certify.votes import read_votes
from components.core.arithmetic import EXACT, Arithmetic, is_usable
from components.core.errors import CasemateError
from components.core.folders import Folder, within
from components.core.types import Array
from components.data.memory import MemoryDataset
from components.data.prepared import Split
from components.denoising.loading import source_digest, source_of
from components.models.checkpoint import read_header
from components.models.pixels import PixelModel
from pipelines.runtime.artifacts import manifest_of
from pipelines.runtime.progress import say
from pipelines.runtime.storage import input_of
from pipelines.stages.certify.in_process import like_a_worker

SPAN = 256  # items of the dataset that are read at once


def resample(
    folder: Folder,
    *,
    count: int,
    model: ModelSource | None,
    data: DataSource | None,
    denoiser: Folder | None = None,
) -> list[str]:
    """Problems found by repeating the votes of `count` random items; none: every vote is equal.

    Items are chosen by the operating system's randomness, so the choice cannot be predicted.
    """
    if count < 1:
        raise CasemateError("--resample", count, "is not a number of items; write 1 or more")
    votes = read_votes(folder / VOTES_NAME)
    model_folder, data_folder = _places(folder, votes, model, data)
    _check_identity(votes, model_folder, data_folder)
    settings = family_of(votes.header.kind).vote_settings(votes.header)
    behind = _denoiser(folder, votes, denoiser)
    with like_a_worker(_arithmetic(votes, model_folder)):
        return _differences(votes, VoteTask(data_folder, model_folder, settings, behind), count)


def _arithmetic(votes: Votes, model: ModelSource) -> Arithmetic:
    """How the votes were computed; an error if this machine cannot repeat it."""
    recorded, key = votes.header.settings, "verify --resample"
    device = recorded["device"]
    here = model.mean.device.type if isinstance(model, PixelModel) else device
    if here != device or not is_usable(device):
        remedy = "computed these votes and is not available here: near ties would differ; "
        remedy += "repeat them where it is, or verify without --resample"
        raise CasemateError(key, device, remedy)
    switches = recorded.get("float32")
    if switches is None:
        if device != "cpu":
            say(f"{key}: the votes do not record their use of TF32; they are repeated without it")
        return EXACT
    try:
        return Arithmetic.read(switches)
    except ValueError as error:
        remedy = f"{error}: this version cannot compute as these votes were computed"
        raise CasemateError(f"{key}: float32", switches, remedy) from error


def _differences(votes: Votes, task: VoteTask[Any], count: int) -> list[str]:
    """Problems of the votes of `count` random items, repeated."""
    family = family_of(votes.header.kind)
    voter, known = family.worker(task), _known_items(task.items(), votes.header.num_items)
    position = {item: i for i, item in enumerate(known)}
    labels = {item.item_id: item.label for item in votes.items()}
    if wrong := _strangers(labels, known) or family.wrong_records(task, votes.header):
        return wrong
    chosen = set(secrets.SystemRandom().sample(sorted(labels), min(count, len(labels))))
    drawn = [(position[item.item_id], item) for item in votes.items() if item.item_id in chosen]
    kept, differing = family.kept_votes(votes.header), []
    for index, item in drawn:
        differing += _compare(voter(family.repeat_payload(index, item)), item, kept=kept)
    if problems := [*_wrong_labels(labels, known), *differing]:
        return family.explain_differences(task, drawn) or problems
    return []


def _strangers(labels: Mapping[str, int], known: Mapping[str, int]) -> list[str]:
    """Items that are not in the dataset, and those that are missing from the votes."""
    voted = set(labels)
    return [
        *(f"item {name}: is not among the first test items" for name in sorted(voted - set(known))),
        *(f"item {name}: is missing from the votes" for name in sorted(set(known) - voted)),
    ]


def _known_items(split: Split, number: int) -> dict[str, int]:
    """Labels of the first items by their ids, in order; few images are in memory at a time."""
    known: dict[str, int] = {}
    for start in range(0, min(number, len(split)), SPAN):
        part = split.span(start, min(start + SPAN, number))
        known |= dict(zip(part.item_ids, part.labels.tolist(), strict=True))
    return known


def _wrong_labels(labels: Mapping[str, int], known: Mapping[str, int]) -> list[str]:
    """Wrong labels of all items, resampled or not: labels need no votes."""
    return [
        f"item {item_id}: label {label}, dataset says {known[item_id]}"
        for item_id, label in labels.items()
        if label != known[item_id]
    ]


def _places(
    folder: Folder, votes: Votes, model: ModelSource | None, data: DataSource | None
) -> tuple[ModelSource, DataSource]:
    """The sources of model and data: as given, else the folders in the step's manifest."""
    inputs = _inputs(folder)
    model, data = (
        model or _find(inputs, folder, votes.header.model_digest),
        data or (input_of(folder, inputs["prepare"]) if "prepare" in inputs else None),
    )
    if model is None or data is None:
        raise CasemateError(
            "verify",
            folder,
            "does not name the model and data of its votes; name both (--model, --data)",
        )
    return model, data


def _inputs(folder: Folder) -> Mapping[str, str]:
    """The folders that a step read, by the names of the steps that made them."""
    manifest = manifest_of(folder)
    return {} if manifest is None else manifest.input_folders


def _find(inputs: Mapping[str, str], folder: Folder, digest: str) -> Folder | None:
    """The model among a step's inputs: the one with this digest, else any (refused later)."""
    made = [input_of(folder, p) for n, p in inputs.items() if n.startswith("train.")]
    places = [within(place, "model") for place in made]
    places += [input_of(folder, p) for n, p in inputs.items() if n.startswith("model.")]
    known = [place for place in places if (place / "model.json").is_file()]
    return next((p for p in known if read_header(p)["digest"] == digest), next(iter(places), None))


def _denoiser(folder: Folder, votes: Votes, given: Folder | None) -> str | None:
    """The source of the denoiser that the votes name, if they name one."""
    recorded = votes.header.settings.get("denoiser")
    if recorded is None:
        return None
    inputs = _inputs(folder)
    on_disk = [input_of(folder, p) for n, p in inputs.items() if n.startswith("denoiser.")]
    place = given or next(iter(on_disk), None) or _find(inputs, folder, recorded["digest"])
    if place is None:
        remedy = "does not name the denoiser of its votes; use --denoiser"
        raise CasemateError("verify", folder, remedy)
    digest = source_digest(source_of(place))
    if digest != recorded["digest"]:
        remedy = f"has digest {digest[:12]}, the votes are of {recorded['digest'][:12]}"
        raise CasemateError("verify --denoiser", place, remedy)
    return source_of(place)


def _check_identity(votes: Votes, model: ModelSource, data: DataSource) -> None:
    """Refuse a model or dataset other than those the votes are of."""
    header = votes.header
    for name, place, found, expected in (
        ("model", model, digest_of(model), header.model_digest),
        ("data", data, open_data(data).digest, header.dataset_digest),
    ):
        if found != expected:
            remedy = f"has digest {found[:12]}, the votes are of {expected[:12]}"
            where = "as given" if isinstance(place, PixelModel | MemoryDataset) else place
            raise CasemateError(f"verify --{name}", where, remedy)


def _compare(table: pa.Table, item: ItemVotes, *, kept: Array | slice) -> list[str]:
    """Differences between stored and repeated predictions of one item."""
    problems = []
    for row in table.to_pylist():
        stored, again = item.streams[row["stream"]], np.array(row["predictions"])[kept]
        if row["image_sha256"] != item.image_sha256:
            problems.append(f"item {item.item_id}: image_sha256 differs from the dataset's")
        if not np.array_equal(stored, again):
            both = min(len(stored), len(again))  # choosing a class may stop at another look
            count = len(stored) - int((stored[:both] == again[:both]).sum())
            problems.append(
                f"item {item.item_id}: {count} of {len(stored)} {row['stream']} votes differ"
            )
    return problems
