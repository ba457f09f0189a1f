"""Checks of the counts, masks and accuracies of attack runs: did the attacks work?

Accuracies are shares of all items. Attacks are searches with random starts, so a difference of one
item is not a contradiction; with many items the limit is 0.2 points, as in the Square check of the
code of Croce & Hein 2020.
"""

from collections.abc import Sequence

from torch import Tensor

from components.attacks.cascade import CascadeState
from components.attacks.sanity.findings import NOT_CHECKED, Finding, finding

ZERO_GRADIENTS = 0.01  # share of all gradients; above it, accuracy may be wrong by a point
POINTS = 0.002
ROUNDING = 1e-9  # 0.51 - 0.50 is a little more than 0.01
BLACK_BOX = "square"  # a second one in a list is called square-2
LIST_POINTS, LIST_ITEMS = 0.02, 2  # margin by which the suite's own attacks may beat a list


def slack(num_items: int) -> float:
    """The share of items by which two runs may differ without a contradiction."""
    return max(POINTS, 1 / num_items) + ROUNDING


def gradients_alive(num_gradients: Tensor, num_zero_gradients: Tensor) -> Finding:
    """Along the path, gradients do not vanish everywhere: sign(0) = 0, such rows never move."""
    taken, zero = int(num_gradients.sum()), int(num_zero_gradients.sum())
    share = zero / taken if taken else 0.0
    text = f"{zero} of {taken} gradients along the path were exactly zero: no step is taken there"
    if not taken:
        text = f"{NOT_CHECKED}no gradient was taken"
    return finding("zero gradients", value=share, limit=ZERO_GRADIENTS, text=text)


def adds_nothing(weaker: str, *, broken: Tensor, robust: Tensor) -> Finding:
    """An attack with less information must not break items that are robust to white-box attacks.

    `broken` and `robust` are (N,) bool over all items: broken by the weaker attack alone, and
    robust to the white-box attacks.
    """
    return _extra(weaker, num_extra=int((broken & robust).sum()), num_items=len(robust))


def _extra(weaker: str, *, num_extra: int, num_items: int) -> Finding:
    text = f"{weaker} broke {num_extra} of {num_items} items that white-box attacks did not break"
    name = f"{weaker} against white box"
    return finding(name, value=num_extra / num_items, limit=slack(num_items), text=text)


def never_rises(budget: str, accuracies: Sequence[float], *, num_items: int) -> Finding:
    """`accuracies` in the order of a growing budget: each is at most the smallest before it."""
    lowest, rise = 1.0, 0.0
    for value in accuracies:
        rise = max(rise, value - lowest)
        lowest = min(lowest, value)
    text = f"with {budget} accuracy rises by up to {100 * rise:.1f} points"
    return finding(budget, value=rise, limit=slack(num_items), text=text)


def reaches_floor(accuracy: float, *, floor: float, num_items: int) -> Finding:
    """With a budget that reaches one constant image from all others, accuracy falls to `floor`.

    `floor` is the share of items whose label the model predicts on that image (Carlini et al.
    2019, sec. 5.2: unbounded attacks must reach chance); a working attack leaves no accuracy above.
    """
    text = (
        f"accuracy is {accuracy:.1%} with a budget that reaches plain grey from every image; "
        f"it should be at most {floor:.1%}"
    )
    excess = max(accuracy - floor, 0.0)
    return finding("unbounded attack", value=excess, limit=slack(num_items), text=text)


def cascade_findings(state: CascadeState) -> tuple[Finding, ...]:
    """Checks of a finished list of attacks: its gradients, and its black-box attacks.

    A black-box attack is only compared if a white-box attack ran before it.
    """
    findings = [gradients_alive(state.num_gradients, state.num_zero_gradients)]
    num_items = len(state.y)
    white_box_ran = False
    for tally in state.tallies:
        if tally.name.partition("-")[0] != BLACK_BOX:
            white_box_ran = True
        elif white_box_ran:
            findings.append(_extra(tally.name, num_extra=tally.num_broken, num_items=num_items))
    return tuple(findings)


def list_is_strong(list_robust: Tensor, suite_robust: Tensor) -> Finding:
    """The suite's own white-box attack breaks few items that are robust to a list of attacks.

    (N,) bool over the same items. Few steps, tiny steps or a loss that does not fit the model's
    output overstate robustness without masked gradients.
    """
    num_items = len(suite_robust)
    missed = int((list_robust & ~suite_robust).sum())
    limit = max(LIST_POINTS, LIST_ITEMS / num_items) + ROUNDING
    text = (
        f"{missed} of {num_items} items are robust to the list but not to the suite's PGD "
        f"(cross-entropy, then margin): add stronger attacks to the list"
    )
    return finding("suite against attack list", value=missed / num_items, limit=limit, text=text)
