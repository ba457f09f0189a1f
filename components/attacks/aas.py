"""Adaptive attention scaling: attacks that use the gradient of the network with scaled attention.

Jain & Dutta, "Towards Understanding and Improving Adversarial Robustness of Vision Transformers":
where a softmax is so sharp that its gradient vanishes, an attack cannot move; factors S on the
attention logits (eq. 2) restore the gradient. But f_S is a different classifier, and its errors
are not errors of f. Here every point found with f_S is evaluated on f, each row keeps the worst
point of all candidates, and S = 1 is always the first candidate: the result is never weaker than
the inner attack. Accuracies of f_S are reported separately, as `paper_protocol`, the figures of the
paper's tables.

Symbols: f = the network under attack, S = one factor per attention module, f_S = f with them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from components.attacks.bpda import with_gradient_of
from components.attacks.interface import Attack, AttackResult, Items
from components.attacks.losses import margin
from components.attacks.scales import Scales
from components.attacks.settings import Surrogate
from components.core.seeding import stream_key
from components.core.settings import Positive, Problem, Settings, settings
from components.core.types import Images, Labels, Logits, LogitsFn
from components.models.attention.discover import attention_of
from components.models.attention.scaling import scaled_attention
from components.models.logits import check_logits


@dataclass(frozen=True, slots=True)
class ScaledNetwork:
    """One candidate, per row; the means are robust accuracies of two different networks."""

    scales: Scales
    original_correct: Tensor  # (B,) bool: f at the clean image and at the crafted point
    scaled_correct: Tensor  # (B,) bool: f_S at the same two points
    scaled_clean_correct: Tensor  # (B,) bool: f_S at the clean image


@dataclass(frozen=True, slots=True)
class ScaledReport:
    """`result` is about f; `paper_protocol` about the networks f_S, S = 1 first."""

    result: AttackResult
    paper_protocol: tuple[ScaledNetwork, ...]


@settings
class ScaledAttack(Settings):
    """`inner` on f, then with f_S for every S of `scales` on the rows that are still robust.

    `net` is the timm network inside the attacked model. `surrogate` selects how f_S is used:
    - `network`, as published: `inner` attacks f_S, and the point it returns is evaluated on f. A
      row leaves `inner` as soon as f_S errs, even at the clean image, so less transfers to f;
    - `gradient`: logits of f with the gradient of f_S (`bpda.py`), so f evaluates every iterate.

    The factors are fixed before any row is attacked (`scales.py`): a row's result does not depend
    on other rows. Every candidate has its own random numbers, like a restart; `restarts` is the
    control with equal compute, equal random numbers and no scaling; report it with every figure.
    """

    net: nn.Module
    inner: Attack
    scales: tuple[tuple[Positive, ...], ...]
    surrogate: Surrogate
    label: str = "aas"

    def problems(self) -> Iterator[Problem]:
        num_modules = len(attention_of(self.net))
        for scales in self.scales:
            if len(scales) != num_modules:
                remedy = f"must be {num_modules} factors, one per attention module"
                yield Problem("scales", scales, remedy)

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
        """The control: equally many runs of `inner`, from the same starts, all on f itself."""
        return replace(self, scales=(self._ones,) * len(self.scales), label="restarts")

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        """The worst case over all candidates, on f."""
        result = self.inner(logits_of, items)
        for index, scales in enumerate(self.scales, start=1):
            rows = (result.adversarial_prediction == items.y).nonzero().squeeze(1)
            if len(rows) == 0:
                break
            found = self._crafted(logits_of, items.take(rows), scales=scales, index=index)
            result = worst_of(result, found, items.y, rows)
        return result

    def examine(self, logits_of: LogitsFn, items: Items) -> ScaledReport:
        """Like a call, but runs every candidate on every row and measures each f_S."""
        result = self.inner(logits_of, items)
        networks = [self._network(logits_of, items, result, self._ones)]
        all_rows = torch.arange(len(items), device=items.x.device)
        for index, scales in enumerate(self.scales, start=1):
            found = self._crafted(logits_of, items, scales=scales, index=index)
            found = replace(found, clean_prediction=result.clean_prediction)  # of f, not of f_S
            networks.append(self._network(logits_of, items, found, scales))
            result = worst_of(result, found, items.y, all_rows)
        return ScaledReport(result, tuple(networks))

    @property
    def _ones(self) -> Scales:
        return (1.0,) * len(attention_of(self.net))

    def _crafted(
        self, logits_of: LogitsFn, items: Items, *, scales: Scales, index: int
    ) -> AttackResult:
        """The points that `inner` finds with f_S; the adversarial prediction is that of f."""
        items = replace(items, run_seed=candidate_seed(items.run_seed, index))
        if scales == self._ones:  # f_S is f, bit for bit
            return self.inner(logits_of, items)
        if self.surrogate == "gradient":
            scaled = scaled_logits(logits_of, self.net, scales)
            found = self.inner(with_gradient_of(scaled, forward=logits_of), items)
            return replace(found, num_evaluations=found.num_evaluations + found.num_gradients)
        with scaled_attention(self.net, _factors(scales)):  # once: entering it costs milliseconds
            found = self.inner(logits_of, items)
        logits = _logits(logits_of, found.x_adv, items)
        return replace(
            found,
            adversarial_prediction=logits.argmax(dim=1),
            margins=margin(logits, items.y),
            num_evaluations=found.num_evaluations + 1,
        )

    def _network(
        self, logits_of: LogitsFn, items: Items, found: AttackResult, scales: Scales
    ) -> ScaledNetwork:
        """Outcome of one candidate; `found` has the predictions of f."""
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
    """f_S as a function; `net` is unchanged between calls."""
    factors = _factors(scales)

    def logits(x: Images) -> Logits:
        with scaled_attention(net, factors):
            return logits_of(x)

    return logits


def _factors(scales: Scales) -> Tensor:
    return torch.tensor(scales, dtype=torch.float64)  # rounded to the weights' dtype when applied


def candidate_seed(run_seed: int, index: int) -> int:
    """The seed of candidate `index`; candidate 0, the inner attack itself, uses the run's seed."""
    return run_seed if index == 0 else stream_key(run_seed, "attention scales", "", index)


@torch.no_grad()
def _logits(logits_of: LogitsFn, x: Images, items: Items) -> Logits:
    return check_logits(logits_of(x), items.item_ids)


def _predictions(logits_of: LogitsFn, x: Images, items: Items) -> Labels:
    return _logits(logits_of, x, items).argmax(dim=1)  # ties to the lowest class


def worst_of(result: AttackResult, found: AttackResult, y: Labels, rows: Tensor) -> AttackResult:
    """The better points of both, at the cost of both; `found` is about `rows` of `result`.

    A point of `found` is better if it breaks a row that was robust, or has a higher margin there.
    """
    was_robust = result.adversarial_prediction[rows] == y[rows]
    broke = found.adversarial_prediction != y[rows]
    better = was_robust & (broke | (found.known_margins > result.known_margins[rows]))
    chosen = rows[better]
    return replace(
        result,
        x_adv=result.x_adv.index_copy(0, chosen, found.x_adv[better]),
        margins=result.known_margins.index_copy(0, chosen, found.known_margins[better]),
        adversarial_prediction=result.adversarial_prediction.index_copy(
            0, chosen, found.adversarial_prediction[better]
        ),
        num_evaluations=result.num_evaluations.index_add(0, rows, found.num_evaluations),
        num_gradients=result.num_gradients.index_add(0, rows, found.num_gradients),
        num_zero_gradients=result.num_zero_gradients.index_add(0, rows, found.num_zero_gradients),
    )
