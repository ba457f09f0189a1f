"""l2 certificates by randomized smoothing (Cohen et al. 2019)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from components.certify.challenge import ChallengeTask, Claimed
from components.certify.cost import CostedModel
from components.certify.estimate import Work, l2_work
from components.certify.family import CertificateFamily, Summary
from components.certify.header import FieldTypes, VotesHeader
from components.certify.l2.certificate import check_l2_claim, check_new_radii, derive_l2
from components.certify.l2.challenge import L2Challenger
from components.certify.l2.draws import DrawLedger, radius_suffix
from components.certify.l2.evidence import (
    L2_FIELDS,
    METHODS,
    check_l2_header,
    declare,
    drawn_of,
    generator_of,
    is_sequential,
    method_of,
    plan_of,
)
from components.certify.l2.radius import Method
from components.certify.l2.sequential import SELECT_STEP
from components.certify.l2.settings import (
    GaussianClaimSettings,
    GaussianSettings,
    L2ChallengeSettings,
)
from components.certify.l2.verify import audit_gaussian
from components.certify.l2.voters import (
    Block,
    GaussianTask,
    GaussianVoter,
    GaussianVoteSettings,
    describe_denoiser,
    draw_units,
    fastest_draws,
)
from components.certify.tasks import Dataset, open_data, spec_of
from components.certify.vote_requests import VotePlan, VoteRequest, recorded_vote_fields
from components.certify.vote_rows import VOTES_NAME, ItemVotes, Votes
from components.core.arithmetic import using
from components.core.errors import CasemateError
from components.core.noise_streams import noise_impl, resolve_noise
from components.core.pass_counts import ascent
from components.core.precision import check_precision, resolve_precision
from components.core.settings import plain
from components.core.threats import UNIT, L2Threat
from components.core.units import WorkFn
from components.data.prepared import PreparedDataset
from components.denoising.loading import describe_source

# What `auto` may choose: bfloat16 is too far from the classifier that was trained and evaluated, so
# a recipe must name it.
FASTEST = ("tf32",)

L2Challenge = ChallengeTask[GaussianVoteSettings, L2ChallengeSettings, GaussianClaimSettings]


class GaussianFamily(
    CertificateFamily[
        GaussianSettings, GaussianVoteSettings, GaussianClaimSettings, L2ChallengeSettings
    ]
):
    """Votes are predictions under Gaussian noise; claims are l2 radii."""

    kinds: ClassVar[tuple[str, ...]] = ("gaussian",)
    claim_class = GaussianClaimSettings
    recorded_fields: ClassVar[FieldTypes] = L2_FIELDS
    threat_name: ClassVar[str] = "l2"
    vote_unit: ClassVar[str] = "draw"
    chapter: ClassVar[str] = "components.report.radii:chapter"

    def prepare(
        self, request: VoteRequest[GaussianSettings], *, source: Votes | None
    ) -> GaussianTask:
        settings, behind = request.settings, None
        if request.denoiser is not None:
            behind = describe_denoiser(
                request.denoiser,
                sampler=plain(settings.sampler),
                sigma=settings.sigma,
                image_size=open_data(request.dataset).height,
            )
        fields = request.vote_fields
        open_ = fields["undecided"]
        votes = GaussianVoteSettings(
            **fields,
            sigma=settings.sigma,
            num_select=settings.num_select,
            num_estimate=settings.num_estimate,
            run_seed=request.seed,
            method=settings.method,
            declared=_declared(settings) if settings.method == "sequential" else None,
            denoiser=behind,
            noise="numpy" if "noise" in open_ else resolve_noise(settings.noise, request.device),
            precision="float32" if settings.precision == "auto" else settings.precision,
            compiled=settings.compiled,
            block_size=settings.block_size,
        )
        return GaussianTask(request.dataset, request.model, votes, request.denoiser)

    def must_decide(self, task: GaussianTask) -> bool:
        votes = task.votes
        return bool(votes.undecided) or votes.compiled or votes.precision != "float32"

    def decide(self, task: GaussianTask) -> dict[str, Any]:
        votes, found = task.votes, dict[str, Any]()
        if "precision" in votes.undecided:
            found["precision"] = resolve_precision("auto", votes.device, fastest=FASTEST)
        else:
            check_precision(votes.precision, votes.device, key="certify.precision")
        if "noise" in votes.undecided:
            found["noise"] = resolve_noise("auto", votes.device)
        if "micro_batch" in votes.undecided:
            chosen = self.decided(task, found)
            with using(chosen.votes.arithmetic):
                found["micro_batch"] = fastest_draws(chosen)
        if votes.compiled:
            chosen = self.decided(task, found | {"compiled": False})
            with using(chosen.votes.arithmetic):
                why = GaussianVoter(chosen).compile()
            found |= {"compiled": why is None, "why_eager": why}
        return found

    def notice(self, task: GaussianTask) -> str | None:
        votes, told = task.votes, []
        if votes.precision != "float32":
            told.append(f"votes and certificates are those of the classifier in {votes.precision}")
        if votes.why_eager:
            told.append(f"goes on without compiled passes: {votes.why_eager}")
        return "; ".join(told) or None

    def plan(self, task: GaussianTask, settings: GaussianSettings, header: VotesHeader) -> VotePlan:
        settings = replace(settings, micro_batch=task.votes.micro_batch)  # it may have been auto
        ledger = DrawLedger(settings, header)
        return VotePlan(draw_units(settings, header.num_items), ledger, ledger.votes)

    def worker(self, task: GaussianTask) -> WorkFn:
        return GaussianVoter(task)

    def check_model(self, request: VoteRequest[GaussianSettings], dataset: Dataset) -> None:
        if request.denoiser is None:
            super().check_model(request, dataset)
            return
        self.check_lengths(request, dataset)
        spec, key = spec_of(request.model), request.key
        spec.check_classes(len(dataset.classes))
        found = describe_source(request.denoiser)
        try:
            found.diffusion.schedule.check(request.settings.sigma)
        except CasemateError as error:
            raise CasemateError(f"{key}.sigma", error.value, error.remedy) from None
        for channels in (dataset.channels, spec.channels):
            if found.channels and channels and found.channels != channels:
                remedy = f"input channels do not match the images, which have {channels}"
                raise CasemateError(f"{key}.denoiser", found.channels, remedy)
        if dataset.height != dataset.width:
            remedy = "is not square; denoisers need square images"
            raise CasemateError("data.image_size", f"{dataset.height}x{dataset.width}", remedy)

    def check_before_votes(self, settings: GaussianSettings, header: VotesHeader) -> None:
        if settings.method == "sequential":
            plan_of(header)  # raises for a plan that can never certify
            return
        claim = GaussianClaimSettings(failure_prob=settings.failure_prob, radii=settings.radii)
        check_new_radii(header, claim)

    def noise_impl(self, votes: GaussianVoteSettings) -> str | None:
        return noise_impl(votes.method, votes.noise)

    def streams(self, header: VotesHeader) -> dict[str, int]:
        drawn = drawn_of(header)
        return {"estimate": drawn.num_estimate, "select": drawn.num_select}

    def may_stop(self, header: VotesHeader) -> bool:
        return is_sequential(header)

    def is_possible(self, header: VotesHeader) -> bool:
        drawn = drawn_of(header)
        return 0 < drawn.sigma < np.inf and min(drawn.num_select, drawn.num_estimate) >= 1

    def check_evidence(self, header: VotesHeader) -> None:
        check_l2_header(header)

    def vote_settings(self, header: VotesHeader) -> GaussianVoteSettings:
        return GaussianVoteSettings(
            **recorded_vote_fields(header),
            **drawn_of(header).settings(),
            noise=generator_of(header),
        )

    def repeat_payload(self, index: int, item: ItemVotes) -> list[Block]:
        return [Block(index, stream, 0, len(votes)) for stream, votes in item.streams.items()]

    def explain_differences(
        self, task: GaussianTask, items: Sequence[tuple[int, ItemVotes]]
    ) -> list[str]:
        """Report votes whose draws are those of another method."""
        voter, own = GaussianVoter(task), task.votes.method

        def drawn_for(method: Method) -> bool:
            voter.settings = replace(task.votes, method=method)
            return all(_drawn_again(voter, item, index) for index, item in items)

        if drawn_for(own):
            return []
        return [
            f"{VOTES_NAME}: its draws are those of method {method}, not of {own}: choosing a "
            "method after seeing draws voids the failure probability"
            for method in METHODS
            if method != own and drawn_for(method)
        ]

    def wrong_records(self, task: GaussianTask, header: VotesHeader) -> list[str]:
        recorded = drawn_of(header).denoiser
        if task.denoiser is None or recorded is None:
            return []
        side = task.open_data().height
        known = describe_denoiser(
            task.denoiser, sampler=recorded["sampler"], sigma=task.votes.sigma, image_size=side
        )
        return [
            f"{VOTES_NAME}: records {recorded.get(name)!r} as {name} of the denoiser, not {value!r}"
            for name, value in known.items()
            if recorded.get(name) != value
        ]

    check_claim = staticmethod(check_l2_claim)
    derive = staticmethod(derive_l2)
    audit = staticmethod(audit_gaussian)

    def check_new_claim(self, header: VotesHeader, claim: GaussianClaimSettings) -> None:
        check_new_radii(header, claim)

    def challenger(self, task: L2Challenge) -> WorkFn:
        return L2Challenger(task)

    def is_certified(
        self, challenge: L2ChallengeSettings, claim: Claimed, *, second: bool = False
    ) -> bool:
        return bool(not claim["abstain"] and claim["radius"] >= challenge.eps)

    def describe_challenge(self, challenge: L2ChallengeSettings) -> dict[str, object]:
        threat = {"kind": "l2", "unit": UNIT, "eps": challenge.eps}
        return {"attack": "SmoothAdv l2 attack", "threat": threat}

    def work(self, settings: GaussianSettings, model: CostedModel, *, num_items: int) -> Work:
        return l2_work(
            num_items=num_items,
            num_select=settings.num_select,
            num_estimate=settings.num_estimate,
            classifier_flops=2.0 * model.costs.flops,  # costs count one per MAC
            denoiser_flops=2.0 * model.denoiser.flops,
            denoiser_calls=model.denoiser_calls,
        )

    def challenge_votes(
        self, settings: GaussianSettings, model: CostedModel, *, passes_per_item: int
    ) -> float:
        own = settings.challenge
        if own is None:
            return 0.0
        return own.num_steps * ascent(own.num_draws).cost + own.num_predict

    def least_share(self, settings: GaussianSettings, *, passes_per_item: int) -> float:
        """The share of the draws up to the first look."""
        if settings.method != "sequential":
            return 1.0
        return min(1.0, (SELECT_STEP + settings.look_every) / passes_per_item)

    def batches(self, settings: GaussianSettings, model: CostedModel) -> list[tuple[int, int]]:
        """The challenge takes gradients through every pass of all its draws at once."""
        loads = super().batches(settings, model)
        if settings.challenge:
            loads.append((settings.challenge.num_draws, model.denoiser_calls))
        return loads

    def threat(self, header: VotesHeader, claim: GaussianClaimSettings) -> L2Threat:
        return L2Threat(sigma=drawn_of(header).sigma)

    def threat_words(self, threat: Summary) -> str:
        return (
            "The whole image may move by an l2 distance of at most the radius stated for the item; "
            f"the classifier votes under Gaussian noise of standard deviation {threat['sigma']:g}."
        )

    def budget(self, entry: Summary) -> float:
        return float(entry["radius"])

    def budget_text(self, entry: Summary) -> str:
        return f"l2 {entry['radius']:g}"

    def metric_suffix(self, entry: Summary) -> str:
        return radius_suffix(entry["radius"])

    def budget_words(self, budget: float) -> str:
        return f"radius {budget:g}"

    def smallest_budget(self, claim: Mapping[str, Any]) -> float:
        """The smallest positive radius: radius 0 certifies a label without a distance."""
        return min((float(r) for r in claim["radii"] if r > 0), default=0.0)

    def challenged_budget(self, threat: Mapping[str, Any], *, step: str) -> float:
        if "eps" not in threat:
            remedy = "must name its budget `eps`"
            raise CasemateError(f"{step} challenge.json", dict(threat), remedy)
        return float(threat["eps"])

    def proven_at(
        self, columns: Mapping[str, Sequence[object]], budget: float, *, rule: str = ""
    ) -> NDArray[np.bool_]:
        proven: NDArray[np.bool_] = np.asarray(columns["radius"], dtype=np.float64) >= budget
        return proven

    def compared_under(self, header: VotesHeader, claim: Mapping[str, object]) -> dict[str, object]:
        """Draws and failure probability: more draws certify more of the same model."""
        own = header.settings
        draws = {name: own[name] for name in ("num_select", "num_estimate")}
        draws |= {"method": method_of(header), "declared": own.get("declared")}
        return {"draws": draws, "failure_prob": claim["failure_prob"]}

    def proof_words(self, kinds: Collection[str]) -> str:
        return (
            "The classifier votes under Gaussian noise. The winner's share of the votes bounds the "
            "distance within which the vote cannot change; an item without a clear winner is an "
            "abstention and counts as wrong."
        )

    def vote_words(self, header: VotesHeader) -> str:
        drawn = drawn_of(header)
        named = "" if drawn.precision == "float32" else f", classified in {drawn.precision}"
        return f"noisy copies of the item, sigma {drawn.sigma:g}{named}"

    def published_settings(
        self, settings: GaussianSettings, header: VotesHeader, dataset: PreparedDataset
    ) -> dict[str, object]:
        names = ("sigma", "num_select", "num_estimate", "failure_prob")
        precision = drawn_of(header).precision
        return {
            **{name: getattr(settings, name) for name in names},
            "micro_batch": header.settings["micro_batch"],
            **({} if precision == "float32" else {"precision": precision}),
            "sampler": plain(settings.sampler),
            "channels": dataset.channels,
            "image_size": dataset.width,
        }


def _declared(settings: GaussianSettings) -> dict[str, object]:
    return declare(
        radii=list(settings.radii),
        failure_prob=settings.failure_prob,
        look_every=settings.look_every,
        futility_prob=settings.futility_prob,
    )


def _drawn_again(voter: GaussianVoter, item: ItemVotes, index: int) -> bool:
    stored = item.streams["estimate"]
    again = voter([Block(index, "estimate", 0, len(stored))])["predictions"][0].as_py()
    return np.array_equal(stored, again)
