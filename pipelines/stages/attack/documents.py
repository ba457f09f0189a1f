"""The forms of `summary.json`: one summary per model, and its parts."""

from typing import NotRequired, TypedDict

from components.attacks.sanity.findings import Label

Accuracy = dict[str, float | int]  # value, low, high, num_items: `components/core/statistics.py`


class Costs(TypedDict):
    num_evaluations: int
    num_gradients: int
    zero_gradient_rate: float


class AttackSummary(Costs):
    """One attack of the list; accuracy is that under it and all attacks before it."""

    name: str
    entry: str
    num_items: int
    num_broken: int
    robust_accuracy: Accuracy


class CandidateSummary(TypedDict):
    """One rescaled network of a scaled attack; the first candidate is the model itself."""

    scales: list[float] | None
    original_accuracy: Accuracy
    scaled_accuracy: Accuracy
    scaled_clean_accuracy: Accuracy


class ProtocolSummary(TypedDict):
    """The figures of a scaled attack as its paper reports them."""

    num_items: int
    candidates: list[CandidateSummary]
    scaled_union_accuracy: Accuracy
    restarts_accuracy: Accuracy


class CurvePoint(TypedDict):
    """Accuracy under PGD at one budget or number of steps."""

    eps: NotRequired[float]
    steps: NotRequired[float]
    accuracy: Accuracy


Curves = dict[str, list[CurvePoint]]  # by `eps` or `steps`


class FindingSummary(TypedDict):
    """A `Finding`; JSON has neither infinity nor NaN, they become None."""

    name: str
    ok: bool
    value: float | None
    limit: float | None
    text: str


class GapLimits(TypedDict):
    cancels: float
    underflows: float


class AttentionGaps(TypedDict):
    """Histograms of the gap between the two largest attention logits, by attention module."""

    edges: list[float]
    limits: GapLimits
    blocks: dict[str, dict[str, object]]


class SanitySummary(TypedDict):
    verdict: Label
    reasons: list[str]
    num_items: int
    findings: list[FindingSummary]
    attention_gaps: AttentionGaps | None


class ModelSummary(Costs):
    num_items: int
    clean_accuracy: Accuracy
    robust_accuracy: Accuracy
    attacks: list[AttackSummary]
    paper_protocol: NotRequired[dict[str, ProtocolSummary]]  # by the name of the scaled attack
    curves: NotRequired[Curves]
    sanity: NotRequired[SanitySummary]
