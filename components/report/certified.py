"""Charts of certificates: certified accuracy, and robust accuracy under the challenge attack."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from components.core.statistics import accuracy, clopper_pearson_interval
from components.core.types import FloatArray
from components.report import figures
from components.report.content import Accuracy, Cell, Chart, Column, Fact, LegendEntry, Table
from components.report.results import CertifyResult
from components.report.wording import side


def share(held: NDArray[np.bool_]) -> Accuracy:
    """Accuracy from one bool per item."""
    return Accuracy.parse(accuracy(held), where="certificates")


def primary_budget(result: CertifyResult) -> float:
    """The budget of the headline: the challenged one, else the smallest claimed."""
    if result.challenge:
        return result.family.challenged_budget(result.challenge.threat, step=result.name)
    return result.family.smallest_budget(result.document.claim)


def primary_size(result: CertifyResult) -> int:
    """The patch side of the headline."""
    return int(primary_budget(result))


def headline_cell(result: CertifyResult) -> tuple[str, str, Accuracy]:
    """(title, detail, certified accuracy) of a certificate's headline column."""
    budget, name = primary_budget(result), result.family.threat_name
    detail = result.family.budget_words(budget)
    return f"Certified {name}", detail, share(result.certified_at(budget))


def patch_chart(result: CertifyResult, *, model: str, image_area: int) -> Chart:
    """Certified accuracy by patch side."""
    sizes = sorted(int(m) for m in result.document.claim["patch_sizes"])
    certified, standard = [share(result.certified_at(m)) for m in sizes], share(result.correct)
    steps = _points((f"{side(m)} " for m in sizes), certified)
    svg = figures.patch_curve(
        sizes,
        certified=certified,
        standard=standard,
        attacked=_attacked(result),
        name=result.name,
        alt=f"Certified accuracy of {model} by patch size: {steps}. "
        f"Without an adversary {standard.percent('measured')}.",
    )
    return Chart(
        result.name,
        f"{model}: certified accuracy by patch size",
        svg,
        (
            LegendEntry(_proven_label(result), "proven", "line"),
            LegendEntry("the vote without an adversary", "measured", "dot"),
            *_attack_legend(result),
        ),
        (
            *_unsound_note(result),
            f"Votes: {describe_votes(result)}.",
            _standard_sentence(result, standard),
            *_vote_sentences(result),
            *_bracket(result, side(primary_size(result))),
        ),
        _patch_table(result, certified, image_area=image_area),
    )


def _points(budgets: Iterable[str], certified: Sequence[Accuracy]) -> str:
    """What is proven at each budget, in words."""
    pairs = zip(budgets, certified, strict=True)
    return ", ".join(f"{budget}{accuracy.percent('proven')}" for budget, accuracy in pairs)


def _attacked(result: CertifyResult) -> tuple[float, Accuracy] | None:
    """The budget of the challenge and the accuracy that it left."""
    challenge = result.challenge
    return (primary_budget(result), challenge.robust) if challenge else None


def _patch_table(result: CertifyResult, certified: Sequence[Accuracy], *, image_area: int) -> Table:
    """One row per patch side: votes it can touch, certified accuracy under each rule."""
    entries = sorted(result.document.summary["certified"], key=lambda e: int(e["patch_size"]))
    sizes = [int(entry["patch_size"]) for entry in entries]
    parts: dict[Column, Sequence[Cell]] = {
        Column("patch side", "number", "px"): sizes,
        Column("area", "number", "% of pixels"): [
            round(100 * m * m / image_area, 2) for m in sizes
        ],
    }
    for key, title in (("num_touched", "touched"), ("exact_touched", "touched, exact")):
        if all(key in entry for entry in entries):
            parts[Column(title, "number", "votes")] = [entry[key] for entry in entries]
    parts[proven_column("certified", "", result)] = certified
    if second := result.document.claim.get("second_rule"):
        second_shares = [share(result.certified_at(m, rule=second)) for m in sizes]
        parts[Column("certified", "proven", f"rule {second}")] = second_shares
    return Table(result.name, tuple(parts), tuple(zip(*parts.values(), strict=True)))


def proven_column(title: str, detail: str, result: CertifyResult) -> Column:
    """A column of certified accuracies; not labelled as proven unless the rule is sound."""
    if result.sound:
        return Column(title, "proven", detail)
    return Column(f"{title} (not sound)", "measured", detail)


def describe_votes(result: CertifyResult) -> str:
    """The votes on an item, in words."""
    return result.family.vote_words(result.document.evidence)


def describe_kind(result: CertifyResult) -> str:
    """The votes of a sweep in words, with the token policy if it differs from training."""
    settings = result.document.evidence.settings
    shown = result.family.short_vote_words(result.document.evidence)
    differs = "trained_token_policy" in settings
    return f"{shown}, tokens {settings['token_policy']} against training" if differs else shown


def radius_chart(result: CertifyResult, *, model: str) -> Chart:
    """Certified accuracy by l2 radius."""
    radii = sorted({float(r) for r in result.document.claim["radii"]})
    certified, standard = [share(result.certified_at(r)) for r in radii], share(result.correct)
    knots, held, low, high = _steps(result)
    points = _points((f"{r:g}: " for r in radii), certified)
    svg = figures.radius_curve(
        knots,
        share=held,
        low=low,
        high=high,
        standard=standard,
        attacked=_attacked(result),
        cap=float(result.document.summary["max_radius"]),
        name=result.name,
        alt=f"Certified accuracy of {model} by l2 radius, {points}.",
    )
    rows: list[tuple[Cell, ...]] = list(zip(radii, certified, strict=True))
    return Chart(
        result.name,
        f"{model}: certified accuracy by l2 radius",
        svg,
        (
            LegendEntry("proven at this radius, band: 95% interval", "proven", "line"),
            LegendEntry("largest radius that this many draws can prove", "muted", "dash"),
            LegendEntry("the vote without an adversary", "measured", "dot"),
            *_attack_legend(result),
        ),
        (
            _standard_sentence(result, standard),
            *_draws_sentences(result),
            *_bracket(result, f"an l2 budget of {primary_budget(result):g}"),
        ),
        Table(
            result.name,
            (Column("radius", "number", "l2, pixels in [0, 1]"), Column("certified", "proven")),
            tuple(rows),
        ),
    )


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
    """Whether the stored summary equals a recount of the claims per item."""
    for entry in result.document.summary["certified"]:
        budget = result.family.budget(entry)
        held = result.certified_at(budget)
        if Accuracy.parse(entry["accuracy"], where=result.name) != share(held):
            return False
        if "accuracy_loc" in entry:
            held = result.certified_at(budget, rule="loc")
            if Accuracy.parse(entry["accuracy_loc"], where=result.name) != share(held):
                return False
    return True


def _steps(result: CertifyResult) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Knots of the certified curve with pointwise exact intervals."""
    proven = result.correct & ~np.asarray(result.columns["abstain"], dtype=np.bool_)
    radii = np.asarray(result.columns["radius"], dtype=np.float64)[proven]
    num_items = len(proven)
    knots, held = figures.certified_steps(radii, num_items=num_items)
    counts = np.rint(held * num_items).astype(int)
    bounds = np.array([clopper_pearson_interval(int(k), num_items) for k in counts])
    return knots, held, bounds[:, 0], bounds[:, 1]


def _proven_label(result: CertifyResult) -> str:
    if not result.sound:
        return "by the published count of touched votes, which is too small: not proven"
    return "proven for every patch of this size, band: 95% interval"


def _unsound_note(result: CertifyResult) -> tuple[str, ...]:
    if result.sound:
        return ()
    return (
        "sound: false. These figures use the published count of touched ablations, which ignores "
        "the seam at the image's edge; they reproduce published tables and are not a guarantee.",
    )


def _vote_sentences(result: CertifyResult) -> tuple[str, ...]:
    """Accuracy of single votes, and how many were evaluated if voting stopped early."""
    summary, sentences = result.document.summary, []
    if raw := summary.get("ablation_accuracy"):
        single = Accuracy.parse(raw, where=result.name)
        sentences.append(
            f"A single vote is right in {single.percent('measured')} of all cases "
            f"(95% interval over items {single.interval()})."
        )
    if asked := summary.get("votes_asked"):
        sentences.append(
            f"Voting stopped as soon as all claims were decided: {100 * asked['value']:.1f}% of "
            f"the votes were evaluated, {asked['num_votes']:,}."
        )
    return tuple(sentences)


def _standard_sentence(result: CertifyResult, standard: Accuracy) -> str:
    abstained = sum(map(bool, result.columns["abstain"]))
    tail = f" It abstained on {abstained}." if abstained else ""
    return (
        f"Without an adversary the vote is right on {standard.percent('measured')} of "
        f"{standard.num_items} items (95% interval {standard.interval()}).{tail}"
    )


def _draws_sentences(result: CertifyResult) -> tuple[str, ...]:
    """Number of draws behind the radii, and their failure probability."""
    claim, settings = result.document.claim, result.document.evidence.settings
    fails = f"fails with a probability of at most {claim['failure_prob']:g}"
    if settings.get("method") != "sequential":
        draws = int(max(result.columns["n"]))
        return (f"Each radius is computed from {draws:,} noisy draws of its item and {fails}.",)
    asked = ", ".join(f"{radius:g}" for radius in settings["declared"]["radii"])
    mean, most = float(np.mean(result.columns["n"])), int(settings["num_estimate"])
    sentences = (
        f"Each item was drawn until the radii {asked} were decided: {mean:,.0f} draws on average, "
        f"at most {most:,}. Each radius {fails}; between and beyond these radii the curve is a "
        "lower bound that more draws could raise."
    )
    if 0 in settings["declared"]["radii"]:
        return (sentences,)
    return (
        sentences,
        "An item whose radii were given up early counts as an abstention here; with radius 0 "
        "among the declared ones its label would have been decided too.",
    )


def _attack_legend(result: CertifyResult) -> tuple[LegendEntry, ...]:
    if not result.challenge:
        return ()
    count = result.challenge.robust.num_items
    return (LegendEntry(f"correct after the attack on {count} items", "attacked", "diamond"),)


def _bracket(result: CertifyResult, budget: str) -> tuple[str, ...]:
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
