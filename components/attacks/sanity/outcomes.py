"""Did the attacks work? Checks of counts, masks and accuracies that any attack run leaves behind.

Accuracies are shares of all items. Attacks are searches with random starts, so one item more or
less is no contradiction; where many items were attacked, 0.2 points are, the alarm for Square in
the code of Croce & Hein 2020.
"""

from collections.abc import Sequence

from torch import Tensor

from components.attacks.cascade import Standing
from components.attacks.sanity.findings import Finding, finding

ZERO_GRADIENTS = 0.01  # share of all gradients; above it, a point of accuracy may be blindness
POINTS = 0.002
ROUNDING = 1e-9  # 0.51 - 0.50 is a little more than 0.01
BLACK_BOX = "square"  # a second one in a list is called square-2
LIST_POINTS, LIST_ITEMS = 0.02, 2  # by which the suite's own attacks may beat a list


def slack(num_items: int) -> float:
    """The share of items by which two runs may differ without a contradiction."""
    return max(POINTS, 1 / num_items) + ROUNDING


def gradients_alive(num_gradients: Tensor, num_zero_gradients: Tensor) -> Finding:
    """Along the path, gradients do not vanish everywhere: sign(0) = 0, such rows never move."""
    taken, zero = int(num_gradients.sum()), int(num_zero_gradients.sum())
    share = zero / taken if taken else 0.0
    text = f"{zero} of {taken} gradients along the path were exactly zero: no step is taken there"
    return finding("zero gradients", value=share, limit=ZERO_GRADIENTS, text=text)


def adds_nothing(weaker: str, *, broken: Tensor, standing: Tensor) -> Finding:
    """An attack that knows less must not break what white-box attacks left standing.

    `broken` and `standing` are (N,) bool over all items: broken by the weaker attack alone, and
    right after the white-box attacks.
    """
    return _extra(weaker, num_extra=int((broken & standing).sum()), num_items=len(standing))


def _extra(weaker: str, *, num_extra: int, num_items: int) -> Finding:
    text = f"{weaker} broke {num_extra} of {num_items} items that white-box attacks left standing"
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

    `floor` is the share of items whose label the model gives to that image (Carlini et al. 2019,
    sec. 5.2: unbounded attacks must reach chance): what is left above it, the attack missed.
    """
    text = (
        f"accuracy is {accuracy:.1%} where every image can become plain grey, "
        f"which leaves at most {floor:.1%}"
    )
    excess = max(accuracy - floor, 0.0)
    return finding("unbounded attack", value=excess, limit=slack(num_items), text=text)


def cascade_findings(standing: Standing) -> tuple[Finding, ...]:
    """What a finished list of attacks tells about itself: its gradients, and its black boxes.

    A black box is only compared if a white-box attack ran before it.
    """
    findings = [gradients_alive(standing.num_gradients, standing.num_zero_gradients)]
    num_items = len(standing.y)
    white_box_ran = False
    for tally in standing.tallies:
        if tally.name.partition("-")[0] != BLACK_BOX:
            white_box_ran = True
        elif white_box_ran:
            findings.append(_extra(tally.name, num_extra=tally.num_broken, num_items=num_items))
    return tuple(findings)


def list_is_strong(list_standing: Tensor, suite_standing: Tensor) -> Finding:
    """A list of attacks leaves little that the suite's own white box breaks.

    (N,) bool over the same items. Few steps, tiny steps or a loss that does not fit the model's
    output overstate robustness without any gradient being masked.
    """
    num_items = len(suite_standing)
    missed = int((list_standing & ~suite_standing).sum())
    limit = max(LIST_POINTS, LIST_ITEMS / num_items) + ROUNDING
    text = (
        f"{missed} of {num_items} items stand after the list but fall to the suite's PGD "
        f"(cross-entropy, then margin): add stronger attacks to the list"
    )
    return finding("suite against attack list", value=missed / num_items, limit=limit, text=text)
