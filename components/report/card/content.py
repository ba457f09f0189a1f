"""Content of a model card: headline strip, trust panel, suites, cost, provenance, chapters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from components.core.errors import CasemateError, first_line
from components.evaluate.metrics import NULL, MetricRow
from components.report import attacked, chapters
from components.report.analysis.chapters import chapters as analysis_chapters
from components.report.card import figures
from components.report.card.evidence import (
    Evidence,
    Finding,
    Subject,
    all_figures,
    analyses_of,
    merged,
    read_evidence,
)
from components.report.card.figures import Figure
from components.report.card.headlines import headlines
from components.report.certified import recount_agrees
from components.report.content import (
    AttackVerdict,
    Cell,
    Chapter,
    Check,
    Column,
    Fact,
    Table,
)
from components.report.evaluation.chapters import Evaluation
from components.report.evaluation.chapters import chapters as evaluation_chapters
from components.report.records import CertifyResult, TrainResult
from components.report.run_results import Dataset, Results
from components.report.wording import TIMES

NOT_RECORDED = "not recorded"
PLAIN_SUITES = (
    *(figures.CORRUPTIONS, figures.SHIFTS, figures.SHAPE),
    *(figures.SPATIAL, figures.TRANSFER, figures.INTERNALS),
)


@dataclass(frozen=True, slots=True)
class Card:
    """Everything that a card says; its pages only lay it out."""

    subject: Subject
    identity: tuple[Fact, ...]
    strip: tuple[Figure, ...]  # the headline figures
    checks: tuple[Check, ...]
    verdicts: tuple[AttackVerdict, ...]
    remarks: tuple[str, ...]  # flags of the data, what was compared
    suites: tuple[Figure, ...]  # all figures; one that is not evaluated for a suite without any
    chapters: tuple[Chapter, ...]
    cost: Table
    provenance: tuple[Fact, ...]
    recipe_text: str = ""

    @property
    def title(self) -> str:
        return self.subject.name

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.holds)


def build_card(
    subject: Subject,
    found: Sequence[Finding],
    *,
    provenance: Sequence[Fact] = (),
    recipe_text: str = "",
) -> Card:
    """The card of a model from its finished results.

    A result that verifies and cannot be read is not verified for the card, with the reason.
    """
    evidence, found = _read(subject, found)
    every = all_figures(evidence, subject.name)
    return Card(
        subject,
        tuple(_identity(subject, evidence)),
        tuple(headlines(every)),
        tuple(_checks(evidence, found)),
        tuple(v for attack in evidence.attacks for v in attacked.verdicts(attack)),
        tuple(_remarks(evidence, every, found)),
        tuple(_suites(every)),
        tuple(_chapters(subject, evidence)),
        _cost(subject, evidence),
        (*_provenance(subject, found), *provenance),
        recipe_text,
    )


def _read(subject: Subject, found: Sequence[Finding]) -> tuple[Evidence, list[Finding]]:
    """The evidence, and the findings with those marked that cannot be read."""
    parts, kept = [], []
    for one in found:
        try:
            part = read_evidence(subject.name, subject.digest, one)
        except (CasemateError, KeyError, TypeError, ValueError, AttributeError, OSError) as error:
            one = replace(one, problem=f"cannot be read: {first_line(error)}")
            part = read_evidence(subject.name, subject.digest, one)
        parts.append(part)
        kept.append(one)
    return merged(parts), kept


# -- identity


def _identity(subject: Subject, evidence: Evidence) -> Iterator[Fact]:
    spec = subject.spec
    size = spec.get("image_size")
    channels = spec.get("channels")
    yield Fact("Digest", subject.digest[:12])
    yield Fact("Architecture", str(spec.get("architecture", NOT_RECORDED)))
    weights = subject.num_weights
    yield Fact("Weights", _millions(weights) if weights is not None else NOT_RECORDED)
    rows = [row for own in evidence.rows.values() for row in own]
    gmacs = next((row.gmacs for row in rows if row.gmacs is not None), None)
    yield Fact("GMAC per image", f"{gmacs:.3g}" if gmacs is not None else NOT_RECORDED)
    if size and channels:
        yield Fact("Input", f"{channels} {TIMES} {size} {TIMES} {size} px")
    yield Fact("Classes", str(spec.get("num_classes", NOT_RECORDED)))
    yield Fact("Dataset", subject.origin or NOT_RECORDED)
    yield from subject.facts
    yield Fact("Licence", NOT_RECORDED)


def _millions(count: int) -> str:
    return f"{count / 1e6:.3g} million" if count >= 1e5 else f"{count:,}"


# -- trust


def _checks(evidence: Evidence, found: Sequence[Finding]) -> Iterator[Check]:
    """Whether every result verifies, and whether results agree with each other."""
    yield from (
        Check(False, f"{one.label} {one.problem.rstrip('.')}.") for one in found if one.problem
    )
    if held := [one.label for one in found if not one.problem]:
        yield Check(
            True,
            f"Files are unchanged, and claims follow from votes and rows: {', '.join(held)}.",
        )
    for attack in evidence.attacks:
        (model,) = attack.models.values()
        yield Check(
            attacked.never_rises(model),
            f"{attack.name}: robust accuracy is at most clean accuracy, and never rises along the "
            "list of attacks.",
        )
    for made in evidence.certificates:
        yield Check(
            made.sound and recount_agrees(made),
            f"{made.name}: the rule is sound, and the claims of all items add up to the summary.",
        )
        if tried := made.challenge:
            broken = f"{tried.broken_certified} of {tried.certified.num_correct}"
            yield Check(
                not tried.broken_certified and tried.certified.value <= tried.robust.value,
                f"{made.name}: certified is at most attacked under one threat; {tried.attack} "
                f"broke {broken} certified items.",
            )


def _remarks(
    evidence: Evidence, every: Sequence[Figure], found: Sequence[Finding]
) -> Iterator[str]:
    if not found:
        yield "No finished result is about this model."
    unchecked = [a.name for a in evidence.attacks if next(iter(a.models.values())).sanity is None]
    if unchecked:
        yield f"No sanity checks were run on {', '.join(unchecked)}."
    if every and not any(f.kind == "proven" for f in every):
        yield "Nothing is proven about this model: attacks give upper bounds only."
    alone = [one.name for one in evidence.certificates if one.challenge is None]
    if alone:
        yield f"No attack was run on {', '.join(alone)}: the proof stands alone."
    flags = {
        flag
        for rows in evidence.rows.values()
        for row in rows
        for flag in row.flags
        if not flag.startswith(NULL)
    }
    if flags:
        yield f"Flags of the suites: {', '.join(sorted(flags))}."
    digests = _datasets(evidence)
    if len(digests) > 1:
        yield (
            f"Results are about {len(digests)} datasets; do not compare their shares: "
            f"{'; '.join(digests)}."
        )


def _datasets(evidence: Evidence) -> list[str]:
    """Datasets of certificates and suites, but of shifts, which have their own."""
    found: dict[str, list[str]] = {}
    for one in evidence.certificates:
        found.setdefault(str(one.document.evidence.dataset_digest), []).append(one.name)
    for label, rows in evidence.rows.items():
        for digest in {r.dataset_digest for r in rows if r.suite not in ("shifts", "shape_bias")}:
            found.setdefault(digest, []).append(label)
    return [f"{digest[:12]} ({', '.join(names)})" for digest, names in found.items()]


# -- suites, chapters, cost, provenance


def _suites(every: Sequence[Figure]) -> Iterator[Figure]:
    """All figures by suite; a suite without any is listed as not evaluated."""
    attacks = [figures.attack_suite(norm) for norm in ("linf", "l2")]
    order = [figures.CLEAN, *figures.certificate_suites(), *attacks, *PLAIN_SUITES]
    further = [f.suite for f in every if f.suite not in order]
    for suite in dict.fromkeys([*order, *further]):
        own = [f for f in every if f.suite == suite]
        yield from own or [figures.missing(suite)]


def _chapters(subject: Subject, evidence: Evidence) -> Iterator[Chapter]:
    """The chapters of the report, about this model."""
    shown = _results(subject, evidence)
    yield from chapters.certificate_chapters(shown, num_examples=0)
    if chapter := chapters.attack_chapter(shown.attacks):
        yield chapter
    rows = [row for own in _one_per_suite(evidence).values() for row in own]
    yield from evaluation_chapters(Evaluation(tuple(rows)))
    yield from analysis_chapters(analyses_of(evidence), subject.classes)
    if subject.classes and (pictures := chapters.example_chapter(shown, num_examples=2)):
        yield pictures
    if chapter := chapters.training_chapter(shown.trained):
        yield chapter
    if chapter := chapters.threat_chapter(shown):
        yield chapter


def _results(subject: Subject, evidence: Evidence) -> Results:
    image = next((one.document.evidence.image for one in evidence.certificates), None)
    size = int(subject.spec.get("image_size", 0))
    height, width = (image.height, image.width) if image else (size, size)
    channels = int(subject.spec.get("channels", 0))
    data = Dataset(subject.classes, channels, height, width, "", {})
    own = TrainResult(subject.name, (), subject.digest, dict(subject.spec))
    trained = (subject.trained or own,)
    return Results(data, trained, None, evidence.attacks, evidence.certificates)


def _one_per_suite(evidence: Evidence) -> dict[str, tuple[MetricRow, ...]]:
    """The rows of each suite from the result with the most items: rows of several would mix."""
    best: dict[str, tuple[MetricRow, ...]] = {}
    sizes: dict[str, int] = {}
    for rows in evidence.rows.values():
        for suite in {row.suite for row in rows}:
            own = tuple(row for row in rows if row.suite == suite)
            size = max((row.n or 0 for row in own), default=0)
            if size > sizes.get(suite, -1):
                best[suite], sizes[suite] = own, size
    return best


COST = (
    *(Column("Result"), Column("items", "number")),
    *(Column("evaluations or votes", "number"), Column("gradients", "number")),
    *(Column("seconds", "number"), Column("Of", "note")),
)


def _cost(subject: Subject, evidence: Evidence) -> Table:
    rows: list[tuple[Cell, ...]] = []
    if (trained := subject.trained) and trained.rows:
        seconds = sum(float(row.get("seconds") or 0.0) for row in trained.rows)
        what = f"training, {len(trained.rows)} epochs"
        rows.append((f"train.{trained.model}", None, None, None, round(seconds, 1), what))
    for attack in evidence.attacks:
        (model,) = attack.models.values()
        gradients = sum(step.num_gradients for step in model.steps)
        what = f"{figures.attack_title(attack)}, without sanity checks and curves"
        count = model.clean.num_items
        rows.append((attack.name, count, model.num_evaluations, gradients, None, what))
    for one in evidence.certificates:
        count, votes = len(one.correct), _num_votes(one)
        rows.append(
            (one.name, count, votes, None, None, one.family.vote_words(one.document.evidence))
        )
    for label, own in evidence.rows.items():
        count = max((row.n or 0 for row in own), default=0)
        rows.append((label, count, None, None, None, "evaluation suite"))
    return Table("cost", COST, tuple(rows))


def _num_votes(one: CertifyResult) -> int:
    """Predictions behind a certificate; of one that stops early those that were drawn."""
    if "draws_used" in one.document.summary:
        return int(one.document.summary["draws_used"]["total"])
    streams = one.family.streams(one.document.evidence)
    return sum(streams.values()) * len(one.correct)


def _provenance(subject: Subject, found: Sequence[Finding]) -> Iterator[Fact]:
    yield Fact("model digest", subject.digest, code=True)
    for one in found:
        yield from (replace(f, term=f"{one.label}: {f.term}") for f in one.record)
        if one.command:
            yield Fact(f"{one.label}: check with", one.command, code=True)
