"""Checks of a model and of its images: can it be attacked?

Logits are compared after scaling each row to length one, as in the code of Croce & Hein 2020: a
factor on all logits then does not change the result. Call these inside `attack_mode(model)`, on the
model itself: with `in_fixed_batches` the batch shape never changes.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.attacks.sanity.findings import NOT_CHECKED, Finding, finding
from components.core.errors import CasemateError
from components.core.types import Images, Logits, LogitsFn
from components.models.attention.discover import attention_of
from components.models.attention.gaps import GapHistogram, attention_gaps

SAME_LOGITS = 1e-4  # between unit rows; float32 networks differ by about 1e-6 between batch shapes
UNDERFLOWED = 0.01  # share of a block's queries all of whose attention gradients are exactly 0
CANCELLED = 0.1  # share of a block's queries whose winning logit has no gradient; others have one


def eval_mode(model: nn.Module) -> Finding:
    """No module is in training mode: dropout masks gradients, running statistics change."""
    training = [name or "the model" for name, part in model.named_modules() if part.training]
    text = f"{training[0]} is in training mode" if training else "every module is in eval mode"
    return finding("eval mode", value=len(training), limit=0, text=text)


def returns_logits(logits: Logits) -> Finding:
    """Rows that are non-negative and sum to 1 are probabilities: a second softmax flattens them."""
    share = float(_are_probabilities(logits).double().mean())
    text = f"{share:.0%} of the outputs look like probabilities; attacks need logits"
    return finding("logits", value=share, limit=0.5, text=text)


def refuse_probabilities(logits: Logits, *, model: str) -> None:
    """Reject a model whose outputs are all distributions: attacks on them would be meaningless."""
    if bool(_are_probabilities(logits).all()):
        remedy = "returns probabilities, attacks need logits; leave out the softmax at its end"
        raise CasemateError("model", model, remedy)


def _are_probabilities(logits: Logits) -> Tensor:
    """(B,) bool; non-negative numbers that sum to 1 are at most 1."""
    return (logits >= 0).all(dim=1) & ((logits.double().sum(dim=1) - 1).abs() < 1e-4)


def images_in_range(x: Images) -> Finding:
    """Pixels lie in [0, 1]; otherwise ball and pixel range may not intersect."""
    low, high = float(x.min()), float(x.max())
    beyond = max(0.0, -low, high - 1) if bool(x.isfinite().all()) else float("inf")
    text = f"pixels reach from {low:g} to {high:g}; the range is [0, 1]"
    return finding("input range", value=beyond, limit=0, text=text)


@torch.no_grad()
def deterministic(logits_of: LogitsFn, x: Images, *, num_passes: int = 5) -> Finding:
    """Equal images give equal logits; otherwise attack the mean of many passes (`rand`)."""
    first = logits_of(x)
    moved = max(_distance(logits_of(x), first) for _ in range(num_passes - 1))
    text = f"logits of equal images differ by up to {moved:.1e}; random models need `rand`"
    return finding("determinism", value=moved, limit=SAME_LOGITS, text=text)


@torch.no_grad()
def batch_invariant(logits_of: LogitsFn, x: Images) -> Finding:
    """A row's logits do not depend on the other rows of its batch."""
    alone = torch.cat([logits_of(row) for row in torch.split(x, 1)])
    moved = _distance(alone, logits_of(x))
    text = f"logits alone and in a batch differ by up to {moved:.1e}"
    return finding("batch invariance", value=moved, limit=SAME_LOGITS, text=text)


def _distance(a: Logits, b: Logits) -> float:
    """Largest l2 distance between rows scaled to length one; NaN stays NaN."""
    unit_a, unit_b = F.normalize(a.double(), dim=1), F.normalize(b.double(), dim=1)
    return float((unit_a - unit_b).norm(dim=1).max())


@torch.no_grad()
def gap_histograms(
    logits_of: LogitsFn, net: nn.Module, x: Images
) -> tuple[Mapping[str, GapHistogram], str]:
    """Gaps of the two largest pre-softmax logits per attention module of `net`, from one pass.

    A network without access to its attention has no histograms; the second value is the reason.
    """
    try:
        attention_of(net)
    except CasemateError as refusal:
        return {}, str(refusal)
    with attention_gaps(net) as histograms:
        logits_of(x)
    return histograms, ""


def attention_alive(
    histograms: Mapping[str, GapHistogram], *, why_none: str = ""
) -> tuple[Finding, Finding]:
    """Softmax gradients vanish in no block, by underflow or cancellation (Jain & Dutta, sec. 3)."""
    underflowed = {name: h.num_underflowed / h.num_gaps for name, h in histograms.items()}
    cancelled = {name: h.num_cancelled / h.num_gaps for name, h in histograms.items()}
    return (
        _worst_block("attention underflow", underflowed, limit=UNDERFLOWED, why_none=why_none),
        _worst_block("attention cancellation", cancelled, limit=CANCELLED, why_none=why_none),
    )


def _worst_block(name: str, shares: Mapping[str, float], *, limit: float, why_none: str) -> Finding:
    if not shares:
        return finding(name, value=0, limit=limit, text=f"{NOT_CHECKED}{why_none}")
    block, share = max(shares.items(), key=lambda pair: pair[1])
    text = f"in {block}, {share:.1%} of the queries have a gap at which softmax has no gradient"
    return finding(name, value=share, limit=limit, text=text)
