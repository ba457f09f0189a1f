"""Sanity checks of our own attacks: the measurements of a worker, and the verdict of the stage."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

import pyarrow as pa
import torch

from components.attacks.base_settings import Norm
from components.attacks.cascade import CascadeState
from components.attacks.interface import Items
from components.attacks.sanity.audit import audit
from components.attacks.sanity.findings import Finding, verdict
from components.attacks.sanity.outcomes import (
    cascade_findings,
    list_is_strong,
    never_rises,
)
from components.core.types import LogitsFn
from components.models.attention.gaps import EDGES, GapHistogram
from components.models.pixels import PixelModel
from pipelines.stages.attack.documents import AttentionGaps, Curves, FindingSummary, SanitySummary

COARSE = 16  # fine bins of a gap histogram that make one of the report's: eight per decade


def audit_table(
    model: PixelModel, items: Items, *, norm: Norm, eps: float, surrogate: LogitsFn | None
) -> pa.Table:
    """The sanity suite on these items, as a durable part."""
    found = audit(model, items, net=model.net, norm=norm, eps=eps, surrogate=surrogate)
    document = {
        "num_items": len(items),
        "findings": [asdict(finding) for finding in found.findings],
        "attention_gaps": _gaps(found.gaps),
        "standing": list(found.robust),
    }
    return pa.table({"page": [json.dumps(document)]})


def _gaps(histograms: Mapping[str, GapHistogram]) -> AttentionGaps | None:
    """Histograms in eight bins per decade, one more below the first edge and one above the last."""
    if not histograms:
        return None
    limits = next(iter(histograms.values())).limits
    return {
        "edges": EDGES[::COARSE].tolist(),
        "limits": {"cancels": limits.cancels, "underflows": limits.underflows},
        "blocks": {
            name: {"counts": _coarse(gaps.counts.tolist()), **_finite(gaps.summary())}
            for name, gaps in histograms.items()
        },
    }


def _coarse(counts: Sequence[int]) -> list[int]:
    low, *inner, high = counts
    return [low, *(sum(inner[i : i + COARSE]) for i in range(0, len(inner), COARSE)), high]


def summarise(table: pa.Table, state: CascadeState, curves: Curves) -> SanitySummary:
    """Verdict, reasons and findings of one model: the suite, the attack list and the curves."""
    document = json.loads(table["page"][0].as_py())
    findings = [
        *(Finding(**finding) for finding in document["findings"]),
        *_renamed(cascade_findings(state), "attack list"),
        *_strength(state, document["standing"]),
        *_renamed(_curve_findings(curves), "curve"),
    ]
    any_attacked = bool((state.clean_prediction == state.y).any())
    label, reasons = verdict(findings, any_attacked=any_attacked)
    return {
        "verdict": label,
        "reasons": list(reasons),
        "num_items": document["num_items"],
        "findings": [_document(finding) for finding in findings],
        "attention_gaps": document["attention_gaps"],
    }


def _strength(state: CascadeState, suite_robust: Sequence[bool]) -> Iterable[Finding]:
    """The list against the suite's own white-box attack, on the items that both attacked."""
    if suite_robust:
        own = torch.tensor(suite_robust)
        yield list_is_strong(state.robust[: len(own)].cpu(), own)


def _curve_findings(curves: Curves) -> Iterable[Finding]:
    for key, budget in (("steps", "more steps"), ("eps", "larger eps")):
        if points := curves.get(key):
            accuracies = [point["accuracy"]["value"] for point in points]
            num_items = int(points[0]["accuracy"]["num_items"])
            yield never_rises(budget, accuracies, num_items=num_items)


def _renamed(findings: Iterable[Finding], where: str) -> list[Finding]:
    return [replace(finding, name=f"{finding.name} ({where})") for finding in findings]


def _document(found: Finding) -> FindingSummary:
    return {
        "name": found.name,
        "ok": found.ok,
        "value": found.value if math.isfinite(found.value) else None,
        "limit": found.limit if math.isfinite(found.limit) else None,
        "text": found.text,
    }


def _finite(values: Mapping[str, float | int]) -> dict[str, float | int | None]:
    """JSON has neither infinity nor NaN: they become None."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }
