"""What the chapters of all certificate families share: accuracies, sentences, legends."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from components.certify.family import AnyFamily
from components.certify.registry import FAMILIES
from components.core.statistics import accuracy, exact_accuracy
from components.report.content import Accuracy, Cell, Chapter, Column, Fact, LegendEntry, Table
from components.report.records import CertifyResult
from components.report.run_results import Results


def chapter(results: Results, found: Sequence[CertifyResult], *, num_examples: int) -> Chapter:
    """The chapter of a family that has no charts of its own: accuracy at every claimed budget."""
    rows: list[tuple[Cell, ...]] = []
    for result in found:
        family, summary = result.family, result.document.summary
        for budget in map(family.budget, summary["certified"]):
            proven = share(result.certified_at(budget)) if result.sound else None
            rows.append(
                (result.name, results.model_of(result), family.budget_words(budget), proven)
            )
    columns = (
        Column("Certificate"),
        Column("Model"),
        Column("budget"),
        Column("certified", "proven"),
    )
    name = found[0].family.threat_name
    table = Table(f"certified-{name}", columns, tuple(rows))
    intro = " ".join(proof_paragraphs(found))
    return Chapter(f"certified-{name}", f"Proven: {name}", intro, tables=(table,))


def share(held: NDArray[np.bool_]) -> Accuracy:
    """Accuracy from one bool per item."""
    return Accuracy.parse(accuracy(held), where="certificates")


def primary_budget(result: CertifyResult) -> float:
    """The budget of the headline, of reports and cards: the challenged one, else the smallest."""
    if result.challenge:
        return result.family.challenged_budget(result.challenge.threat, step=result.name)
    return result.family.smallest_budget(result.document.claim)


def headline_cell(result: CertifyResult) -> tuple[str, str, Accuracy]:
    """(title, detail, certified accuracy) of a certificate's headline column."""
    budget, name = primary_budget(result), result.family.threat_name
    detail = result.family.budget_words(budget)
    return f"Certified {name}", detail, share(result.certified_at(budget))


def budget_points(budgets: Iterable[str], certified: Sequence[Accuracy]) -> str:
    """What is proven at each budget, in words."""
    pairs = zip(budgets, certified, strict=True)
    return ", ".join(f"{budget}{accuracy.percent('proven')}" for budget, accuracy in pairs)


def challenged_point(result: CertifyResult) -> tuple[float, Accuracy] | None:
    """The budget of the challenge and the accuracy that it left."""
    challenge = result.challenge
    return (primary_budget(result), challenge.robust) if challenge else None


def proven_column(title: str, detail: str, result: CertifyResult) -> Column:
    """A column of certified accuracies; not labelled as proven unless the rule is sound."""
    if result.sound:
        return Column(title, "proven", detail)
    return Column(f"{title} (not sound)", "measured", detail)


def describe_votes(result: CertifyResult) -> str:
    """The votes on an item, in words."""
    return result.family.vote_words(result.document.evidence)


def proof_paragraphs(found: Sequence[CertifyResult]) -> list[str]:
    """One paragraph per certificate family: how it proves its claims."""
    kinds: dict[AnyFamily, set[str]] = {}
    for result in found:
        kinds.setdefault(result.family, set()).add(result.kind)
    ordered = sorted(kinds, key=lambda family: list(FAMILIES).index(family.kinds[0]))
    return [family.proof_words(kinds[family]) for family in ordered]


def certificate_facts(result: CertifyResult, *, model: str, command: str) -> tuple[Fact, ...]:
    """The command that checks a certificate, and the digests of its model, data and votes."""
    evidence, name = result.document.evidence, result.name
    return (
        Fact(f"{name}: check with", command, code=True),
        Fact(f"{name}: model {model}", str(evidence.model_digest), code=True),
        Fact(f"{name}: dataset", str(evidence.dataset_digest), code=True),
        Fact(f"{name}: votes sha256", str(result.document.votes_sha256), code=True),
    )


def recount_agrees(result: CertifyResult) -> bool:
    """Whether the stored summary equals a recount of the claims per item, under every rule."""
    return all(
        dict(stored) == exact_accuracy(result.certified_at(result.family.budget(entry), rule=rule))
        for entry in result.document.summary["certified"]
        for rule, stored in result.family.shares(entry).items()
    )


def standard_sentence(result: CertifyResult, standard: Accuracy) -> str:
    """Accuracy without an adversary, and the abstentions."""
    abstained = sum(map(bool, result.columns["abstain"]))
    tail = f" It abstained on {abstained}." if abstained else ""
    return (
        f"Without an adversary the vote is right on {standard.percent('measured')} of "
        f"{standard.num_items} items (95% interval {standard.interval()}).{tail}"
    )


def wrong_sentence(result: CertifyResult, budget: float, words: str) -> tuple[str, ...]:
    """The wrong answers that are certified: no attack changes them, and they are no success."""
    proven = result.family.proven_at(result.columns, budget)
    count, num_items = int((proven & ~result.correct).sum()), len(proven)
    if not count:
        return ()
    return (
        f"{count} of {num_items} items are certified against {words} with a wrong label: stable, "
        "but wrong. They do not count as certified accuracy.",
    )


def attack_legend(result: CertifyResult) -> tuple[LegendEntry, ...]:
    """The sign of the challenge, if there was one."""
    if not result.challenge:
        return ()
    count = result.challenge.robust.num_items
    return (LegendEntry(f"correct after the attack on {count} items", "attacked", "diamond"),)


def challenge_sentences(result: CertifyResult, budget: str) -> tuple[str, ...]:
    """Certified <= true robust accuracy <= accuracy under attack, all on the challenged items."""
    challenge = result.challenge
    if not challenge:
        return ("This certificate was not challenged by an attack in this run.",)
    return (
        f"Challenge: {challenge.attack} with {budget} on {challenge.robust.num_items} items. "
        f"{challenge.certified.percent('proven')} of them are certified and "
        f"{challenge.robust.percent('attacked')} are still correct after the attack: "
        "the true robust accuracy on these items lies between the two.",
    )
