"""Models compared item by item: paired tests of every figure that two of them share.

A difference of accuracies has a conservative 95 % interval and the exact p-value of McNemar's test;
a mean over variants of items has Student's t. P-values are adjusted for their number (Holm 1979):
whole figures together, and the variants of each suite together. What is not significant is a tie.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from components.core.statistics import (
    accuracy,
    discordant,
    holm,
    mcnemar_p_value,
    mean_interval,
    paired_difference,
    paired_mean_difference,
)
from components.evaluate.verdicts import Kind, Verdicts, reasons_against

SIGNIFICANT = 0.05  # family-wise
TIE = "tie"
CLEAN = "clean"  # measured by several steps of a flow, on nested subsets of the test items
MCNEMAR, STUDENT = "McNemar", "paired t"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A figure of one model with its 95% interval."""

    figure: str
    kind: Kind
    model: str
    value: float
    low: float
    high: float
    num_items: int
    place: str
    doubt: str
    is_part: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of two models on the same items; the difference is `one` minus `other`."""

    figure: str
    kind: Kind
    one: str
    other: str
    num_items: int
    value: float
    low: float
    high: float
    won: int  # items that only the first is right about; of means: where it has the larger share
    lost: int
    test: str
    p_value: float
    adjusted: float
    num_tests: int  # that the p-value is adjusted for
    note: str  # reasons to doubt a result
    defences: str  # settings of smoothed classifiers that differ
    is_part: bool

    @property
    def is_tie(self) -> bool:
        """Whether the difference is not significant."""
        return self.adjusted >= SIGNIFICANT

    @property
    def outcome(self) -> str:
        """The better model, or a tie."""
        if self.is_tie:
            return TIE
        return self.one if self.value > 0 else self.other


class Refusal(NamedTuple):
    """Figures of two models that cannot be compared, and why."""

    figures: tuple[str, ...]
    one: str
    other: str
    why: str


@dataclass(frozen=True, slots=True)
class Compared:
    """All comparisons, the shares behind them, and what was refused."""

    shares: tuple[Share, ...]
    comparisons: tuple[Comparison, ...]
    refusals: tuple[Refusal, ...]


class _Pair(NamedTuple):
    """Two results that compare, under the name of their row."""

    figure: str
    names: tuple[str, str]
    one: Verdicts
    other: Verdicts


def compare(models: Mapping[str, Sequence[Verdicts]]) -> Compared:
    """Every two models on every figure that both have."""
    own = {name: _without_repeats(found) for name, found in models.items()}
    pairs: list[_Pair] = []
    refusals: list[Refusal] = []
    for names in combinations(own, 2):
        for found in _matched(names, own[names[0]], own[names[1]]):
            if isinstance(found, _Pair):
                pairs.append(found)
            else:
                refusals.append(found)
    rank = {figure: place for place, figure in enumerate(_figures(own))}
    pairs.sort(key=lambda pair: rank[pair.one.figure])
    return Compared(
        tuple(_shares(pairs)), tuple(_adjusted(pairs)), tuple(_grouped(refusals) + _single(own))
    )


def every_pair(results: Mapping[str, Verdicts]) -> list[Comparison]:
    """Every two results, by name, of one figure under the same conditions on the same items."""
    pairs = [
        _Pair(results[one].figure, (one, other), results[one], results[other])
        for one, other in combinations(results, 2)
    ]
    return _adjusted(pairs)


def _without_repeats(found: Sequence[Verdicts]) -> list[Verdicts]:
    kept: list[Verdicts] = []
    for one in found:
        if not any(one.is_same(other) for other in kept):
            kept.append(one)
    return kept


def _figures(own: Mapping[str, Sequence[Verdicts]]) -> list[str]:
    """All figures once: in the order of the first model, further ones behind."""
    return list(dict.fromkeys(v.figure for found in own.values() for v in found))


def _matched(
    names: tuple[str, str], ones: Sequence[Verdicts], others: Sequence[Verdicts]
) -> Iterator[_Pair | Refusal]:
    """The results of two models that compare, and why others do not."""
    bases = [b for b in dict.fromkeys(v.base for v in ones) if any(v.base == b for v in others)]
    for base in bases:
        left, right = ([v for v in found if v.base == base] for found in (ones, others))
        budgets = [list(dict.fromkeys(v.budget for v in side)) for side in (left, right)]
        common = [budget for budget in budgets[0] if budget in budgets[1]]
        if not common:
            texts = [f"{n} {', '.join(b)}" for n, b in zip(names, budgets, strict=True)]
            yield Refusal((base,), *names, f"other budget: {'; '.join(texts)}")
            continue
        for budget in common:
            yield from _at_budget(names, _at(left, budget), _at(right, budget))
        for lonely, lacking in ((left, 1), (right, 0)):
            for figure in (v.figure for v in lonely if v.budget not in budgets[lacking]):
                yield Refusal((figure,), *names, f"{names[lacking]} has no result of this budget")


def _at(found: Sequence[Verdicts], budget: str) -> list[Verdicts]:
    return [one for one in found if one.budget == budget]


def _at_budget(
    names: tuple[str, str], ones: Sequence[Verdicts], others: Sequence[Verdicts]
) -> Iterator[_Pair | Refusal]:
    """Of several results of one figure: those that fit each other, by equal names of steps."""
    every = [(one, other) for one in ones for other in others]
    against = [reasons_against(names, *pair) for pair in every]
    fitting = [pair for pair, reasons in zip(every, against, strict=True) if not reasons]
    figure = ones[0].figure
    if not fitting:
        fewest = min(against, key=len)
        yield Refusal((figure,), *names, "; ".join(fewest))
        return
    if len(fitting) > 1 and ones[0].base == CLEAN:
        fitting = [max(fitting, key=lambda pair: len(pair[0].item_ids))]
    alike = [(one, other) for one, other in fitting if one.step == other.step]
    if len(fitting) == 1:
        yield _Pair(figure, names, *fitting[0])
    elif alike:
        for one, other in alike:
            yield _Pair(f"{figure} ({one.step})", names, one, other)
    else:
        steps = ", ".join(sorted({v.step for pair in fitting for v in pair}))
        yield Refusal((figure,), *names, f"several results fit ({steps}); name one step of each")


def _shares(pairs: Sequence[_Pair]) -> Iterator[Share]:
    seen: set[tuple[str, str, str]] = set()
    for pair in pairs:
        for name, own in zip(pair.names, (pair.one, pair.other), strict=True):
            if (pair.figure, name, own.place) not in seen:
                seen.add((pair.figure, name, own.place))
                yield share_of(pair.figure, name, own)


def share_of(figure: str, name: str, own: Verdicts) -> Share:
    """The share of correct items, or the mean over items where variants of items count."""
    if own.is_binary:
        found = accuracy(own.correct)
        value, low, high = (float(found[key]) for key in ("value", "low", "high"))
    else:
        value = float(own.correct.mean())
        low, high = mean_interval(own.correct)
    return Share(
        figure=figure, kind=own.kind, model=name, value=value, low=low, high=high,
        num_items=len(own.correct), place=own.place, doubt=own.doubt, is_part=own.is_part,
    )  # fmt: skip


def _adjusted(pairs: Sequence[_Pair]) -> list[Comparison]:
    """All tests; a family is all whole figures, or the variants of one suite."""
    found = [_tested(pair) for pair in pairs]
    families: dict[str, list[int]] = {}
    for place, pair in enumerate(pairs):
        family = pair.one.base.partition(".")[0] if pair.one.is_part else ""
        families.setdefault(family, []).append(place)
    for places in families.values():
        values = holm([found[place].p_value for place in places])
        for place, value in zip(places, values, strict=True):
            found[place] = replace(found[place], adjusted=value, num_tests=len(places))
    return found


def _tested(pair: _Pair) -> Comparison:
    one, other = pair.one, pair.other
    if one.is_binary and other.is_binary:
        won, lost = discordant(one.correct, other.correct)
        gap = paired_difference(one.correct, other.correct)
        p_value, test = mcnemar_p_value(one.correct, other.correct), MCNEMAR
    else:
        won, lost = (int(np.sum(s * (one.correct - other.correct) > 0)) for s in (1, -1))
        (gap, p_value), test = paired_mean_difference(one.correct, other.correct), STUDENT
    return Comparison(
        figure=pair.figure, kind=one.kind, one=pair.names[0], other=pair.names[1],
        num_items=len(one.item_ids), won=won, lost=lost, test=test,
        p_value=p_value, adjusted=p_value, num_tests=1,
        note=_doubts(pair), defences=_defences(pair), is_part=one.is_part, **gap,
    )  # fmt: skip


def _doubts(pair: _Pair) -> str:
    both = zip(pair.names, (pair.one, pair.other), strict=True)
    return "; ".join(f"{name}: {own.doubt}" for name, own in both if own.doubt)


def _defences(pair: _Pair) -> str:
    if pair.one.defence == pair.other.defence:
        return ""
    both = zip(pair.names, (pair.one, pair.other), strict=True)
    return "; ".join(f"{name}: {own.defence}" for name, own in both if own.defence)


def _grouped(refusals: Sequence[Refusal]) -> list[Refusal]:
    """Figures that are refused for one reason share a line."""
    figures: dict[tuple[str, str, str], list[str]] = {}
    for found in refusals:
        figures.setdefault((found.one, found.other, found.why), []).extend(found.figures)
    return [Refusal(tuple(dict.fromkeys(own)), *about) for about, own in figures.items()]


def _single(own: Mapping[str, Sequence[Verdicts]]) -> list[Refusal]:
    """What one model alone has, and what is wrong with it, if that is known."""
    owners: dict[str, dict[str, str]] = {}
    for name, found in own.items():
        for one in found:
            names = owners.setdefault(one.base, {})
            if one.refusal:
                names.setdefault(name, f"{name}: {one.refusal}")
            else:
                names[name] = f"only {name} has it"
    alone = {base: next(iter(names.items())) for base, names in owners.items() if len(names) == 1}
    return _grouped([Refusal((base,), name, "", why) for base, (name, why) in alone.items()])
