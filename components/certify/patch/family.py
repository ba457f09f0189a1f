"""Certificates against one square patch: votes over ablations, and pairs of masks.

Ablations: Levine & Feizi 2020, Salman et al. 2022. Double masking: Xiang et al. 2022.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from components.certify.cost import CostedModel
from components.certify.family import Summary
from components.certify.header import FieldTypes, VotesHeader
from components.certify.patch.ablations import num_touched
from components.certify.patch.base import TIMES, PatchFamily, patch_vote_fields, square_words
from components.certify.patch.certificate import (
    check_ablation_claim,
    check_pair_claim,
    derive_ablations,
    derive_pairs,
)
from components.certify.patch.challenge import AblationChallenger, PairChallenger
from components.certify.patch.cost import ablation_lengths, pair_lengths
from components.certify.patch.evidence import (
    ABLATION_FIELDS,
    PAIR_FIELDS,
    EarlyStop,
    ablations_of,
    check_ablation_header,
    check_pair_header,
    computed_ablations,
    early_stop_of,
    is_thinned,
    masks_of,
    unknown_votes,
)
from components.certify.patch.settings import (
    AblationClaimSettings,
    AblationSettings,
    DoubleMaskingClaimSettings,
    DoubleMaskingSettings,
)
from components.certify.patch.thinning import positions_among, thin_votes, thinned_header
from components.certify.patch.verify import audit_ablations, audit_pairs
from components.certify.patch.voters import (
    AblationTask,
    AblationVoter,
    AblationVoteSettings,
    PairTask,
    PairVoter,
    PairVoteSettings,
    choose_backend,
    fastest_pairs,
    fastest_rows,
    item_units,
    rows_to_fill,
    voting_ablations,
    voting_masks,
)
from components.certify.tasks import spec_of
from components.certify.vote_requests import VotePlan, VoteRequest, recorded_vote_fields
from components.certify.vote_rows import VoteRow, Votes
from components.core.errors import CasemateError
from components.core.precision import resolve_precision
from components.core.types import Array
from components.core.units import WorkFn
from components.data.ablation import KINDS as ABLATION_KINDS
from components.models.voting import PLAIN, VotingBackend

FASTEST = ("bfloat16",)  # what `auto` may choose: votes stay those of float32
TRAINED_SHAPE = {"columns": "column", "rows": "row", "blocks": "block"}  # of the objectives


class AblationFamily(PatchFamily[AblationSettings, AblationVoteSettings, AblationClaimSettings]):
    """Votes are predictions on ablations: bands of columns or rows, squares, or both bands."""

    kinds: ClassVar[tuple[str, ...]] = ABLATION_KINDS
    claim_class = AblationClaimSettings
    recorded_fields: ClassVar[FieldTypes] = ABLATION_FIELDS
    unsound_words = "delta_rule paper_reference only reproduces published tables"

    def prepare(
        self, request: VoteRequest[AblationSettings], *, source: Votes | None
    ) -> AblationTask:
        settings = request.settings
        band = _band(request, spec_of(request.model).trained_for)
        precision = "float32" if settings.precision == "auto" else settings.precision
        backend = VotingBackend(path="fast", precision=precision, compiled=settings.compiled)
        stop = None
        if settings.stop_early:
            stop = EarlyStop(tuple(sorted(set(settings.patch_sizes))), settings.rules)
        votes = AblationVoteSettings(
            **patch_vote_fields(request),
            band=band,
            stride=settings.stride,
            # finished votes keep theirs
            backend=backend if source is None else backend_of(source.header),
            stop=stop,
        )
        if source is not None and "micro_batch" in votes.undecided:
            own = source.header.settings["micro_batch"]
            votes = replace(votes, micro_batch=own, undecided=frozenset())
        return AblationTask(request.dataset, request.model, votes, request.denoiser)

    def must_decide(self, task: AblationTask) -> bool:
        return True

    def decide(self, task: AblationTask) -> dict[str, Any]:
        votes, backend = task.votes, task.votes.backend
        if "precision" in votes.undecided:
            precision = resolve_precision("auto", votes.device, fastest=FASTEST)
            backend = replace(backend, precision=precision)
        found: dict[str, Any] = {"backend": asdict(choose_backend(task, backend))}
        if "micro_batch" in votes.undecided:
            found["micro_batch"] = fastest_rows(self.decided(task, found))
        return found

    def decided(self, task: AblationTask, decisions: Mapping[str, Any]) -> AblationTask:
        backend = VotingBackend(**decisions["backend"])
        return super().decided(task, {**decisions, "backend": backend})

    def notice(self, task: AblationTask) -> str | None:
        if task.votes.backend.path != "plain":
            return None
        return (
            "the fast path and the plain path give different logits for this model; "
            "votes use the plain path, in float32"
        )

    def unprovable(self, settings: AblationSettings, header: VotesHeader) -> str | None:
        """A patch that touches more than half of the votes can turn all of them against one class.

        The margin is at most the number of votes, and must reach twice those that are touched
        (Levine & Feizi 2020, theorem 1).
        """
        ablations, num_votes = ablations_of(header), sum(self.streams(header).values())
        touched = {size: num_touched(ablations, size) for size in settings.patch_sizes}
        found = [f"{m} ({n})" for m, n in touched.items() if 2 * n > num_votes]
        if not found:
            return None
        return (
            f"patches of these sides touch more than half of the {num_votes} votes, so nothing can "
            f"be certified against them: {', '.join(found)}; hide more of each image (band), or "
            "claim smaller patches"
        )

    def plan(self, task: AblationTask, settings: AblationSettings, header: VotesHeader) -> VotePlan:
        num_votes, rows = len(voting_ablations(task)), rows_to_fill(task, settings)
        units = item_units(header.num_items, num_votes=num_votes, rows=rows)
        return self.plan_of(units, settings, header)

    def worker(self, task: AblationTask) -> WorkFn:
        return AblationVoter(task)

    def shared_votes(
        self, source: Votes, header: VotesHeader
    ) -> tuple[VotesHeader, Iterator[VoteRow]]:
        own = thinned_header(header, source)
        return own, thin_votes(source, own)

    def streams(self, header: VotesHeader) -> dict[str, int]:
        return {header.kind: len(ablations_of(header))}

    def check_evidence(self, header: VotesHeader) -> None:
        check_ablation_header(header)

    def unknown_votes(self, predictions: Array, header: VotesHeader) -> NDArray[np.bool_]:
        return unknown_votes(predictions, header)

    def vote_settings(self, header: VotesHeader) -> AblationVoteSettings:
        computed = computed_ablations(header)
        return AblationVoteSettings(
            **recorded_vote_fields(header),
            token_policy=header.settings.get("token_policy"),
            band=computed.band,
            stride=computed.stride,
            backend=backend_of(header),
            stop=early_stop_of(header),
        )

    def kept_votes(self, header: VotesHeader) -> Array | slice:
        if not is_thinned(header):
            return slice(None)
        return positions_among(ablations_of(header), computed_ablations(header))

    check_claim = staticmethod(check_ablation_claim)
    derive = staticmethod(derive_ablations)
    audit = staticmethod(audit_ablations)
    kept_tokens = staticmethod(ablation_lengths)

    def touched_share(self, settings: AblationSettings, model: CostedModel) -> float:
        assert settings.challenge is not None
        band = settings.band or (model.trained_ablation or ("", model.side))[1]
        share = min((settings.challenge.patch_size + band - 1) / model.side, 1.0)
        return share**2 if settings.kind == "blocks" else share

    challenger = staticmethod(AblationChallenger)

    def visible(self, header: VotesHeader) -> Tensor:
        return ablations_of(header).masks()

    def vote_words(self, header: VotesHeader) -> str:
        kept = ablations_of(header)
        band, stride = kept.band, kept.stride
        shown = {
            "columns": f"bands of {band} columns",
            "rows": f"bands of {band} rows",
            "blocks": f"squares of {band} {TIMES} {band} pixels",
            "both": f"bands of {band} columns and bands of {band} rows",
        }[header.kind]
        return f"{shown}, one every {stride} px"

    def short_vote_words(self, header: VotesHeader) -> str:
        shown = {
            "columns": "Bands of columns",
            "rows": "Bands of rows",
            "blocks": "Squares",
            "both": "Bands of columns and of rows",
        }[header.kind]
        if "trained_token_policy" in header.settings:
            return f"{shown}, tokens {header.settings['token_policy']} against training"
        return shown

    def swept(self, header: VotesHeader) -> dict[str, int]:
        kept = ablations_of(header)
        return {"size": kept.band, "stride": kept.stride}

    def shares(self, entry: Summary) -> dict[str, Summary]:
        """Rule loc may be the second one."""
        names = {"": "accuracy", "loc": "accuracy_loc"}
        return {rule: entry[name] for rule, name in names.items() if name in entry}

    def proof_words(self, kinds: Collection[str]) -> str:
        bands = set(kinds) == {"columns"}
        return (
            "A model votes on many copies of an item, each showing one "
            f"{'band of columns' if bands else 'small part'}. A patch touches only some "
            f"{'bands' if bands else 'parts'}; if the lead exceeds what these can "
            "change, no patch changes the prediction."
        )

    def least_share(self, settings: AblationSettings, *, passes_per_item: int) -> float:
        """Half of the ablations: fewer never decide an item."""
        if not settings.stop_early:
            return 1.0
        return -(-passes_per_item // 2) / passes_per_item


class DoubleMaskingFamily(
    PatchFamily[DoubleMaskingSettings, PairVoteSettings, DoubleMaskingClaimSettings]
):
    """Votes are predictions under all pairs of masks."""

    kinds: ClassVar[tuple[str, ...]] = ("double_masking",)
    claim_class = DoubleMaskingClaimSettings
    recorded_fields: ClassVar[FieldTypes] = PAIR_FIELDS

    def prepare(
        self, request: VoteRequest[DoubleMaskingSettings], *, source: Votes | None
    ) -> PairTask:
        settings = request.settings
        votes = PairVoteSettings(
            **patch_vote_fields(request),
            mask_patch=settings.mask_patch,
            num_masks=settings.num_masks,
        )
        return PairTask(request.dataset, request.model, votes, request.denoiser)

    def decide(self, task: PairTask) -> dict[str, Any]:
        return {"micro_batch": fastest_pairs(task)} if task.votes.undecided else {}

    def plan(
        self, task: PairTask, settings: DoubleMaskingSettings, header: VotesHeader
    ) -> VotePlan:
        units = item_units(header.num_items, num_votes=len(voting_masks(task).pairs()))
        return self.plan_of(units, settings, header)

    def worker(self, task: PairTask) -> WorkFn:
        return PairVoter(task)

    def streams(self, header: VotesHeader) -> dict[str, int]:
        return {"pairs": len(masks_of(header).pairs())}

    def check_evidence(self, header: VotesHeader) -> None:
        check_pair_header(header)

    def vote_settings(self, header: VotesHeader) -> PairVoteSettings:
        recorded = header.settings
        return PairVoteSettings(
            **recorded_vote_fields(header),
            token_policy=recorded.get("token_policy"),
            mask_patch=recorded["mask_patch"],
            num_masks=recorded["num_masks"],
        )

    check_claim = staticmethod(check_pair_claim)
    derive = staticmethod(derive_pairs)
    audit = staticmethod(audit_pairs)
    kept_tokens = staticmethod(pair_lengths)

    challenger = staticmethod(PairChallenger)

    def visible(self, header: VotesHeader) -> Tensor:
        masks = masks_of(header)
        return masks.visible(masks.pairs())

    def vote_words(self, header: VotesHeader) -> str:
        masks, largest = masks_of(header), header.settings["mask_patch"]
        return (
            f"all pairs of masks that hide any patch up to {square_words(largest)}, "
            f"{len(masks)} masks"
        )

    def proof_words(self, kinds: Collection[str]) -> str:
        return (
            "Pairs of masks hide every possible position of the patch; if all pairs give the "
            "same class, no patch changes the prediction of double masking."
        )


def backend_of(header: VotesHeader) -> VotingBackend:
    """The recorded voting backend; plain if none is recorded, as in the first versions."""
    recorded = header.settings.get("way", {})
    try:
        return replace(PLAIN, **recorded)
    except (TypeError, ValueError) as error:
        remedy = f"is not a record of how votes were computed ({error})"
        raise CasemateError("verify: settings.way of the votes", recorded, remedy) from error


def _band(request: VoteRequest[AblationSettings], trained: Mapping[str, Any]) -> int:
    """Visible pixels of an ablation: as in the settings, else as in training."""
    settings = request.settings
    shape, size = trained.get("shape"), trained.get("size")
    if trained.get("kind") == "columns":
        shape, size = "column", trained.get("band")
    band = settings.band or (size if shape == TRAINED_SHAPE.get(settings.kind) else None)
    if band is None:
        remedy = f"is needed: model {settings.model} was not trained on {settings.kind}"
        raise CasemateError(f"{request.key}.band", None, remedy)
    return int(band)
