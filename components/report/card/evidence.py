"""Reads the finished results about one model; those that do not verify are not read."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from components.certify.registry import family_of
from components.core.errors import CasemateError
from components.core.folders import Folder
from components.evaluate.metrics import METRICS_NAME, MetricRow, read_metrics
from components.report import results
from components.report.analysis.chapters import Analyses, Study, read_analyses
from components.report.card import figures
from components.report.card.figures import Figure
from components.report.content import Fact
from components.report.records import AttackResult, CertifyResult, TrainResult

STAGES = ("attack", "certify", "evaluate", "analyze")  # whose results a card shows


@dataclass(frozen=True, slots=True)
class Finding:
    """A finished result about the model; `problem` says why it does not count."""

    step: str  # e.g. certify.l2
    label: str  # unique among the results of the card
    folder: Folder
    names: tuple[str, ...]  # of the model in this result
    problem: str = ""
    record: tuple[Fact, ...] = ()  # where it comes from
    command: str = ""  # that checks it

    @property
    def stage(self) -> str:
        return self.step.partition(".")[0]

    @property
    def part(self) -> str:
        return self.step.partition(".")[2]


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that a card is about."""

    name: str
    digest: str
    spec: Mapping[str, Any]
    facts: tuple[Fact, ...] = ()  # recipe, versions, registration
    trained: TrainResult | None = None
    num_weights: int | None = None
    classes: tuple[str, ...] = ()
    origin: str = ""  # of the dataset


@dataclass(frozen=True, slots=True)
class Evidence:
    """All results about a model, read; `refused` are figures of those that do not verify."""

    attacks: tuple[AttackResult, ...] = ()
    certificates: tuple[CertifyResult, ...] = ()
    rows: Mapping[str, tuple[MetricRow, ...]] = field(default_factory=dict)  # by label
    studies: Mapping[str, tuple[str, Study]] = field(default_factory=dict)  # label: study
    refused: tuple[Figure, ...] = ()


def read_evidence(name: str, digest: str, found: Finding) -> Evidence:
    """One result, about the model under its name."""
    if found.problem:
        return Evidence(refused=(_refused(found),))
    if found.stage == "attack":
        return Evidence(attacks=tuple(_attack(name, found)))
    if found.stage == "certify":
        return Evidence(certificates=(results.read_certify(found.label, found.folder),))
    if found.stage == "evaluate":
        return Evidence(rows={found.label: _rows(name, digest, found)})
    study = _study(found)
    return Evidence(studies={found.label: study} if study else {})


def merged(parts: Iterable[Evidence]) -> Evidence:
    """The evidence of all parts, in their order."""
    whole = Evidence()
    for part in parts:
        whole = Evidence(
            (*whole.attacks, *part.attacks),
            (*whole.certificates, *part.certificates),
            {**whole.rows, **part.rows},
            {**whole.studies, **part.studies},
            (*whole.refused, *part.refused),
        )
    return whole


def _attack(name: str, found: Finding) -> Iterator[AttackResult]:
    """The list of attacks, with this model alone; a model may be attacked under two names."""
    whole = results.read_attack(found.label, found.folder)
    own = [known for known in found.names if known in whole.models]
    for number, known in enumerate(own):
        label = found.label if not number else f"{found.label}.{known}"
        yield replace(whole, name=label, models={name: whole.models[known]})


def _rows(name: str, digest: str, found: Finding) -> tuple[MetricRow, ...]:
    """The rows about this model, under its name, also where it is the source of a transfer."""
    own = [row for row in read_metrics(found.folder / METRICS_NAME) if row.model_digest == digest]
    names = {row.model for row in own}

    def renamed(row: MetricRow) -> MetricRow:
        attack, slash, source = row.item.partition("/")
        is_own = row.suite == "transfer" and bool(slash) and source in names
        return replace(row, model=name, item=f"{attack}/{name}" if is_own else row.item)

    return tuple(renamed(row) for row in own if row.model == min(names))


def _study(found: Finding) -> tuple[str, Study] | None:
    """(name of the study, its part about this model)."""
    study = read_analyses({found.step: found.folder}).studies[found.part]
    known = next((name for name in found.names if name in study.rows), None)
    if known is None:
        return None
    others = set(study.rows) - {known}
    details = {
        key: {k: v for k, v in value.items() if k not in others}
        if isinstance(value, dict)
        else value
        for key, value in study.details.items()
    }
    summary = {**study.summary, "details": details}
    return found.part, replace(study, rows={known: study.rows[known]}, summary=summary)


def _refused(found: Finding) -> Figure:
    title = found.part.replace("_", " ") or found.step
    return figures.refused(_suite_of(found), title, found.label, found.problem)


def _suite_of(found: Finding) -> str:
    """The suite of a result that is not read, as far as its name tells."""
    if found.stage == "evaluate":
        return figures.OF_SUITE.get(found.part, found.part)
    if found.stage == "analyze":
        return figures.INTERNALS
    try:
        if found.stage == "certify":
            raw = results.read_json(found.folder / "certificate.json", step=found.label)
            return figures.certificate_suite(family_of(str(raw["kind"])))
        raw = results.read_json(found.folder / "summary.json", step=found.label)
        return figures.attack_suite(str(raw["threat"]["kind"]))
    except (CasemateError, KeyError, TypeError, ValueError, OSError):
        return figures.CERTIFICATES if found.stage == "certify" else "Attacks"


def all_figures(evidence: Evidence, name: str) -> list[Figure]:
    """Every figure of every result."""
    found = [f for attack in evidence.attacks for f in figures.attack_figures(attack)]
    found += [f for one in evidence.certificates for f in figures.certificate_figures(one)]
    for label, rows in evidence.rows.items():
        found += figures.suite_figures(rows, label, name)
    found += [
        figures.study_figure(study, label, num_items=kept.num_items)
        for label, (study, kept) in evidence.studies.items()
    ]
    return [*found, *evidence.refused]


def analyses_of(evidence: Evidence) -> Analyses:
    """The studies by name; of several the first."""
    return Analyses(dict(reversed(list(evidence.studies.values()))))
