"""Doubts about our own attacks: what a worker measures, and the verdict that the stage writes."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import torch

from components.attacks.cascade import Standing
from components.attacks.interface import Items
from components.attacks.sanity.audit import audit
from components.attacks.sanity.findings import Finding, verdict
from components.attacks.sanity.outcomes import (
    cascade_findings,
    list_is_strong,
    never_rises,
)
from components.models.attention.gaps import EDGES, GapHistogram
from components.models.pixels import PixelModel
from pipelines.recipe.schema.attack import AttackSection

COARSE = 16  # fine bins of a gap histogram that make one of the report's: eight per decade


def audit_table(
    model: PixelModel, items: Items, section: AttackSection, *, surrogate: PixelModel | None
) -> pa.Table:
    """The sanity suite on these items, as a durable part."""
    assert section.eps is not None
    found = audit(
        model, items, net=model.net, norm=section.norm, eps=section.eps, surrogate=surrogate
    )
    page = {
        "num_items": len(items),
        "findings": [asdict(finding) for finding in found.findings],
        "attention_gaps": _gaps(found.gaps),
        "standing": list(found.standing),
    }
    return pa.table({"page": [json.dumps(page)]})


def _gaps(histograms: Mapping[str, GapHistogram]) -> dict[str, Any] | None:
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


def summarise(
    table: pa.Table, standing: Standing, curves: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Verdict, reasons and findings of one model: the suite, the attack list and the curves."""
    page = json.loads(table["page"][0].as_py())
    findings = [
        *(Finding(**finding) for finding in page["findings"]),
        *_renamed(cascade_findings(standing), "attack list"),
        *_strength(standing, page["standing"]),
        *_renamed(_curve_findings(curves), "curve"),
    ]
    label, reasons = verdict(findings)
    return {
        "verdict": label,
        "reasons": list(reasons),
        "num_items": page["num_items"],
        "findings": [_finite(asdict(finding)) for finding in findings],
        "attention_gaps": page["attention_gaps"],
    }


def _strength(standing: Standing, suite_standing: Sequence[bool]) -> Iterable[Finding]:
    """The list against the suite's own white box, on the items that both attacked."""
    if suite_standing:
        own = torch.tensor(suite_standing)
        yield list_is_strong(standing.correct[: len(own)].cpu(), own)


def _curve_findings(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterable[Finding]:
    for key, budget in (("steps", "more steps"), ("eps", "larger eps")):
        if points := curves.get(key):
            accuracies = [point["accuracy"]["value"] for point in points]
            num_items = points[0]["accuracy"]["num_items"]
            yield never_rises(budget, accuracies, num_items=num_items)


def _renamed(findings: Iterable[Finding], where: str) -> list[Finding]:
    return [replace(finding, name=f"{finding.name} ({where})") for finding in findings]


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows neither infinity nor NaN: they become None."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }
