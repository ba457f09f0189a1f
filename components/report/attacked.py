"""Attack results in the report: accuracy by attack, by budget and steps, and sanity checks."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from components.attacks.sanity.findings import NOT_CHECKED
from components.core.shares import measured_percent
from components.report import attack_figures, figures
from components.report.content import (
    Accuracy,
    AttackVerdict,
    Cell,
    Chart,
    Column,
    LegendEntry,
    Table,
)
from components.report.records import AttackedModel, AttackResult
from components.report.wording import long_threat, pixels, settings_text, short_threat

LINES: tuple[tuple[str, Literal["line", "dash"]], ...] = (
    ("attacked", "line"),
    ("ink", "dash"),
    ("measured", "line"),
    ("proven", "dash"),
)  # one per model

RESULTS = FAILS, UNCHECKED, HOLDS = "FAILS", "not checked", "holds"  # of checks, in their order


def never_rises(model: AttackedModel) -> bool:
    """Whether accuracy never rises along the list and ends at the robust accuracy."""
    along = [model.clean, *(step.left for step in model.steps)]
    values = [share.value for share in along]
    return values == sorted(values, reverse=True) and values[-1] == model.robust.value


def verdicts(attack: AttackResult) -> tuple[AttackVerdict, ...]:
    """One verdict per model whose attacks were checked."""
    return tuple(
        AttackVerdict(
            f"{attack.name}, {name}",
            model.sanity["verdict"],
            tuple(model.sanity["reasons"]),
            *_num_checks(model.sanity["findings"]),
        )
        for name, model in attack.models.items()
        if model.sanity
    )


def _num_checks(findings: Collection[Mapping[str, Any]]) -> tuple[int, int]:
    """(checks that were run, checks that could not be)."""
    missing = sum(map(_is_unchecked, findings))
    return len(findings) - missing, missing


def _is_unchecked(check: Mapping[str, Any]) -> bool:
    return str(check["text"]).startswith(NOT_CHECKED)


def charts(attack: AttackResult) -> Iterator[Chart]:
    """Bars of all models, curves over eps and steps, attention gaps per model."""
    yield _bars(attack)
    for key in ("eps", "steps"):
        if any(key in model.curves for model in attack.models.values()):
            yield _curve(attack, key)
    for number, (name, model) in enumerate(attack.models.items(), start=1):
        if model.sanity and model.sanity.get("attention_gaps"):
            yield _gaps(f"{attack.name}.gaps-{number}", name, model.sanity["attention_gaps"])


def tables(attack: AttackResult) -> Iterator[Table]:
    """Results by attack, findings of the sanity checks, networks with scaled attention."""
    yield _steps_table(attack)
    if any(model.sanity for model in attack.models.values()):
        yield _findings_table(attack)
    if any(model.protocols for model in attack.models.values()):
        yield _protocol_table(attack)


def settings(attack: AttackResult) -> str:
    """The settings that neither the threat nor the charts show."""
    shown = {"models", "eps", "norm", "attacks", "curves", "sanity"}
    listed = [_entry(entry) for entry in attack.settings["attacks"]]
    rest = {key: value for key, value in attack.settings.items() if key not in shown}
    return f"Attacks: {'; '.join(listed)}. Further settings: {settings_text(rest)}"


def _entry(entry: Mapping[str, Any]) -> str:
    values = {k: v for k, v in entry.items() if k != "kind" and v is not None}
    return f"{entry['kind']} ({settings_text(values)})" if values else str(entry["kind"])


def _budget(attack: AttackResult, eps: float) -> str:
    return pixels(eps) if attack.threat["kind"] == "linf" else f"{eps:g}"


def _bars(attack: AttackResult) -> Chart:
    models = list(attack.models)
    clean, robust = list(attack.clean.values()), list(attack.robust.values())
    label = f"{attack.title}, {short_threat(attack.threat)}"
    figures_text = "; ".join(
        f"{m} clean {attack.clean[m].percent('measured')}, "
        f"attacked {attack.robust[m].percent('attacked')}"
        for m in models
    )
    rows: list[tuple[Cell, ...]] = list(zip(models, clean, robust, strict=True))
    return Chart(
        attack.name,
        f"Clean and attacked accuracy ({label})",
        figures.attack_bars(
            models,
            clean=clean,
            attacked=robust,
            name=attack.name,
            alt=f"Accuracy of each model: {figures_text}.",
        ),
        (
            LegendEntry("clean", "measured", "bar"),
            LegendEntry(f"after {label}", "attacked", "bar"),
            LegendEntry("95% interval", "ink", "line"),
        ),
        (
            f"{long_threat(attack.threat)} {max(a.num_items for a in clean):,} items per model.",
            *_zero_gradients(attack),
        ),
        Table(
            attack.name,
            (Column("Model"), Column("clean", "measured"), Column("attacked", "attacked")),
            tuple(rows),
        ),
    )


def _curve(attack: AttackResult, key: str) -> Chart:
    """Accuracy under PGD by budget or by steps; it must not rise."""
    shown = {name: _points(m, key) for name, m in attack.models.items() if key in m.curves}
    title = "a growing budget" if key == "eps" else "more steps"

    def words(x: float) -> str:
        return _budget(attack, x) if key == "eps" else f"{int(x)}"

    figures_text = "; ".join(
        f"{name}: " + ", ".join(f"{words(x)} {share.percent('attacked')}" for x, share in points)
        for name, points in shown.items()
    )
    signs = [LINES[i % len(LINES)] for i in range(len(shown))]
    xs = sorted({x for points in shown.values() for x, _ in points})
    by_model = {name: dict(points) for name, points in shown.items()}
    rows: list[tuple[Cell, ...]] = [
        (words(x) if key == "eps" else int(x), *(by_model[m].get(x) for m in by_model)) for x in xs
    ]
    name = f"{attack.name}.{key}"
    num_items = next(iter(shown.values()))[0][1].num_items
    fixed = (
        "PGD-20 with steps of a quarter of the budget"
        if key == "eps"
        else f"PGD, {short_threat(attack.threat)}"
    )
    return Chart(
        name,
        f"Accuracy under {title}",
        attack_figures.accuracy_curves(
            shown,
            colours=[colour for colour, _ in signs],
            dashed=[sign == "dash" for _, sign in signs],
            label="budget eps, pixels in [0, 1]" if key == "eps" else "number of steps",
            in_levels=key == "eps" and attack.threat["kind"] == "linf",
            x_words=lambda x: f"eps {words(x)}" if key == "eps" else f"{words(x)} steps",
            logarithmic=key == "steps",
            marked=attack.threat["eps"] if key == "eps" else None,
            name=name,
            alt=f"Accuracy by {key}. {figures_text}.",
        ),
        (
            *(LegendEntry(m, *sign) for m, sign in zip(shown, signs, strict=True)),
            *([LegendEntry("the budget of the attack list", "muted", "dash")] * (key == "eps")),
        ),
        (
            f"{fixed}, on the first {num_items:,} test items, misclassified ones included"
            f"{'; eps 0 is their clean accuracy' if 0 in xs else ''}. Bands are 95% intervals. "
            "Rising accuracy shows that the attack fails.",
        ),
        Table(
            name,
            (Column(key, "number"), *(Column(m, "attacked") for m in shown)),
            tuple(rows),
        ),
    )


def _points(model: AttackedModel, key: str) -> tuple[tuple[float, Accuracy], ...]:
    """The points of a curve; that over eps starts with clean accuracy, on the same items."""
    points = model.curves[key]
    if key != "eps" or model.items is None or not points or points[0][0] <= 0:
        return points
    return ((0.0, model.items.clean_share(points[0][1].num_items)), *points)


def _gaps(name: str, model: str, gaps: Mapping[str, Any]) -> Chart:
    """Gap between the largest and second largest attention logit, by block."""
    blocks = gaps["blocks"]
    widest = max(blocks, key=lambda block: blocks[block]["q99"])
    limits = gaps["limits"]
    keys = ("q50", "q90", "q99", "max", "cancelled", "underflowed")
    rows: list[tuple[Cell, ...]] = [
        (block, *(found[key] for key in keys)) for block, found in blocks.items()
    ]
    figures_text = f"99% of the gaps of {widest} are below {blocks[widest]['q99']:.3g}."
    return Chart(
        name,
        f"{model}: lead of the largest attention logit",
        attack_figures.gap_histogram(
            gaps["edges"],
            counts=[found["counts"] for found in blocks.values()],
            highlighted=list(blocks).index(widest),
            limits=(limits["cancels"], limits["underflows"]),
            name=name,
            alt=f"Histogram of attention gaps of {model}, one line per block. {figures_text}",
        ),
        (
            LegendEntry(f"{widest}, the widest block", "attacked", "line"),
            LegendEntry("other blocks", "muted", "line"),
            LegendEntry("float32 softmax loses its gradient", "ink", "dash"),
        ),
        (
            f"{figures_text} Beyond {limits['cancels']:g} the gradient of the winning logit is "
            f"rounded to zero, beyond {limits['underflows']:g} all gradients are: gradient attacks "
            "fail there.",
        ),
        Table(name, (Column("block"), *(Column(key, "number") for key in keys)), tuple(rows)),
    )


def _steps_table(attack: AttackResult) -> Table:
    columns = (
        *(Column("Model"), Column("Attack"), Column("given", "number"), Column("broken", "number")),
        Column("left", "attacked", "by it and all before"),
        Column("evaluations", "number"),
        Column("gradients", "number"),
        Column("zero gradients", "number", "%"),
    )
    rows: list[tuple[Cell, ...]] = []
    for name, model in attack.models.items():
        rows.append((name, "none", None, None, model.clean, None, None, None))
        for step in model.steps:
            own = step.name if step.name == step.entry else f"{step.entry}: {step.name}"
            share = round(100 * step.zero_gradient_rate, 2)
            costs = (step.num_evaluations, step.num_gradients, share)
            rows.append((name, own, step.num_items, step.num_broken, step.left, *costs))
    title = f"{attack.name}: the list, attack by attack"
    return Table(f"{attack.name}.list", columns, tuple(rows), title=title)


def _findings_table(attack: AttackResult) -> Table:
    """All checks: folded if none fails; failed ones come first, then those that were not run."""
    columns = (
        *(Column("Model"), Column("Check"), Column("Result")),
        *(Column("found", "number"), Column("limit", "number"), Column("Finding", "note")),
    )
    found = [
        (name, f)
        for name, model in attack.models.items()
        for f in (model.sanity or {"findings": []})["findings"]
    ]
    found.sort(key=lambda pair: RESULTS.index(_result(pair[1])))
    rows: list[tuple[Cell, ...]] = [
        (
            *(name, f["name"], _result(f)),
            *([None, None] if _is_unchecked(f) else [f["value"], f["limit"]]),
            _finding(f),
        )
        for name, f in found
    ]
    results = [_result(f) for _, f in found]
    failed, missing, passed = map(results.count, RESULTS)
    label = f"{passed} of {failed + passed} checks pass"
    label += f", {missing} not checked" * (missing > 0)
    title, folded = f"{attack.name}: do these attacks work?", not failed
    if not folded:
        title = f"{title} {label}"
    name = f"{attack.name}.sanity"
    return Table(name, columns, tuple(rows), title=title, folded=folded, fold_label=label)


def _result(check: Mapping[str, Any]) -> str:
    if _is_unchecked(check):
        return UNCHECKED
    return HOLDS if check["ok"] else FAILS


def _finding(check: Mapping[str, Any]) -> str:
    """What was found; the advice that may follow it only where the check fails."""
    text = str(check["text"])
    if not check["ok"] or _is_unchecked(check):
        return text
    return re.split(r"[:;] ", text, maxsplit=1)[0]


def _protocol_table(attack: AttackResult) -> Table:
    """Accuracy of networks with scaled attention: other classifiers, so not robust accuracy."""
    columns = (
        *(Column("Model"), Column("Attack"), Column("attention")),
        Column("this model", "attacked", "candidate alone"),
        Column("scaled network", "measured", "paper protocol, same points"),
        Column("scaled network", "measured", "paper protocol, clean"),
    )
    rows: list[tuple[Cell, ...]] = []
    for model, found in attack.models.items():
        for name, protocol in found.protocols.items():
            for candidate in protocol["candidates"]:
                shares = [
                    Accuracy.stored(candidate[key], where=f"{attack.name} {name}")
                    for key in ("original_accuracy", "scaled_accuracy", "scaled_clean_accuracy")
                ]
                rows.append((model, name, _scales(candidate["scales"]), *shares))
            again = Accuracy.stored(protocol["restarts_accuracy"], where=f"{attack.name} {name}")
            rows.append((model, name, "unscaled, as many restarts", again, None, None))
    title = f"{attack.name}: networks with scaled attention, which are other classifiers"
    return Table(f"{attack.name}.paper_protocol", columns, tuple(rows), title=title)


def _scales(scales: list[float] | None) -> str:
    if scales is None:
        return "unscaled"
    if len(set(scales)) == 1:
        return f"times {scales[0]:.3g}"
    return f"times {min(scales):.2g} to {max(scales):.2g}"


def _zero_gradients(attack: AttackResult) -> Iterator[str]:
    """A warning for each model whose gradients vanish: its robust accuracy may be overstated."""
    for name, model in attack.models.items():
        if model.zero_gradient_rate > 0:
            share = measured_percent(model.zero_gradient_rate)
            yield (
                f"{share}% of the gradients of {name} were exactly zero: its robust accuracy may "
                "be overstated."
            )
