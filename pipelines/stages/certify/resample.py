"""`verify --resample`: vote again on random items with the model and compare every prediction."""

import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.certify.l2.evidence import METHODS, method_of
from components.certify.l2.reach import Method
from components.certify.l2.settings import GaussianSettings
from components.certify.patch.evidence import (
    DOUBLE_MASKING,
    ablations_of,
    asked_ablations,
    stopped_for,
)
from components.certify.patch.settings import AblationSettings, DoubleMaskingSettings
from components.certify.patch.thinning import positions_among
from components.certify.settings import CertificateSettings
from components.certify.votes import VOTES_NAME, ItemVotes, Votes, read_votes
from components.core.errors import CasemateError
from components.core.types import Array
from components.data.prepared import PreparedDataset, Split
from components.denoising.loading import source_digest, source_of
from components.models.checkpoint import read_header
from components.models.voting import Way
from pipelines.runtime.artifacts import read_manifest
from pipelines.stages.certify.worker import (
    Block,
    GaussianVoter,
    VoteConfig,
    denoiser_settings,
    make_voter,
)

# Of sections that claim nothing and only draw: any that the method allows.
ANY_PROB: Mapping[Method, float] = {"fixed": 0.2, "sequential": 0.2, "randomized": 0.04}

SPAN = 256  # items of the dataset that are read at once


def resample(
    path: Path,
    *,
    count: int,
    model: Path | None,
    data: Path | None,
    denoiser: Path | None = None,
) -> list[str]:
    """Problems found by voting again on `count` random items; an empty list means bit-equal votes.

    Items are chosen by the operating system's randomness: nobody can prepare for the choice.
    """
    if count < 1:
        raise CasemateError("--resample", count, "is no number of items; write 1 or more")
    folder = path if path.is_dir() else path.parent
    votes = read_votes(folder / VOTES_NAME)
    model_folder, data_folder = _places(folder, votes, model, data)
    _check_identity(votes, model_folder, data_folder)
    torch.set_num_threads(1)  # as a certification worker with one CPU
    config = _config(votes, model_folder, data_folder, _denoiser(folder, votes, denoiser))
    voter = make_voter(config)
    known = _known_items(voter.items, votes.header["num_items"])  # type: ignore[attr-defined]
    position = {item: i for i, item in enumerate(known)}
    items = sorted(votes.items(), key=lambda item: item.item_id)
    expected = set(position)
    strangers = sorted(item.item_id for item in items if item.item_id not in expected)
    missing = sorted(expected - {item.item_id for item in items})
    if strangers or missing:
        return [
            *(f"item {name}: is not among the first test items" for name in strangers),
            *(f"item {name}: was certified by nobody, the votes leave it out" for name in missing),
        ]
    if said := _wrongly_announced(votes, config):
        return said
    chosen = secrets.SystemRandom().sample(items, min(count, len(items)))
    kept = _kept(votes)
    problems = _wrong_labels(items, known)
    problems += [p for item in chosen for p in _compare(voter, config, item, position, kept=kept)]
    if problems and isinstance(voter, GaussianVoter):
        return _switched(voter, chosen, position) or problems
    return problems


def _known_items(split: Split, number: int) -> dict[str, int]:
    """Labels of the first items by their ids, in order; few images are in memory at a time."""
    known: dict[str, int] = {}
    for start in range(0, min(number, len(split)), SPAN):
        part = split.span(start, min(start + SPAN, number))
        known |= dict(zip(part.item_ids, part.labels.tolist(), strict=True))
    return known


def _wrong_labels(items: Sequence[ItemVotes], known: Mapping[str, int]) -> list[str]:
    """Of all items, drawn or not: asking for labels needs no votes."""
    return [
        f"item {item.item_id}: label {item.label}, dataset says {known[item.item_id]}"
        for item in items
        if item.label != known[item.item_id]
    ]


def _wrongly_announced(votes: Votes, config: VoteConfig) -> list[str]:
    """What the votes say of their denoiser that is not so."""
    told = votes.header["settings"].get("denoiser", {})
    known = denoiser_settings(config).get("denoiser", {})
    return [
        f"{VOTES_NAME}: says that the denoiser's {name} is {told.get(name)!r}, it is {value!r}"
        for name, value in known.items()
        if told.get(name) != value
    ]


def _switched(
    voter: GaussianVoter, items: Sequence[ItemVotes], position: Mapping[str, int]
) -> list[str]:
    """The one problem behind all differences, if the draws are those of another method."""
    section = voter.config.section
    assert isinstance(section, GaussianSettings)

    def drawn_for(method: Method) -> bool:
        other = copy(voter)
        other.config = replace(voter.config, section=replace(section, method=method))
        return all(_drawn_again(other, item, position[item.item_id]) for item in items)

    if drawn_for(section.method):
        return []
    return [
        f"{VOTES_NAME}: its draws are those of method {method}, not of {section.method}: a method "
        "that is chosen when draws are known voids the failure probability"
        for method in METHODS
        if method != section.method and drawn_for(method)
    ]


def _drawn_again(voter: GaussianVoter, item: ItemVotes, index: int) -> bool:
    stored = item.streams["estimate"]
    again = voter([Block(index, "estimate", 0, len(stored))])["predictions"][0].as_py()
    return np.array_equal(stored, again)


def _kept(votes: Votes) -> Array | slice:
    """Which of the predictions that are asked for again the file keeps: all, unless thinned."""
    if "asked_stride" not in votes.header["settings"]:
        return slice(None)
    return positions_among(ablations_of(votes.header), asked_ablations(votes.header))


def _places(folder: Path, votes: Votes, model: Path | None, data: Path | None) -> tuple[Path, Path]:
    """Where model and data are: as named, else what the step's manifest says it read."""
    inputs = _inputs(folder)
    model, data = (
        model or _find(inputs, folder, votes.header["model_digest"]),
        data or (folder / inputs["prepare"] if "prepare" in inputs else None),
    )
    if model is None or data is None:
        raise CasemateError(
            "verify", folder, "does not say which model and data voted; use --model and --data"
        )
    return model, data


def _inputs(folder: Path) -> Mapping[str, str]:
    """The folders that a step read, by the names of the steps that made them."""
    manifest = read_manifest(folder)
    return {} if manifest is None else manifest.input_folders


def _find(inputs: Mapping[str, str], folder: Path, digest: str) -> Path | None:
    """The model among a step's inputs: the one with this digest, else any, to be told apart."""
    places = [folder / p / "model" for n, p in inputs.items() if n.startswith("train.")]
    places += [folder / p for n, p in inputs.items() if n.startswith("model.")]
    known = [place for place in places if (place / "model.json").is_file()]
    return next((p for p in known if read_header(p)["digest"] == digest), next(iter(places), None))


def _denoiser(folder: Path, votes: Votes, given: Path | None) -> str | None:
    """The source of the denoiser that the votes name, if they name one."""
    settings = votes.header["settings"].get("denoiser")
    if settings is None:
        return None
    inputs = _inputs(folder)
    on_disk = [folder / p for n, p in inputs.items() if n.startswith("denoiser.")]
    place = given or next(iter(on_disk), None) or _find(inputs, folder, settings["digest"])
    if place is None:
        remedy = "does not say which denoiser stood in front of the model; use --denoiser"
        raise CasemateError("verify", folder, remedy)
    digest = source_digest(source_of(place))
    if digest != settings["digest"]:
        remedy = f"has digest {digest[:12]}, the votes are of {settings['digest'][:12]}"
        raise CasemateError("verify --denoiser", place, remedy)
    return source_of(place)


def _check_identity(votes: Votes, model: Path, data: Path) -> None:
    found = {"model": read_header(model)["digest"], "dataset": PreparedDataset.open(data).digest}
    for name, digest in found.items():
        if digest != votes.header[f"{name}_digest"]:
            raise CasemateError(
                f"verify --{'data' if name == 'dataset' else name}",
                data if name == "dataset" else model,
                f"has digest {digest[:12]}, the votes are of {votes.header[f'{name}_digest'][:12]}",
            )


def _config(votes: Votes, model: Path, data: Path, denoiser: str | None) -> VoteConfig:
    header: dict[str, Any] = votes.header
    settings = header["settings"]
    return VoteConfig(
        data,
        model,
        _section(header),
        settings.get("band"),
        settings.get("run_seed", 0),
        settings["device"],
        settings.get("token_policy"),
        _way(settings.get("way", {"path": "plain"})),  # not recorded: there was one path only
        denoiser,
    )


def _way(recorded: Any) -> Way:
    try:
        return Way(**recorded)
    except (TypeError, ValueError) as error:
        remedy = f"is no record of how votes were computed ({error})"
        raise CasemateError("verify: votes' way", recorded, remedy) from error


def _section(header: Mapping[str, Any]) -> CertificateSettings:
    """The settings of a recipe under which the same votes would be asked for."""
    settings = header["settings"]
    common = {"num_items": header["num_items"], "micro_batch": settings["micro_batch"]}
    if header["kind"] == "gaussian":
        behind = settings.get("denoiser")
        if behind is not None:
            common |= {"denoiser": behind["digest"], "sampler": behind["sampler"]}
        return GaussianSettings(
            kind="gaussian",
            sigma=settings["sigma"],
            method=method_of(header),
            num_select=settings["num_select"],
            num_estimate=settings["num_estimate"],
            block_size=settings["micro_batch"],
            failure_prob=ANY_PROB[method_of(header)],
            radii=(settings["sigma"] * 1e-3,),
            **common,
        )
    if header["kind"] == DOUBLE_MASKING:
        return DoubleMaskingSettings(
            kind="double_masking",
            mask_patch=settings["mask_patch"],
            num_masks=settings["num_masks"],
            patch_sizes=(1,),  # unused, too
            **common,
        )
    if stop := stopped_for(header):  # when voting stops depends on the claim
        rule, second = [*stop["rules"], "none"][:2]
        common |= {"stop_early": True, "rule": rule, "second_rule": second}
    return AblationSettings(
        kind=header["kind"],
        stride=asked_ablations(header).stride,
        patch_sizes=tuple(stop["patch_sizes"]) if stop else (1,),
        **common,
    )


def _compare(
    voter: Any,
    config: VoteConfig,
    item: ItemVotes,
    position: dict[str, int],
    *,
    kept: Array | slice,
) -> list[str]:
    index = position[item.item_id]
    if isinstance(config.section, GaussianSettings):
        table = voter(
            [Block(index, stream, 0, len(votes)) for stream, votes in item.streams.items()]
        )
    else:
        table = voter([index])
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
