"""The whole sanity suite on a few items: small attacks whose results are compared.

It checks the model under attack; `cascade_findings` checks the attacks of a recipe. An item costs
at most 230 gradients and 230 other forward passes, fewer if it breaks.

The white-box attack that weaker attacks must not beat is PGD on cross-entropy, then on the margin.
With cross-entropy alone, Square broke 2 of 64 further items in 2 of 40 audits of adversarially
trained digit models: a weakness of that loss, not of the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from components.attacks.base_settings import Norm
from components.attacks.cascade import CascadeState, run_cascade
from components.attacks.gradient import Pgd
from components.attacks.gradients import attack_mode, l2_direction
from components.attacks.interface import Attack, Items
from components.attacks.projections import project_l2, project_linf
from components.attacks.sanity import model as checks
from components.attacks.sanity.findings import Finding
from components.attacks.sanity.outcomes import (
    adds_nothing,
    gradients_alive,
    never_rises,
    reaches_floor,
)
from components.attacks.settings import PgdSettings, SquareSettings
from components.attacks.square import Square
from components.core.pass_counts import CLEAN, NO_PASSES, PassCounts
from components.core.types import Images, LogitsFn
from components.models.attention.gaps import GapHistogram
from components.models.logits import check_logits

STEPS = (10, 20, 40)
NUM_QUERIES = 200
NUM_NOISES = 10
GREY = 0.5


@dataclass(frozen=True, slots=True)
class Audit:
    """Findings and the measurements they are derived from."""

    findings: tuple[Finding, ...]
    gaps: Mapping[str, GapHistogram]  # per attention module; empty if attention is not accessible
    accuracy_by_steps: Mapping[int, float]
    accuracy_by_eps: Mapping[float, float]
    robust: tuple[bool, ...] = ()  # per item, to the suite's white-box attack; () if none ran


def audit(
    model: nn.Module,
    items: Items,
    *,
    net: nn.Module,
    norm: Norm,
    eps: float,
    surrogate: LogitsFn | None = None,
) -> Audit:
    """Every check of the suite on these items; transfer only with a `surrogate`.

    `net` is the network inside `model` whose attention is measured; it may be the model itself.
    """
    with attack_mode(model):
        range_finding = checks.images_in_range(items.x)
        if not range_finding.ok:  # ball and pixel range may not intersect
            return Audit((range_finding,), {}, {}, {})
        with torch.no_grad():
            logits = check_logits(model(items.x), items.item_ids)
        gaps, refusal = checks.gap_histograms(model, net, items.x)
        state = (
            checks.eval_mode(model),
            checks.returns_logits(logits),
            range_finding,
            checks.deterministic(model, items.x),
            checks.batch_invariant(model, items.x),
            *checks.attention_alive(gaps, why_none=refusal),
        )
        white_box = run_cascade(_white_box(norm, eps), model, items).state
        accuracy = (white_box.tallies[0].num_rows - white_box.tallies[0].num_broken) / len(items)
        by_steps = {n: _pgd_accuracy(model, items, norm, eps, num_steps=n) for n in STEPS[:-1]}
        by_steps[STEPS[-1]] = accuracy
        budgets = growing_budgets(items.x, norm=norm, eps=eps)
        by_eps = {
            b: accuracy if b == eps else _pgd_accuracy(model, items, norm, b) for b in budgets
        }
        floor = grey_accuracy(model, items)
        num_items = len(items)
        outcome = (
            gradients_alive(white_box.num_gradients, white_box.num_zero_gradients),
            *_weaker(model, items, white_box, norm=norm, eps=eps, surrogate=surrogate),
            never_rises("more steps", [*by_steps.values()], num_items=num_items),
            never_rises("larger eps", [*by_eps.values()], num_items=num_items),
            reaches_floor(by_eps[budgets[-1]], floor=floor, num_items=num_items),
        )
    robust = tuple(white_box.robust.tolist())
    return Audit(state + outcome, gaps, by_steps, by_eps, robust)


def audit_counts(
    *, norm: Norm, eps: float, num_pixels: int, num_items: int, surrogate: bool
) -> PassCounts:
    """Passes of an item that withstands every attack of the suite, transfer of it included."""
    clean = 1 + 1 + 5 + 2  # logits, attention, five equal passes, alone and in the batch
    longest = _pgd_counts(STEPS[-1])
    budgets = [b for b in budgets_of(num_pixels, norm=norm, eps=eps) if b != eps]
    attacks = 2 * longest + CLEAN  # the white box: cross-entropy, then margin
    attacks += sum((_pgd_counts(n) for n in STEPS[:-1]), NO_PASSES) + len(budgets) * longest
    attacks += SquareSettings(num_queries=NUM_QUERIES).pass_counts(2)
    noise = NUM_NOISES + 1 / num_items  # and the grey image
    transfer = longest + CLEAN if surrogate else NO_PASSES
    return (clean + noise) * CLEAN + attacks + transfer


def _pgd_counts(num_steps: int) -> PassCounts:
    return PgdSettings(num_steps=num_steps).pass_counts(2)


def growing_budgets(x: Images, *, norm: Norm, eps: float) -> tuple[float, ...]:
    """eps / 2, eps, 2 eps, and one that reaches plain grey from every image."""
    return budgets_of(x[0].numel(), norm=norm, eps=eps)


def budgets_of(num_pixels: int, *, norm: Norm, eps: float) -> tuple[float, ...]:
    """The same for images of so many values."""
    to_grey = GREY if norm == "linf" else GREY * num_pixels**0.5
    return (*(b for b in (eps / 2, eps, 2 * eps) if b < to_grey), to_grey)


@torch.no_grad()
def grey_accuracy(logits_of: LogitsFn, items: Items) -> float:
    """Share of items whose label is the model's prediction on plain grey."""
    grey = torch.full_like(items.x[:1], GREY)
    return float((logits_of(grey).argmax(dim=1) == items.y).double().mean())


@torch.no_grad()
def broken_by_noise(
    logits_of: LogitsFn, items: Items, *, norm: Norm, eps: float, num_draws: int = NUM_NOISES
) -> Tensor:
    """(B,) bool: rows that are misclassified at some random point at distance `eps`.

    l-inf noise lies on the corners of the ball: noise inside it would be weaker.
    """
    broken = torch.zeros_like(items.y, dtype=torch.bool)
    for draw in range(num_draws):
        normal = items.normal(f"sanity/noise-{draw}")
        if norm == "linf":
            noisy = project_linf(items.x + eps * normal.sign(), center=items.x, eps=eps)
        else:
            noisy = project_l2(items.x + eps * l2_direction(normal), center=items.x, eps=eps)
        broken |= logits_of(noisy).argmax(dim=1) != items.y
    return broken


@torch.no_grad()
def broken_by_transfer(
    logits_of: LogitsFn, items: Items, *, surrogate: LogitsFn, norm: Norm, eps: float
) -> Tensor:
    """(B,) bool: rows that the model misclassifies at points crafted on another model."""
    crafted = Pgd(norm=norm, eps=eps, num_steps=STEPS[-1])(surrogate, items).x_adv
    return logits_of(crafted).argmax(dim=1) != items.y


def _weaker(
    model: LogitsFn,
    items: Items,
    white_box: CascadeState,
    *,
    norm: Norm,
    eps: float,
    surrogate: LogitsFn | None,
) -> Sequence[Finding]:
    """Attacks with less information than the white-box attack, which must not break more."""
    square = Square(norm=norm, eps=eps, num_queries=NUM_QUERIES)(model, items)
    broken: dict[str, Tensor] = {
        "random noise": broken_by_noise(model, items, norm=norm, eps=eps),
        "square": square.adversarial_prediction != items.y,
    }
    if surrogate is not None:
        broken["transfer"] = broken_by_transfer(
            model, items, surrogate=surrogate, norm=norm, eps=eps
        )
    return [
        adds_nothing(name, broken=rows, robust=white_box.robust) for name, rows in broken.items()
    ]


def _white_box(norm: Norm, eps: float) -> list[Attack]:
    return [Pgd(norm=norm, eps=eps, num_steps=STEPS[-1], loss=loss) for loss in ("ce", "margin")]


def _pgd_accuracy(
    logits_of: LogitsFn, items: Items, norm: Norm, eps: float, *, num_steps: int = STEPS[-1]
) -> float:
    """Accuracy under PGD; one step size for all `num_steps`, so longer runs repeat shorter ones."""
    result = Pgd(norm=norm, eps=eps, num_steps=num_steps)(logits_of, items)
    return float((result.adversarial_prediction == items.y).double().mean())
