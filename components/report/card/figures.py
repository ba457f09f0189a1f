"""Figures of a model card: one number of one result each, with its badge.

A figure is *proven* only if it is read from a sound certificate that verifies. Everything else is
attacked, measured, or has no number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from components.certify.family import AnyFamily
from components.certify.registry import FAMILIES, family_of
from components.core.shares import measured_percent
from components.evaluate.metrics import MetricRow
from components.report.certified import describe_votes, primary_budget, share
from components.report.content import Accuracy, ResultKind
from components.report.evaluation import rows as look
from components.report.records import AttackedModel, AttackResult, CertifyResult
from components.report.wording import pixels, short_threat

State = Literal[
    "verified",
    "suspect",
    "unchecked",
    "not sound",
    "not verified",
    "not evaluated",
    "not computable",
    "in its chapter",
]
WITHOUT_NUMBER: tuple[State, ...] = (
    "not verified",
    "not evaluated",
    "not computable",
    "in its chapter",
)
DOUBTFUL: tuple[State, ...] = ("suspect", "not sound", "not verified")

CLEAN = "Clean accuracy"
CORRUPTIONS, SHIFTS, SHAPE = "Common corruptions", "Distribution shifts", "Shape against texture"
SPATIAL, TRANSFER = "Rotations and shifts", "Adversarial transfer"
INTERNALS = "Internals"
CERTIFICATES = "Certificates"  # of one that cannot be read
AUTOATTACK = "autoattack"
OF_SUITE = {
    "clean": CLEAN,
    "remaining": CLEAN,
    "corruptions": CORRUPTIONS,
    "shifts": SHIFTS,
    "shape_bias": SHAPE,
    "spatial": SPATIAL,
    "transfer": TRANSFER,
}  # by the part of `evaluate.<part>`
SCORES = {"mce": "mCE (AlexNet = 100)", "relative_mce": "relative mCE (AlexNet = 100)"}
MEANS = {
    "mean75": "mean over 15 corruptions, 5 severities",
    "mean95": "mean over 19 corruptions, 5 severities",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, or the reason why there is none."""

    suite: str
    title: str
    kind: ResultKind | None  # None: not a share of items
    state: State
    detail: str = ""  # the threat model with its units, and what it is about
    share: Accuracy | None = None
    score: float | None = None  # e.g. mCE; or a share without an interval
    note: str = ""  # why it is doubtful or missing
    source: str = ""  # label of its result
    budget: float | None = None
    area: float | None = None  # share of the image that a patch covers
    is_headline: bool = True  # rather than one of several under the same heading

    def __post_init__(self) -> None:
        if self.kind == "proven" and self.state != "verified":
            raise ValueError(f"{self.title} is proven and {self.state}")
        if self.state in WITHOUT_NUMBER and (self.share is not None or self.score is not None):
            raise ValueError(f"{self.title} is {self.state} and has a number")

    @property
    def badge(self) -> str:
        """The kind of the result, or why it has none."""
        if self.state in (*WITHOUT_NUMBER, "not sound"):
            return self.state
        return self.kind or "measured"

    @property
    def text(self) -> str:
        """The number as the card shows it: proven shares rounded down, others to nearest."""
        if self.share is not None and self.kind is not None:
            return self.share.percent(self.kind)
        if self.score is not None:
            in_percent = f"{measured_percent(self.score)}%"
            return in_percent if self.kind is not None else f"{self.score:.1f}"
        return self.state

    @property
    def interval(self) -> str:
        """The 95% interval in percent, ends rounded outwards."""
        return self.share.interval() if self.share is not None else ""

    @property
    def num_items(self) -> int | None:
        return self.share.num_items if self.share is not None else None


def missing(suite: str, title: str = "", detail: str = "") -> Figure:
    """A suite that was never run."""
    return Figure(suite, title or suite, None, "not evaluated", detail)


def refused(suite: str, title: str, source: str, reason: str) -> Figure:
    """A result that does not verify: nothing of it is shown but the reason."""
    return Figure(suite, title, None, "not verified", note=reason, source=source)


# -- attacks


def attack_suite(norm: str) -> str:
    """The suite of attacks with a norm."""
    return f"Attacks, {'l∞' if norm == 'linf' else norm}"


def attack_figures(result: AttackResult) -> Iterator[Figure]:
    """Clean and robust accuracy of the one model of a list of attacks."""
    (model,) = result.models.values()
    state, note = _trust(model)
    detail = f"before the attacks of {result.name}"
    yield Figure(CLEAN, CLEAN, "measured", "verified", detail, model.clean, source=result.name)
    yield Figure(
        attack_suite(str(result.threat["kind"])),
        f"After {attack_title(result)}",
        "attacked",
        state,
        short_threat(result.threat),
        model.robust,
        note=note,
        source=result.name,
        budget=result.threat.get("eps"),
    )


def attack_title(result: AttackResult) -> str:
    """AutoAttack by its name, other lists by their members."""
    (model,) = result.models.values()
    entries = list(dict.fromkeys(step.entry for step in model.steps))
    names = [_attack_name(entry) for entry in entries]
    return names[0] if len(names) == 1 else f"{len(names)} attacks: {', '.join(names)}"


def _attack_name(entry: str) -> str:
    if entry.partition("-")[0] != AUTOATTACK:
        return entry
    version = entry.partition("-")[2]
    return f"AutoAttack ({version})" if version else "AutoAttack"


def is_autoattack(figure: Figure) -> bool:
    return figure.kind == "attacked" and "AutoAttack" in figure.title


def _trust(model: AttackedModel) -> tuple[State, str]:
    if model.sanity is None:
        return "unchecked", "the sanity checks of this attack were off"
    if model.sanity["verdict"] == "reliable":
        return "verified", ""
    state: State = "unchecked" if model.sanity["verdict"] == "unchecked" else "suspect"
    return state, "; ".join(model.sanity["reasons"])


# -- certificates


def certificate_suite(family: AnyFamily) -> str:
    """The suite of a certificate family."""
    return f"Certificates, {family.threat_name}"


def certificate_suites() -> list[str]:
    """The suites of all families."""
    return list(dict.fromkeys(certificate_suite(family_of(kind)) for kind in FAMILIES))


def certificate_figures(result: CertifyResult) -> Iterator[Figure]:
    """Certified accuracy at every claimed budget; an attack on the certificate, if there was one.

    The classifier is the smoothed one: votes of the model.
    """
    family, votes = result.family, describe_votes(result)
    suite, image = certificate_suite(family), result.document.evidence.image
    kind: ResultKind = "proven" if result.sound else "measured"
    state: State = "verified" if result.sound else "not sound"
    note = "" if result.sound else family.unsound_words
    yield Figure(
        suite,
        "Smoothed vote, no adversary",
        "measured",
        "verified",
        votes,
        share(result.correct),
        source=result.name,
        is_headline=False,
    )
    first = primary_budget(result)
    claims = [
        (float(family.budget(entry)), rule)
        for entry in result.document.summary["certified"]
        for rule in family.shares(entry)
    ]
    if all(budget != first for budget, _ in claims):
        claims.append((first, ""))  # challenged, and none of the stored budgets
    for budget, rule in claims:
        yield Figure(
            suite,
            f"Certified {family.threat_name}" + (f", rule {rule}" if rule else ""),
            kind,
            state,
            f"{_budget_words(family, budget, image.height * image.width)}; {votes}",
            share(result.certified_at(budget, rule=rule)),
            note=note,
            source=result.name,
            budget=budget,
            area=_area(family, budget, image.height * image.width),
            is_headline=budget == first and not rule,
        )
    if found := result.challenge:
        yield Figure(
            suite,
            f"After {found.attack}",
            "attacked",
            "verified",
            f"{_challenge_words(result)}; {votes}",
            found.robust,
            source=result.name,
            is_headline=False,
        )


def _area(family: AnyFamily, budget: float, num_pixels: int) -> float | None:
    return budget * budget / num_pixels if family.threat_name == "patch" else None


def _budget_words(family: AnyFamily, budget: float, num_pixels: int) -> str:
    """A budget with its unit: `2 x 2 px, 6.2% of the image`, `l2 radius 0.5`."""
    words, area = family.budget_words(budget), _area(family, budget, num_pixels)
    if area is not None:
        return f"{words}, {100 * area:.2g}% of the image"
    return f"{family.threat_name} {words}, pixels in [0, 1]"


def _challenge_words(result: CertifyResult) -> str:
    assert result.challenge is not None
    budget = result.family.challenged_budget(result.challenge.threat, step=result.name)
    return result.family.budget_words(budget)


# -- evaluation suites


def suite_figures(rows: Sequence[MetricRow], source: str, name: str) -> Iterator[Figure]:
    """The figures of one suite that are about all of it; `name`: of the model in these rows."""
    for row in sorted(rows, key=lambda r: (r.item, r.level or 0.0, r.metric)):
        if (found := _shown(row, name)) is not None:
            title, detail, kind = found
            yield _of_row(row, title, detail, kind, source)


def _of_row(
    row: MetricRow, title: str, detail: str, kind: ResultKind | None, source: str
) -> Figure:
    has_interval = None not in (row.value, row.lo95, row.hi95, row.n)
    found = look.share(row) if kind is not None and has_interval else None
    return Figure(
        OF_SUITE[row.suite],
        title,
        kind,
        "verified" if row.value is not None else "not computable",
        "; ".join(filter(None, (detail, _preprocessing(row)))),
        found,
        score=row.value if found is None else None,
        note=look.reason(row) if row.value is None else "; ".join(row.flags),
        source=source,
        budget=row.level,
    )


def _preprocessing(row: MetricRow) -> str:
    parts = [f"{row.fidelity} corruptions"] if row.suite == "corruptions" and row.fidelity else []
    return ", ".join([*parts, *([f"resize {row.resize}"] if row.resize else [])])


def _shown(row: MetricRow, name: str) -> tuple[str, str, ResultKind | None] | None:
    """(title, detail, kind) of a row that the card shows; None: one of many parts."""
    if row.suite == "clean" and (row.item, row.metric) == ("all", "accuracy"):
        return CLEAN, "of the evaluation", "measured"
    if row.suite == "corruptions" and row.item == "all":
        if row.metric in MEANS:
            return row.metric, MEANS[row.metric], "measured"
        if row.metric in SCORES:
            return SCORES[row.metric], "lower is better", None
    if row.suite == "shifts" and row.metric in ("masked", "unmasked"):
        return row.item, f"{row.metric} classes", "measured"
    if (
        row.suite == "shape_bias"
        and row.item == "all"
        and row.metric in ("shape_acc", "shape_bias")
    ):
        return {"shape_acc": "Shape accuracy"}.get(row.metric, "Shape bias"), "", "measured"
    if row.suite == "spatial" and row.metric == "accuracy":
        return "Worst case over the grid", row.item, "attacked"
    if row.suite == "transfer" and row.metric == "accuracy" and "/" in row.item:
        attack, _, other = row.item.partition("/")
        where = "white box" if other == name else f"made for {other}"
        eps = f", eps {pixels(row.level)}" if row.level is not None else ""
        return f"{attack.upper()}, {where}", f"l∞{eps}", "attacked"
    return None


def study_figure(study: str, source: str, *, num_items: int) -> Figure:
    """A study of the network's inside: its chapter holds the numbers."""
    title = study.replace("_", " ").capitalize()
    return Figure(INTERNALS, title, None, "in its chapter", f"{num_items:,} items", source=source)
