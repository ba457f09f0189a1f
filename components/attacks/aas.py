"""Attacks that borrow the gradient of the same network with rescaled attention.

Jain & Dutta, "Towards Understanding and Improving Adversarial Robustness of Vision Transformers":
where a softmax is so sharp that its gradient vanishes, an attack is blind; with factors S on the
attention logits (eq. 2) it sees again. But f_S is another classifier than f, and how often f_S errs
says nothing about f. Here every point found with the help of f_S is replayed on f, each row keeps
the worst that any candidate found, and S = 1 is always the first candidate: the result can never
look weaker than the inner attack. What f_S answers is reported apart, as `paper_protocol`, the
figures of the paper's tables.

Symbols: f = the network under attack, S = one factor per attention module, f_S = f with them.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from components.attacks.bpda import with_gradient_of
from components.attacks.gradients import check_logits
from components.attacks.interface import Attack, AttackResult, Items
from components.attacks.scales import Scales
from components.core.errors import CasemateError
from components.core.seeding import stream_key
from components.core.types import Images, Labels, Logits, LogitsFn
from components.models.attention.discover import attention_of
from components.models.attention.scaling import scaled_attention

SURROGATES = ("network", "gradient")


@dataclass(frozen=True, slots=True)
class ScaledNetwork:
    """One candidate, per row; the means are robust accuracies of two different networks."""

    scales: Scales
    original_correct: Tensor  # (B,) bool: f at the clean image and at the crafted point
    scaled_correct: Tensor  # (B,) bool: f_S at the same two points
    scaled_clean_correct: Tensor  # (B,) bool: f_S at the clean image


@dataclass(frozen=True, slots=True)
class ScaledReport:
    """`result` speaks about f; `paper_protocol` about the networks f_S, S = 1 first."""

    result: AttackResult
    paper_protocol: tuple[ScaledNetwork, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledAttack:
    """`inner` on f, then with the help of f_S for every S of `scales` on the rows still standing.

    `net` is the timm network inside the model that is attacked. How f_S helps is the `surrogate`:
    - `network`, as published: `inner` attacks f_S, and what it returns is replayed on f. A row
      leaves `inner` as soon as f_S errs, be it at the clean image, so less carries over to f;
    - `gradient`: f answers, f_S lends its gradient (`bpda.py`), so that f judges every iterate.

    The factors are fixed before any row is seen (`scales.py`): a row's result depends on nothing
    beside it. Every candidate has random numbers of its own, as a restart has; `restarts` is the
    control with equal compute, equal numbers and no scaling, and belongs next to every figure.
    """

    net: nn.Module
    inner: Attack
    scales: tuple[Scales, ...]
    surrogate: str = "network"
    label: str = "aas"

    def __post_init__(self) -> None:
        if self.surrogate not in SURROGATES:
            known = " or ".join(SURROGATES)
            raise CasemateError("aas.surrogate", self.surrogate, f"is unknown; choose {known}")
        num_modules = len(attention_of(self.net))
        for scales in self.scales:
            if len(scales) != num_modules or not all(scale > 0 for scale in scales):
                remedy = f"must be {num_modules} factors > 0, one per attention module"
                raise CasemateError("aas.scales", scales, remedy)

    @property
    def name(self) -> str:
        return f"{self.label}-{self.inner.name}"

    @property
    def norm(self) -> str:
        return self.inner.norm

    @property
    def eps(self) -> float:
        return self.inner.eps

    def restarts(self) -> "ScaledAttack":
        """The control: as many runs of `inner`, from the same starts, all of them on f itself."""
        return replace(self, scales=(self._ones,) * len(self.scales), label="restarts")

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        """The worst case over all candidates, on f."""
        result = self.inner(logits_of, items)
        for index, scales in enumerate(self.scales, start=1):
            rows = (result.adversarial_prediction == items.y).nonzero().squeeze(1)
            if len(rows) == 0:
                break
            found = self._crafted(logits_of, items.take(rows), scales=scales, index=index)
            result = _worst_of(result, found, items.y, rows)
        return result

    def examine(self, logits_of: LogitsFn, items: Items) -> ScaledReport:
        """As a call, with every candidate on every row, and with the answers of each f_S."""
        result = self.inner(logits_of, items)
        networks = [self._network(logits_of, items, result, self._ones)]
        everyone = torch.arange(len(items), device=items.x.device)
        for index, scales in enumerate(self.scales, start=1):
            found = self._crafted(logits_of, items, scales=scales, index=index)
            found = replace(found, clean_prediction=result.clean_prediction)  # of f, not of f_S
            networks.append(self._network(logits_of, items, found, scales))
            result = _worst_of(result, found, items.y, everyone)
        return ScaledReport(result, tuple(networks))

    @property
    def _ones(self) -> Scales:
        return (1.0,) * len(attention_of(self.net))

    def _crafted(
        self, logits_of: LogitsFn, items: Items, *, scales: Scales, index: int
    ) -> AttackResult:
        """What `inner` finds with the help of f_S; the adversarial prediction is that of f."""
        items = replace(items, run_seed=candidate_seed(items.run_seed, index))
        if scales == self._ones:  # f_S is f, bit for bit
            return self.inner(logits_of, items)
        if self.surrogate == "gradient":
            scaled = scaled_logits(logits_of, self.net, scales)
            found = self.inner(with_gradient_of(scaled, judge=logits_of), items)
            return replace(found, num_evaluations=found.num_evaluations + found.num_gradients)
        with scaled_attention(self.net, _factors(scales)):  # once: entering it costs milliseconds
            found = self.inner(logits_of, items)
        return replace(
            found,
            adversarial_prediction=_predictions(logits_of, found.x_adv, items),
            num_evaluations=found.num_evaluations + 1,
        )

    def _network(
        self, logits_of: LogitsFn, items: Items, found: AttackResult, scales: Scales
    ) -> ScaledNetwork:
        """`found` holds the answers of f."""
        scaled = scaled_logits(logits_of, self.net, scales)
        scaled_clean = _predictions(scaled, items.x, items) == items.y
        original_clean = found.clean_prediction == items.y
        return ScaledNetwork(
            scales=scales,
            original_correct=original_clean & (found.adversarial_prediction == items.y),
            scaled_correct=scaled_clean & (_predictions(scaled, found.x_adv, items) == items.y),
            scaled_clean_correct=scaled_clean,
        )


def scaled_logits(logits_of: LogitsFn, net: nn.Module, scales: Scales) -> LogitsFn:
    """f_S as a function; between its calls `net` is untouched."""
    factors = _factors(scales)

    def logits(x: Images) -> Logits:
        with scaled_attention(net, factors):
            return logits_of(x)

    return logits


def _factors(scales: Scales) -> Tensor:
    return torch.tensor(scales, dtype=torch.float64)  # rounded where it meets a weight, not before


def candidate_seed(run_seed: int, index: int) -> int:
    """The seed of candidate `index`; candidate 0, the inner attack itself, keeps the run's."""
    return run_seed if index == 0 else stream_key(run_seed, "attention scales", "", index)


@torch.no_grad()
def _predictions(logits_of: LogitsFn, x: Images, items: Items) -> Labels:
    return check_logits(logits_of(x), items.item_ids).argmax(dim=1)  # ties to the lowest class


def _worst_of(result: AttackResult, found: AttackResult, y: Labels, rows: Tensor) -> AttackResult:
    """`result` with the points of `found` (its rows are `rows`) that break rows still standing."""
    broke = (result.adversarial_prediction[rows] == y[rows]) & (
        found.adversarial_prediction != y[rows]
    )
    chosen = rows[broke]
    return replace(
        result,
        x_adv=result.x_adv.index_copy(0, chosen, found.x_adv[broke]),
        adversarial_prediction=result.adversarial_prediction.index_copy(
            0, chosen, found.adversarial_prediction[broke]
        ),
        num_evaluations=result.num_evaluations.index_add(0, rows, found.num_evaluations),
        num_gradients=result.num_gradients.index_add(0, rows, found.num_gradients),
        num_zero_gradients=result.num_zero_gradients.index_add(0, rows, found.num_zero_gradients),
    )
