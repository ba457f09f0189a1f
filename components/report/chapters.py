"""Chapters of the report, built from results."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from components.certify.registry import FAMILIES, family_of
from components.core.registry import load_reference
from components.core.shares import measured_percent
from components.report import attacked, certified, classes, figures, galleries, sweeps, tuning
from components.report.content import (
    Accuracy,
    Cell,
    Chapter,
    Chart,
    Check,
    Column,
    Fact,
    LegendEntry,
    Table,
)
from components.report.records import AttackResult, CertifyResult, TrainResult, TuneResult
from components.report.run_results import Results
from components.report.wording import TIMES, long_threat, settings_text, short_threat

HISTORY = (
    "epoch",
    "lr",
    "eps",
    "loss",
    "train_accuracy",
    "val_accuracy",
    "val_robust_accuracy",
    "val_mse",
    "seconds",
)


ACCURACY_SIGNS = {
    "train_accuracy": LegendEntry("training accuracy", "measured", "dash"),
    "val_accuracy": LegendEntry("validation accuracy", "ink", "line"),
    "val_robust_accuracy": LegendEntry("validation accuracy under attack", "attacked", "line"),
}


def headline(results: Results) -> Table:
    """One row per model; results that were not run are empty."""
    models = list(
        dict.fromkeys(
            [
                *(train.model for train in results.trained),
                *(model for attack in results.attacks for model in attack.clean),
                *(results.model_of(c) for c in results.certificates),
            ]
        )
    )
    columns: dict[Column, dict[str, Accuracy]] = {Column("Clean", "measured"): _clean(results)}
    for attack in results.attacks:
        detail = short_threat(attack.threat)
        column = _unique(Column(f"After {attack.title}", "attacked", detail), columns, attack.name)
        columns[column] = attack.robust
    swept = results.sweeps()
    for result in sweeps.headline_results(results.certificates, swept, results.model_of):
        title, detail, share = certified.headline_cell(result)
        detail = sweeps.headline_detail(result, detail, swept)
        column = certified.proven_column(title, detail, result)
        model = results.model_of(result)
        smoothed = Column(f"Clean, smoothed {result.family.threat_name}", "measured", "no attack")
        for heading, cell in ((smoothed, certified.share(result.correct)), (column, share)):
            if model in columns.get(heading, {}):
                if columns[heading][model] == cell and heading is smoothed:
                    continue  # another claim of the same votes
                heading = _unique(heading, columns, result.name)
            columns.setdefault(heading, {})[model] = cell
    rows: list[tuple[Cell, ...]] = [
        (m, *(cells.get(m) for cells in columns.values())) for m in models
    ]
    return Table("headline", (Column("Model"), *columns), tuple(rows))


def checks(results: Results) -> tuple[Check, ...]:
    """Consistency checks between the results; a failed check is shown in red."""
    found = [
        Check(
            all(attacked.never_rises(model) for model in attack.models.values()),
            f"{attack.name}: accuracy never rises from clean items along the list of attacks, and "
            "ends at the robust accuracy.",
        )
        for attack in results.attacks
    ]
    digests = {train.digest for train in results.trained}
    for result in results.certificates:
        evidence = result.document.evidence
        same_data = evidence.dataset_digest == results.dataset.digest
        same_model = not digests or evidence.model_digest in digests
        found += [
            Check(
                same_data and same_model,
                f"{result.name}: model and dataset are those of this run.",
            ),
            Check(
                bool(result.document.sound) and certified.recount_agrees(result),
                f"{result.name}: the rule is sound, and the claims of all items add up to the "
                "summary.",
            ),
        ]
        if challenge := result.challenge:
            whole = challenge.broken_certified == 0
            found.append(
                Check(
                    whole and challenge.certified.value <= challenge.robust.value,
                    f"{result.name}: {challenge.attack} on {challenge.robust.num_items} items "
                    f"broke {'none' if whole else challenge.broken_certified} of the "
                    f"{challenge.certified.num_correct} that are certified against it.",
                )
            )
    return tuple(found)


def attack_chapter(attacks: Sequence[AttackResult]) -> Chapter | None:
    """Robust accuracy by attack, by budget and steps, and the sanity checks."""
    if not attacks:
        return None
    return Chapter(
        "attacks",
        "Under attack",
        "Accuracy under attack is an upper bound: a stronger attack can only lower it. An item "
        "counts if it is classified correctly before and after the attack; all items are in the "
        "denominator. Each attack of a list gets the items that are robust so far.",
        charts=tuple(chart for attack in attacks for chart in attacked.charts(attack)),
        tables=tuple(table for attack in attacks for table in attacked.tables(attack)),
    )


def certificate_chapters(results: Results, *, num_examples: int) -> Iterator[Chapter]:
    """The chapters of all certificate families, in the order of the registry."""
    groups: dict[str, list[CertifyResult]] = {family_of(kind).chapter: [] for kind in FAMILIES}
    for result in results.certificates:
        groups[result.family.chapter].append(result)
    for reference, found in groups.items():
        if found:
            yield load_reference(reference)(results, found, num_examples=num_examples)


def class_chapter(results: Results) -> Chapter | None:
    """Accuracy by class and confusions."""
    return classes.chapter(results.attacks, results.dataset.classes)


def example_chapter(results: Results, *, num_examples: int) -> Chapter | None:
    """Items that attacks broke, with their perturbations."""
    shown = tuple(
        gallery
        for attack in results.attacks
        for gallery in galleries.attack_galleries(
            attack, classes=results.dataset.classes, num_examples=num_examples
        )
    )
    return Chapter("examples", "Broken items", galleries=shown) if shown else None


def training_chapter(trained: Sequence[TrainResult]) -> Chapter | None:
    """One figure per model."""
    charts = tuple(_training_chart(train) for train in trained if train.rows)
    if not charts:
        return None
    intro = (
        "Validation items only; all other numbers are from test items. "
        "Robust validation accuracy is measured with a short attack during training."
    )
    return Chapter("training", "Training", intro, charts=charts)


def tuning_chapter(tuned: TuneResult | None) -> Chapter | None:
    """All trials, the best one highlighted, and scores by value."""
    return tuning.chapter(tuned) if tuned and tuned.trials else None


def threat_chapter(results: Results) -> Chapter | None:
    """The threat model of each attack and certificate."""
    facts = [
        Fact(a.name, f"{long_threat(a.threat)} {attacked.settings(a)}.") for a in results.attacks
    ]
    facts += [
        Fact(
            c.name,
            f"{c.family.threat_words(c.document.threat)} "
            f"Claim: {settings_text(c.document.claim)}; "
            f"votes: {settings_text(c.document.evidence.settings)}.",
        )
        for c in results.certificates
    ]
    intro = (
        "All budgets are in pixels in [0, 1] at the native size of the items, before normalisation."
    )
    return Chapter("threats", "Threat models", intro, facts=tuple(facts)) if facts else None


def identity(results: Results) -> tuple[Fact, ...]:
    """Image size, classes, splits and architectures."""
    data = results.dataset
    splits = ", ".join(f"{count:,} {name}" for name, count in data.splits.items())
    channels = "1 channel" if data.channels == 1 else f"{data.channels} channels"
    facts = [
        Fact("Items", f"{data.height} {TIMES} {data.width} px, {channels}"),
        Fact("Classes", f"{len(data.classes)}"),
        Fact("Splits", splits),
    ]
    if results.trained:
        architectures = dict.fromkeys(
            str(t.spec.get("architecture", "unknown")) for t in results.trained
        )
        facts.append(Fact("Architecture", ", ".join(architectures)))
    if counts := {t.model: t.num_weights for t in results.trained if t.num_weights}:
        same = len(set(counts.values())) == 1
        words = [f"{count:,}" if same else f"{m} {count:,}" for m, count in counts.items()]
        facts.append(Fact("Parameters", ", ".join(dict.fromkeys(words))))
    return tuple(facts)


def _clean(results: Results) -> dict[str, Accuracy]:
    """Clean accuracy of each model, from the attack with the most items."""
    clean: dict[str, Accuracy] = {}
    for attack in results.attacks:
        for model, share in attack.clean.items():
            if model not in clean or share.num_items > clean[model].num_items:
                clean[model] = share
    return clean


def _unique(column: Column, taken: Mapping[Column, object], name: str) -> Column:
    """The column, with the name of its step if its heading is taken."""
    return (
        column
        if column not in taken
        else Column(column.title, column.kind, f"{column.detail}, {name}")
    )


def _training_chart(train: TrainResult) -> Chart:
    keys = [key for key in HISTORY if any(row.get(key) is not None for row in train.rows)]
    rows = tuple(tuple(_cell(row.get(key)) for key in keys) for row in train.rows)
    name, summary = f"train.{train.model}", _last_epoch(train.rows[-1])
    return Chart(
        name,
        f"{train.model}: {len(train.rows)} epochs",
        figures.training_curves(train.rows, name=name, alt=f"Training of {train.model}. {summary}"),
        tuple(sign for key, sign in ACCURACY_SIGNS.items() if key in keys),
        (summary,),
        Table(name, tuple(Column(key, "number") for key in keys), rows),
    )


def _last_epoch(row: Mapping[str, Any]) -> str:
    parts = [f"loss {row['loss']:.3g}"] if row.get("loss") is not None else []
    parts += [
        f"{sign.label} {measured_percent(row[key])}%"
        for key, sign in ACCURACY_SIGNS.items()
        if row.get(key) is not None
    ]
    return f"Last epoch: {', '.join(parts)}."


def _cell(value: object) -> Cell:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
