"""Figures of finished results that `gate` compares: shares of items, by name.

    clean                     accuracy without an attack, by the attack or the evaluation of a model
    robust.NORM@EPS           accuracy under all attacks of a list; robust.spatial has no EPS
    certified.l2@R            certified accuracy at a claimed radius
    certified.patch@M         certified accuracy at a claimed patch side; certified.patch.loc@M by
                              the second rule
    smoothed.l2, .patch       accuracy of the smoothed classifier without an attack
    SUITE[.ITEM].METRIC       accuracy of a whole evaluation suite, e.g. corruptions.mean95

Several figures of one name are told apart by what comes before it: STEP, MODEL, FLOW or the name of
the step's folder, as in `main/clean` or `attack.linf/main/clean`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from components.core.settings import Fractional
from components.core.shares import shown
from pipelines.api.found_results import FoundResult, results_at

if TYPE_CHECKING:
    from components.evaluate.metrics import MetricRow

GRAYS = 255  # budgets are shown in 1/255 where that is shorter


@dataclass(frozen=True)
class Figure:
    """A share of items in a finished result."""

    base: str  # e.g. certified.l2
    budget: float | None
    value: Fraction
    low: float | None  # lower end of its 95 % interval
    num_items: int | None
    result: FoundResult
    model: str = ""
    doubt: str = ""  # why it does not count

    @property
    def name(self) -> str:
        return self.base if self.budget is None else f"{self.base}@{budget_text(self.budget)}"

    @property
    def parts(self) -> tuple[str, ...]:
        """What tells it apart from others of its name."""
        return tuple(
            filter(None, (self.result.flow, self.result.step, self.result.name, self.model))
        )

    def words(self, value: Fraction | None = None) -> str:
        """The share as text; decimals are cut off, never rounded up."""
        share = self.value if value is None else value
        text = f"{int(share * 10**6) / 10**6:g}"
        count = share * self.num_items if self.num_items else Fraction(1, 2)
        if value is None and count.denominator == 1:
            return f"{text} ({count} of {self.num_items} items)"
        return text


def budget_text(budget: float) -> str:
    """A budget as a recipe writes it: 0.5, 2, 8/255."""
    if budget == int(budget):
        return str(int(budget))
    grays, decimals = round(budget * GRAYS), repr(budget)
    fraction = f"{grays}/{GRAYS}"
    return fraction if grays / GRAYS == budget and len(fraction) < len(decimals) else decimals


def figures_at(path: str | Path) -> list[Figure]:
    """All figures of the finished results at a path or URI; an error if there are none.

    A result that cannot be read has none; `unreadable_at` says why.
    """
    found: list[Figure] = []
    for result in results_at(path):
        with suppress(CasemateError):
            found += figures_of(result)
    if not found:
        for _, error in unreadable_at(path):
            raise error
        remedy = "holds no finished attack, evaluation or certificate"
        raise CasemateError("path", path, remedy)
    return found


def unreadable_at(path: str | Path) -> list[tuple[FoundResult, CasemateError]]:
    """Results at a path or URI without figures because they are damaged, and how."""
    found = []
    for result in results_at(path):
        try:
            figures_of(result)
        except CasemateError as error:
            found.append((result, error))
    return found


def may_also_name(name: str, figure: Figure, result: FoundResult) -> bool:
    """Whether a name of a figure could stand for one of a result that cannot be read, too."""
    text = name.rpartition("@")[0] if "@" in name else name
    words = text.removesuffix(figure.base).split("/")
    own = {"", result.flow, result.step, result.name, figure.model}
    return result.stage == figure.result.stage and set(words) <= own


def figures_of(result: FoundResult) -> list[Figure]:
    """The figures of one result; none of other stages."""
    read = READERS.get(result.stage)
    try:
        return list(read(result)) if read else []
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        remedy = f"cannot be read as a result ({type(error).__name__}: {error})"
        raise CasemateError("path", result.place, remedy) from error


def read_json(result: FoundResult, name: str) -> Any:
    """A JSON file of a result."""
    try:
        return json.loads((result.files / name).read_text())
    except ValueError as error:
        why = f"is truncated or damaged: {error}"
        raise CasemateError("file", f"{result.place}/{name}", why) from error


def _certified(result: FoundResult) -> Iterator[Figure]:
    from components.certify.certificate import CertificateDocument
    from components.certify.registry import family_of

    document = CertificateDocument.from_dict(read_json(result, "certificate.json"))
    family, summary = family_of(document.kind), document.summary
    doubt = "" if document.sound else "its certificate is not sound"
    threat = family.threat_name
    yield _share(result, f"smoothed.{threat}", None, shown(summary["standard_accuracy"]))
    for entry in summary["certified"]:
        for rule, share in family.shares(entry).items():
            base = f"certified.{threat}.{rule}" if rule else f"certified.{threat}"
            yield _share(result, base, float(family.budget(entry)), shown(share), doubt=doubt)


def _attacked(result: FoundResult) -> Iterator[Figure]:
    summary = read_json(result, "summary.json")
    threat = summary["threat"]
    for model, own in summary["models"].items():
        yield _share(result, "clean", None, shown(own["clean_accuracy"]), model=model)
        sanity, doubt = own.get("sanity"), ""
        if sanity and sanity["verdict"] != "reliable":
            doubt = f"the attack is {sanity['verdict']}: {'; '.join(sanity['reasons'])}"
        base, share = f"robust.{threat['kind']}", shown(own["robust_accuracy"])
        yield _share(result, base, threat["eps"], share, model=model, doubt=doubt)


def _evaluated(result: FoundResult) -> Iterator[Figure]:
    from components.evaluate.across_runs import Benchmark, benchmarks_of
    from components.evaluate.metrics import ALL, METRICS_NAME, read_metrics

    rows = read_metrics(result.files / METRICS_NAME)
    whole = set(benchmarks_of(rows))
    for row in rows:
        if row.value is None or Benchmark(row.suite, row.item, row.metric, row.level) not in whole:
            continue
        parts = [row.suite, row.metric] if row.item == ALL else [row.suite, row.item, row.metric]
        base = "clean" if row.suite == "clean" else ".".join(parts)
        yield row_figure(result, base, row)


def row_figure(result: FoundResult, base: str, row: "MetricRow") -> Figure:
    """A row of metrics.parquet as a figure."""
    share = {"value": row.value, "low": row.lo95, "num_items": row.n}
    return _share(result, base, row.level, share, model=row.model)


READERS: dict[str, Callable[[FoundResult], Iterator[Figure]]] = {
    "attack": _attacked,
    "certify": _certified,
    "evaluate": _evaluated,
}


def _share(
    result: FoundResult,
    base: str,
    budget: float | None,
    share: Mapping[str, Any],
    *,
    model: str = "",
    doubt: str = "",
) -> Figure:
    value, count = float(share["value"]), share["num_items"]
    exact = _exact(value, count)
    return Figure(base, budget, exact, share["low"], count, result, model, doubt)


def _exact(value: float, num_items: int | None) -> Fraction:
    """The share that a float stands for: of whole items, or as it prints in full."""
    if num_items:
        share = Fraction(round(value * num_items), num_items)
        if float(share) == value:
            return share
    return Fraction(repr(value))


# -- names


def matching(name: str, figures: Sequence[Figure]) -> list[Figure]:
    """Figures that a name stands for; budgets are compared as numbers, 8/255 = 16/510."""
    text, at, budget = name.rpartition("@") if "@" in name else (name, "", "")
    wanted = _budget(name, budget) if at else None
    found = [figure for figure in figures if figure.budget == wanted and _is_named(figure, text)]
    same = {(f.result.flow, f.model, f.value, f.num_items) for f in found}
    if len(same) == 1 and text.rpartition("/")[2] == "clean" and found[0].model:
        return found[:1]  # one model, measured in several steps with the same outcome
    return found


def _budget(name: str, text: str) -> float:
    try:
        return Fractional.read(text)
    except ValueError as error:
        raise CasemateError("--min", name, f"has a budget that {error}") from error


def _is_named(figure: Figure, text: str) -> bool:
    if text == figure.base:
        return True
    before = text.removesuffix(f"/{figure.base}")
    return before != text and set(before.split("/")) <= set(figure.parts)


def exact_names(figures: Sequence[Figure]) -> list[str]:
    """The shortest name of each figure that stands for it alone."""
    return [_exact_name(figure, figures) for figure in figures]


def _exact_name(figure: Figure, figures: Sequence[Figure]) -> str:
    result, model = figure.result, figure.model
    steps = (result.step, f"{result.flow}/{result.step}", result.name)
    own = [place for step in steps for place in (step, f"{step}/{model}")]
    places = ["", own[0], model, *own[1:], f"{result.flow}/{result.name}"]
    names = [f"{place}/{figure.name}".replace("//", "/").lstrip("/") for place in places]
    full = "/".join([*figure.parts, figure.name])
    rivals = [f for f in figures if f.base == figure.base and f.budget == figure.budget]
    return next((name for name in names if matching(name, rivals) == [figure]), full)
