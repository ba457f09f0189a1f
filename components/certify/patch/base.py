"""Base of the certificate families against one square patch."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from components.certify.challenge import Claimed
from components.certify.cost import CostedModel
from components.certify.estimate import Work
from components.certify.family import CertificateFamily, Summary
from components.certify.header import VotesHeader
from components.certify.patch.certificate import is_sound
from components.certify.patch.cost import (
    WHOLE,
    Token,
    drops_tokens,
    whole_passes,
    work_of_lengths,
)
from components.certify.patch.ledger import ItemLedger
from components.certify.patch.settings import (
    AblationClaimSettings,
    DoubleMaskingClaimSettings,
    PatchChallengeSettings,
    PatchSettings,
)
from components.certify.patch.voters import PatchVoteFields, PatchVoteSettings
from components.certify.tasks import spec_of
from components.certify.vote_requests import VotePlan, VoteRequest
from components.certify.vote_rows import Votes
from components.core.errors import CasemateError
from components.core.pass_counts import CLEAN, ascent
from components.core.threats import PatchThreat, describe
from components.core.types import Array
from components.core.units import Unit
from components.models.tokens import patch_size_of

TIMES = "\N{MULTIPLICATION SIGN}"

PatchT = TypeVar("PatchT", bound=PatchSettings)
PatchVotesT = TypeVar("PatchVotesT", bound=PatchVoteSettings)
PatchClaimT = TypeVar("PatchClaimT", AblationClaimSettings, DoubleMaskingClaimSettings)


class PatchFamily(CertificateFamily[PatchT, PatchVotesT, PatchClaimT, PatchChallengeSettings]):
    """Base of the families against patches."""

    threat_name: ClassVar[str] = "patch"
    vote_unit: ClassVar[str] = "pass"
    chapter: ClassVar[str] = "components.report.patches:chapter"

    def plan_of(self, units: Sequence[Unit], settings: PatchT, header: VotesHeader) -> VotePlan:
        """A plan whose ledger follows the certified share at the challenged or smallest size."""
        challenge = settings.challenge
        size = challenge.patch_size if challenge else min(settings.patch_sizes)

        verdicts = partial(self.verdicts, settings=settings, size=size)
        ledger = ItemLedger(units, header, verdicts, name=f"accuracy_at_{size}")
        return VotePlan(units, ledger)

    def verdicts(self, votes: Votes, *, settings: PatchT, size: int) -> list[bool]:
        """Whether each item is correct and certified against patches of this size."""
        claim = self.check_claim(votes.header, self.claim_of(settings))
        rows = self.derive(votes, claim).rows
        return [row["correct"] and size in row["certified_patch_sizes"] for row in rows]

    @abstractmethod
    def kept_tokens(
        self, settings: PatchT, model: CostedModel, *, token: Token
    ) -> Mapping[int, int]:
        """Kept tokens -> number of votes on an item that keep that many."""

    def work(self, settings: PatchT, model: CostedModel, *, num_items: int) -> Work:
        if not drops_tokens(settings, model):
            num_votes = sum(self.kept_tokens(settings, model, token=WHOLE).values())
            return whole_passes(model, num_votes, num_items=num_items)
        lengths = self.kept_tokens(settings, model, token=patch_size_of(model.net))
        return work_of_lengths(model, lengths, num_items=num_items)

    def challenge_votes(
        self, settings: PatchT, model: CostedModel, *, passes_per_item: int
    ) -> float:
        """Two plain squares, then an ascent at each position, on the votes that see the patch."""
        own = settings.challenge
        if own is None:
            return 0.0
        looks = own.num_positions * (2 * CLEAN + ascent(own.num_steps) + CLEAN)
        return passes_per_item * (self.touched_share(settings, model) * looks.cost + 1)

    def touched_share(self, settings: PatchT, model: CostedModel) -> float:
        """Share of the votes that see a pixel of the challenge's patch."""
        return 1.0

    def threat(self, header: VotesHeader, claim: PatchClaimT) -> PatchThreat:
        return PatchThreat(patch_sizes=claim.patch_sizes)

    def threat_words(self, threat: Summary) -> str:
        sides = ", ".join(str(m) for m in threat["patch_sizes"])
        return (
            f"One square of m {TIMES} m pixels, anywhere inside the image (never wrapping around "
            f"its edge), may take any values in every channel; m = {sides}."
        )

    def is_sound(self, claim: Mapping[str, object]) -> bool:
        return is_sound(claim)

    def challenged_votes(self, votes: Votes, item_ids: Collection[str]) -> Mapping[str, Array]:
        wanted = set(item_ids)
        return {
            item.item_id: next(iter(item.streams.values()))
            for item in votes.items()
            if item.item_id in wanted
        }

    def is_certified(
        self, challenge: PatchChallengeSettings, claim: Claimed, *, second: bool = False
    ) -> bool:
        column = "certified_patch_sizes_loc" if second else "certified_patch_sizes"
        return challenge.patch_size in claim.get(column, [])

    def describe_challenge(self, challenge: PatchChallengeSettings) -> dict[str, object]:
        threat = describe(PatchThreat((challenge.patch_size,)))
        return {"attack": "adaptive patch attack", "threat": threat}

    def budget(self, entry: Summary) -> float:
        return int(entry["patch_size"])

    def budget_text(self, entry: Summary) -> str:
        return f"patch {entry['patch_size']}px"

    def metric_suffix(self, entry: Summary) -> str:
        return str(entry["patch_size"])

    def budget_words(self, budget: float) -> str:
        return square_words(int(budget))

    def smallest_budget(self, claim: Mapping[str, Any]) -> float:
        return int(min(claim["patch_sizes"]))

    def challenged_budget(self, threat: Mapping[str, Any], *, step: str) -> float:
        sizes = threat.get("patch_sizes", [])
        if len(sizes) != 1:
            remedy = "must name exactly one patch size"
            raise CasemateError(f"{step} challenge.json", dict(threat), remedy)
        return int(sizes[0])

    def proven_at(
        self, columns: Mapping[str, Sequence[Any]], budget: float, *, rule: str = ""
    ) -> NDArray[np.bool_]:
        column = f"certified_patch_sizes_{rule}" if rule else "certified_patch_sizes"
        return np.asarray([budget in sizes for sizes in columns[column]], dtype=np.bool_)


def square_words(side: int) -> str:
    """A square patch by its side."""
    return f"{side} {TIMES} {side} px"


def patch_vote_fields(request: VoteRequest[PatchT]) -> PatchVoteFields:
    """What the vote settings of all patch families take from a request."""
    policy, trained = _token_policy(request, spec_of(request.model).token_policy)
    return {**request.vote_fields, "token_policy": policy, "trained_token_policy": trained}


def _token_policy(request: VoteRequest[PatchT], trained: str) -> tuple[str, str | None]:
    """The policy for hidden tokens, and that of training if it differs."""
    settings = request.settings
    if settings.token_policy in ("as_trained", trained):
        return trained, None
    if not settings.allow_token_mismatch:
        remedy = (
            f"is not the training policy of model {settings.model} ({trained}) and lowers "
            "certified accuracy; add allow_token_mismatch: true to certify it anyway"
        )
        raise CasemateError(f"{request.key}.token_policy", settings.token_policy, remedy)
    return settings.token_policy, trained
