"""Interface of certificate families.

A family defines seven things: the units of work behind its votes, the worker that computes one, the
claims that follow from votes, how they are verified independently, how an attack challenges them,
what they cost, and how they are described. The registry maps a kind to its family; code outside of
`components/certify` calls the family and does not distinguish kinds.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from components.certify.challenge import ChallengeTask, Claimed
from components.certify.claim_rows import Derived, StoredClaims
from components.certify.cost import CostedModel
from components.certify.estimate import Work
from components.certify.header import RECORDED_PACKAGES, FieldTypes, ImageShape, VotesHeader
from components.certify.settings import CertificateSettings, ChallengeSettings, ClaimSettings
from components.certify.tasks import (
    Dataset,
    VoteSettings,
    VoteTask,
    digest_of,
    spec_of,
)
from components.certify.vote_requests import VotePlan, VoteRequest
from components.certify.vote_rows import ItemVotes, VoteRow, Votes
from components.core.errors import CasemateError
from components.core.settings import default_of
from components.core.threats import Threat
from components.core.types import Array
from components.core.units import WorkFn
from components.data.prepared import PreparedDataset

SettingsT = TypeVar("SettingsT", bound=CertificateSettings)
VotesT = TypeVar("VotesT", bound=VoteSettings)
ClaimT = TypeVar("ClaimT", bound=ClaimSettings)
ChallengeT = TypeVar("ChallengeT", bound=ChallengeSettings)
Summary = Mapping[str, Any]  # of a certificate, as JSON values


class CertificateFamily(ABC, Generic[SettingsT, VotesT, ClaimT, ChallengeT]):
    """Base class of all families; instances hold no state."""

    kinds: ClassVar[tuple[str, ...]]
    claim_class: type[ClaimT]
    recorded_fields: ClassVar[FieldTypes]  # fields of a header's settings that claims require
    threat_name: ClassVar[str]  # "l2" or "patch": the threat model in one word
    vote_unit: ClassVar[str]  # what one vote costs: a "pass", or a "draw" of several passes
    chapter: ClassVar[str] = "components.report.certified:chapter"
    """`module:function` that makes the chapter of the report; this one has a table, no charts."""
    unsound_words: ClassVar[str] = ""  # why a claim is not sound, if `is_sound` says so

    # Units and workers ----------------------------------------------------------------------------

    def check_model(self, request: VoteRequest[SettingsT], dataset: Dataset) -> None:
        """Reject a model, or a denoiser in front of it, that does not fit these images."""
        self.check_lengths(request, dataset)
        spec = spec_of(request.model)
        spec.check_classes(len(dataset.classes))
        spec.check_image((dataset.channels, dataset.height, dataset.width))

    def check_lengths(self, request: VoteRequest[SettingsT], dataset: Dataset) -> None:
        """Reject lengths that do not fit into the images; the band of training always fits."""
        side = min(dataset.height, dataset.width)
        for name, value in request.settings.lengths():
            if value > side:
                remedy = f"is larger than the image ({side})"
                raise CasemateError(f"{request.key}.{name}", value, remedy)

    @abstractmethod
    def prepare(self, request: VoteRequest[SettingsT], *, source: Votes | None) -> VoteTask[VotesT]:
        """The task of the workers; omitted settings are read once from the model's header.

        `source`: finished votes that contain all votes of this request.
        """

    def must_decide(self, task: VoteTask[VotesT]) -> bool:
        """Whether `decide` checks or finds anything."""
        return bool(task.votes.undecided)

    def decide(self, task: VoteTask[VotesT]) -> dict[str, Any]:
        """What can only be decided on the device of the votes, as JSON values; loads the model.

        Decided once, before units are distributed: all workers use it and the votes record it.
        """
        return {}

    def decided(self, task: VoteTask[VotesT], decisions: Mapping[str, Any]) -> VoteTask[VotesT]:
        """The task with the results of `decide`."""
        return replace(task, votes=replace(task.votes, **decisions, undecided=frozenset()))

    def notice(self, task: VoteTask[VotesT]) -> str | None:
        """A message to the user about how votes are computed, if there is one."""
        return None

    def unprovable(self, settings: SettingsT, header: VotesHeader) -> str | None:
        """Claims that no votes can prove, if there are any; those that are refused excepted."""
        return None

    @abstractmethod
    def plan(self, task: VoteTask[VotesT], settings: SettingsT, header: VotesHeader) -> VotePlan:
        """The units of work: a function of the settings, not of the cluster."""

    @abstractmethod
    def worker(self, task: VoteTask[VotesT]) -> WorkFn:
        """The function that computes one unit; loads the model."""

    def header(
        self,
        task: VoteTask[VotesT],
        dataset: Dataset,
        *,
        num_items: int | None,
        run_id: str,
        software: Mapping[str, str],
    ) -> VotesHeader:
        """The header: which model votes on which data under which settings; no time, no machine.

        `num_items`: number of test items that vote, from the first; None: all.
        """
        available = dataset.splits["test"]
        return VotesHeader(
            kind=task.votes.kind,
            run_id=run_id,
            model_digest=digest_of(task.model),
            dataset_digest=dataset.digest,
            num_classes=len(dataset.classes),
            image=ImageShape(dataset.channels, dataset.height, dataset.width),
            settings=task.votes.to_dict(),
            noise_impl=self.noise_impl(task.votes),
            num_items=min(num_items or available, available),
            software={name: v for name, v in software.items() if name in RECORDED_PACKAGES},
        )

    def check_before_votes(self, settings: SettingsT, header: VotesHeader) -> None:
        """Reject claims that no votes could prove, before any vote is computed."""

    def noise_impl(self, votes: VotesT) -> str | None:
        """How random draws are addressed; None: votes are not random."""
        return None

    def shared_votes(
        self, source: Votes, header: VotesHeader
    ) -> tuple[VotesHeader, Iterable[VoteRow]]:
        """Header and rows of votes that are a part of finished ones."""
        raise CasemateError("certify", header.kind, "cannot take its votes from another entry")

    # Evidence: what a header records --------------------------------------------------------------

    @abstractmethod
    def streams(self, header: VotesHeader) -> dict[str, int]:
        """Number of predictions of every item, per stream."""

    def may_stop(self, header: VotesHeader) -> bool:
        """Whether an item may have fewer predictions than `streams` gives."""
        return False

    def is_possible(self, header: VotesHeader) -> bool:
        """Whether the recorded numbers are in range."""
        return True

    @abstractmethod
    def check_evidence(self, header: VotesHeader) -> None:
        """Raise `CasemateError` unless the recorded settings fit each other."""

    def unknown_votes(self, predictions: Array, header: VotesHeader) -> NDArray[np.bool_]:
        """(n,) which votes of a block were not computed; `ValueError` where none may be missing."""
        return np.zeros(len(predictions), dtype=np.bool_)

    @abstractmethod
    def vote_settings(self, header: VotesHeader) -> VotesT:
        """The settings under which the same votes are computed again."""

    def repeat_payload(self, index: int, item: ItemVotes) -> object:
        """The payload with which a worker repeats all votes of the test item at `index`."""
        return [index]

    def kept_votes(self, header: VotesHeader) -> Array | slice:
        """Which of the repeated predictions are stored in the file."""
        return slice(None)

    def explain_differences(
        self, task: VoteTask[VotesT], items: Sequence[tuple[int, ItemVotes]]
    ) -> list[str]:
        """A reason for votes that do not repeat, if the family can determine one."""
        return []

    def wrong_records(self, task: VoteTask[VotesT], header: VotesHeader) -> list[str]:
        """Statements of a header about the networks that are false."""
        return []

    # Claims ---------------------------------------------------------------------------------------

    def claim_of(self, settings: SettingsT) -> dict[str, object]:
        """The claim that a section of a recipe requests."""
        return {name: getattr(settings, name) for name in self.claim_class.names()}

    def claim_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the settings that a claim needs, and of those it may have."""
        cls = self.claim_class
        needed = tuple(name for name in cls.names() if default_of(cls, name) is MISSING)
        return needed, tuple(name for name in cls.names() if name not in needed)

    @abstractmethod
    def check_claim(self, header: VotesHeader, claim: Mapping[str, object]) -> ClaimT:
        """The claim in canonical form, or an error that names the bad setting."""

    @abstractmethod
    def derive(self, votes: Votes, claim: ClaimT) -> Derived:
        """Table and summary of a certificate."""

    # Verification ---------------------------------------------------------------------------------

    @abstractmethod
    def audit(self, votes: Votes, claim: ClaimT, stored: StoredClaims) -> Iterator[str]:
        """Problems of stored claims, by independent code; a correct certificate has none."""

    def check_new_claim(self, header: VotesHeader, claim: ClaimT) -> None:
        """Reject a claim that this number of votes could never prove."""

    # Challenge ------------------------------------------------------------------------------------

    @abstractmethod
    def challenger(self, task: ChallengeTask[VotesT, ChallengeT, ClaimT], /) -> WorkFn:
        """The function that attacks one item; loads the model."""

    def challenged_votes(self, votes: Votes, item_ids: Collection[str]) -> Mapping[str, Array]:
        """Clean votes of these items that the attack starts from."""
        return {}

    @abstractmethod
    def is_certified(self, challenge: ChallengeT, claim: Claimed, *, second: bool = False) -> bool:
        """Whether a row covers the attack's budget; `second`: under the second rule, if any."""

    @abstractmethod
    def describe_challenge(self, challenge: ChallengeT) -> dict[str, object]:
        """The attack and its budget, as JSON values."""

    # Cost -----------------------------------------------------------------------------------------

    @abstractmethod
    def work(self, settings: SettingsT, model: CostedModel, *, num_items: int) -> Work:
        """Votes and FLOPs."""

    def least_share(self, settings: SettingsT, *, passes_per_item: int) -> float:
        """Share of the votes that is computed in the best case."""
        return 1.0

    def challenge_votes(
        self, settings: SettingsT, model: CostedModel, *, passes_per_item: int
    ) -> float:
        """Votes as expensive as the attack on one item that withstands it."""
        return 0.0

    def batches(self, settings: SettingsT, model: CostedModel) -> list[tuple[int, int]]:
        """(images, denoiser passes whose activations are kept) of the batches of a worker."""
        return [(settings.planned_micro_batch, min(model.denoiser_calls, 1))]

    # Description ----------------------------------------------------------------------------------

    @abstractmethod
    def threat(self, header: VotesHeader, claim: ClaimT) -> Threat:
        """What the adversary may do."""

    @abstractmethod
    def threat_words(self, threat: Summary) -> str:
        """The same as a sentence, from the JSON values of a certificate."""

    def is_sound(self, claim: Mapping[str, object]) -> bool:
        """False for a claim that only reproduces published tables."""
        return True

    def shares(self, entry: Summary) -> dict[str, Summary]:
        """Certified accuracy of one entry of a summary by rule; "" is the rule of the claim."""
        return {"": entry["accuracy"]}

    @abstractmethod
    def budget(self, entry: Summary) -> float:
        """The budget of the adversary in one entry of a summary's `certified`."""

    @abstractmethod
    def budget_text(self, entry: Summary) -> str:
        """The same with its unit, e.g. `l2 0.5` or `patch 5px`."""

    @abstractmethod
    def metric_suffix(self, entry: Summary) -> str:
        """The same as the suffix of a metric name."""

    @abstractmethod
    def budget_words(self, budget: float) -> str:
        """A budget as reports write it, e.g. `radius 0.5`."""

    @abstractmethod
    def smallest_budget(self, claim: Mapping[str, object]) -> float:
        """The smallest budget of a stored claim."""

    @abstractmethod
    def challenged_budget(self, threat: Mapping[str, object], *, step: str) -> float:
        """The budget that a stored challenge attacked with."""

    @abstractmethod
    def proven_at(
        self, columns: Mapping[str, Sequence[object]], budget: float, *, rule: str = ""
    ) -> NDArray[np.bool_]:
        """(N,) whether claims of certificates.parquet cover a budget; `rule`: the second rule."""

    @abstractmethod
    def proof_words(self, kinds: Collection[str]) -> str:
        """How these kinds prove their claims, in a sentence or two."""

    @abstractmethod
    def vote_words(self, header: VotesHeader) -> str:
        """Description of the votes on an item."""

    def short_vote_words(self, header: VotesHeader) -> str:
        """The same without sizes."""
        return self.vote_words(header)

    def visible(self, header: VotesHeader) -> Tensor | None:
        """(K, H, W) bool: what each vote sees, in the order of votes; None: the whole image."""
        return None

    def swept(self, header: VotesHeader) -> dict[str, int]:
        """Settings by which several certificates of one claim are compared; {}: there are none."""
        return {}

    def compared_under(self, header: VotesHeader, claim: Mapping[str, object]) -> dict[str, object]:
        """What certificates of two models must share for their claims to be compared."""
        return {}

    def metrics(self, summary: Summary) -> dict[str, float]:
        """The figures of a certificate by metric name."""
        values = {"standard_accuracy": summary["standard_accuracy"]["value"]}
        for entry in summary["certified"]:
            for rule, share in self.shares(entry).items():
                name = f"accuracy_{rule}" if rule else "accuracy"
                values[f"{name}_at_{self.metric_suffix(entry)}"] = share["value"]
        for name in ("ablation_accuracy", "votes_asked", "prediction_accuracy"):
            if name in summary:
                values[name] = summary[name]["value"]
        if "average_certified_radius" in summary:
            values["average_certified_radius"] = summary["average_certified_radius"]
        if "draws_used" in summary:
            values["draws_used"] = summary["draws_used"]["mean"]
        return values

    # Publishing -----------------------------------------------------------------------------------

    def published_settings(
        self, settings: SettingsT, header: VotesHeader, dataset: PreparedDataset
    ) -> dict[str, object] | None:
        """Settings of the smoothed classifier in the registry; None: the family has none."""
        return None


AnyFamily = CertificateFamily[Any, Any, Any, Any]
