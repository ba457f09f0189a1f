"""Certificates that differ only in the settings that their family can sweep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from components.core.digests import canonical_json
from components.report.records import CertifyResult

ModelOf = Callable[[CertifyResult], str]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Certificates of one kind and claim under several swept settings."""

    name: str
    results: tuple[CertifyResult, ...]

    @property
    def first(self) -> CertifyResult:
        return self.results[0]


def find_sweeps(results: Sequence[CertifyResult], model_of: ModelOf) -> tuple[Sweep, ...]:
    """Sets of certificates that share kind, claim and items, and have several swept values."""
    groups: dict[str, list[CertifyResult]] = {}
    for result in results:
        if swept_values(result):
            groups.setdefault(canonical_json(_shared(result)), []).append(result)
    found: list[Sweep] = []
    for group in groups.values():
        if len({swept_values(r) for r in group}) > 1:
            # of two certificates for one cell of the table the first is in the sweep
            cells = {(model_of(r), *swept_values(r)): r.name for r in reversed(group)}
            ordered = tuple(r for r in group if r.name in cells.values())
            found.append(Sweep(f"sweep-{group[0].kind}-{len(found)}", ordered))
    return tuple(found)


def _shared(result: CertifyResult) -> list[object]:
    """What the certificates of a sweep have in common."""
    evidence = result.document.evidence
    votes = result.family.short_vote_words(evidence)
    return [result.kind, result.document.claim, evidence.num_items, votes]


def swept_values(result: CertifyResult) -> tuple[int, ...]:
    """The values that a sweep changes, in the family's order; (): it cannot be swept."""
    return tuple(result.family.swept(result.document.evidence).values())


def own_charts(results: Sequence[CertifyResult], sweeps: Sequence[Sweep]) -> list[CertifyResult]:
    """Certificates that get their own chart: those outside sweeps, and challenged ones."""
    swept = {r.name for sweep in sweeps for r in sweep.results}
    return [r for r in results if r.name not in swept or r.challenge]


def headline_results(
    results: Sequence[CertifyResult], sweeps: Sequence[Sweep], model_of: ModelOf
) -> list[CertifyResult]:
    """Certificates of the headline table: of a sweep only the first of each model."""
    hidden = set()
    for sweep in sweeps:
        seen: set[str] = set()
        for result in sweep.results:
            if model_of(result) in seen:
                hidden.add(result.name)
            seen.add(model_of(result))
    return [r for r in results if r.name not in hidden]


def headline_detail(result: CertifyResult, detail: str, sweeps: Sequence[Sweep]) -> str:
    """The detail of a heading, with the swept values for a certificate of a sweep."""
    if not any(result.name == r.name for sweep in sweeps for r in sweep.results):
        return detail
    values = result.family.swept(result.document.evidence)
    return ", ".join([detail, *(f"{name} {value}" for name, value in values.items())])
