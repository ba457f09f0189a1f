"""The points of a search: the values of each trial, before anything runs. Needs no Ray."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import count, product
from typing import Any

import numpy as np

from components.core.errors import CasemateError
from components.core.problems import RecipeError
from components.core.seeding import stream_key
from components.core.settings import Problem
from pipelines.recipe.load import with_values
from pipelines.recipe.schema.recipe import MAIN, Recipe
from pipelines.recipe.schema.tune import (
    Axis,
    ChangeSection,
    IntegersAxis,
    LogUniformAxis,
    PbtScheduler,
    TuneSection,
    UniformAxis,
)

Values = dict[str, Any]
MAX_CHECKED = 200  # points that are all checked; of more, each value of each axis once
MAX_SHOWN = 20  # problems of trials in one error


def trial_recipe(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe of one trial: its values, at the tuning's epochs and under the tuning's attack."""
    section = tuned(recipe)
    measured = {
        "train.val_attack": section.attack.kind,
        "train.val_steps": section.attack.num_steps,
        "train.val_items": section.attack.num_items,
    }
    epochs = {"train.epochs": section.epochs} if section.epochs else {}
    # Values are set one level after the other: a section first, then keys inside it.
    ordered = dict(sorted(values.items(), key=lambda item: item[0].count(".")))
    return with_values(recipe, {**epochs, **measured, **ordered})


def tuned(recipe: Recipe) -> TuneSection:
    """The tune section of a recipe that has one."""
    assert recipe.tune is not None
    return recipe.tune


def fixed_points(recipe: Recipe) -> list[Values] | None:
    """The points that are known in advance, in order; None: the search proposes them."""
    section = tuned(recipe)
    if section.changes:
        return chain(section.changes)
    if section.search.kind == "grid":
        return grid(section.space)
    if section.search.kind == "random":
        return draws(section.space, num_trials=section.search.num_trials, seed=recipe.seed)
    return None


def grid(space: Mapping[str, Axis]) -> list[Values]:
    """Every combination of the listed values, in the order they are written."""
    return [dict(zip(space, values, strict=True)) for values in product(*space.values())]


def chain(changes: list[ChangeSection]) -> list[Values]:
    """The values of each step: its own changes on top of those of all steps before it.

    A step that sets a whole section discards what earlier steps set inside it.
    """
    points: list[Values] = []
    for change in changes:
        before = points[-1] if points else {}
        whole = tuple(f"{key}." for key in change.set)
        kept = {key: value for key, value in before.items() if not key.startswith(whole)}
        points.append({**kept, **change.set})
    return points


def draws(space: Mapping[str, Axis], *, num_trials: int, seed: int) -> list[Values]:
    """Different random points; the n-th draw depends on seed and key alone, not on other keys."""
    size = math.prod(num_values(axis) for axis in space.values())
    if num_trials > size:
        remedy = f"is more than the space has; it has {size} points"
        raise CasemateError("tune.search.num_trials", num_trials, remedy)
    points: dict[str, Values] = {}
    numbers = count()
    while len(points) < num_trials:
        index = next(numbers)
        point = {key: draw(axis, generator(seed, key, index)) for key, axis in space.items()}
        points.setdefault(repr(point), point)
    return list(points.values())


def generator(seed: int, key: str, index: int) -> np.random.Generator:
    """Random numbers of one key of one draw."""
    return np.random.Generator(np.random.Philox(key=stream_key(seed, "tune", key, index)))


def draw(axis: Axis, rng: np.random.Generator) -> Any:
    """One value of an axis."""
    match axis:
        case list():
            return axis[int(rng.integers(len(axis)))]
        case LogUniformAxis():
            return float(np.exp(rng.uniform(np.log(axis.low), np.log(axis.high))))
        case UniformAxis(step=None):
            return float(rng.uniform(axis.low, axis.high))
    return on_step(axis, axis.low + (axis.step or 1) * int(rng.integers(num_steps(axis) + 1)))


def num_values(axis: Axis) -> float:
    """Number of values of an axis; infinite for a range without steps."""
    if isinstance(axis, list):
        return len(axis)
    return math.inf if getattr(axis, "step", None) is None else num_steps(axis) + 1


def num_steps(axis: Axis) -> int:
    """How many steps fit between the ends."""
    assert isinstance(axis, UniformAxis | IntegersAxis)
    return math.floor((axis.high - axis.low) / (axis.step or 1) + 1e-9)  # 0.3 / 0.1 is 2.99...


def on_step(axis: Axis, value: float) -> float:
    """The nearest value of an axis with steps; other axes return the value itself."""
    step = getattr(axis, "step", None)
    if step is None or isinstance(axis, list):
        return value
    place = min(max(round((value - axis.low) / step), 0), num_steps(axis))
    found = round(axis.low + step * place, 12)
    return int(found) if isinstance(axis, IntegersAxis) else found


def mutated(
    section: TuneSection,
    values: Mapping[str, Any],
    *,
    resample_prob: float,
    rng: np.random.Generator,
) -> Values:
    """Values for a copied trial: a fresh draw, else a perturbation (Jaderberg et al. 2017, sec. 4).

    A number of a range is multiplied by 0.8 or 1.2 and clipped to the range; one of a list becomes
    its neighbour in the list.
    """
    changed = dict(values)
    for key in section.mutable:
        axis, up = section.space[key], bool(rng.integers(2))
        if rng.random() < resample_prob:
            changed[key] = draw(axis, rng)
        elif isinstance(axis, list):
            place = axis.index(values[key]) + (1 if up else -1)
            changed[key] = axis[min(max(place, 0), len(axis) - 1)]
        else:
            moved = min(max(values[key] * (1.2 if up else 0.8), axis.low), axis.high)
            changed[key] = on_step(axis, moved)
    return changed


def probes(recipe: Recipe) -> Iterator[Values]:
    """Points to check: all if they are few, else every value of every axis."""
    points = fixed_points(recipe)
    if points is not None and (len(points) <= MAX_CHECKED or not tuned(recipe).space):
        yield from points
        return
    ends = {
        key: axis if isinstance(axis, list) else [axis.low, axis.high]
        for key, axis in tuned(recipe).space.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    yield first
    for key, values in ends.items():
        for value in values[1:]:
            yield {**first, key: value}


def variants(recipe: Recipe) -> Iterator[Recipe]:
    """The recipes of the trials to check."""
    return (trial_recipe(recipe, values) for values in probes(recipe))


class _TrialProblems:
    """Problems of trials, each at its key of the tune section."""

    def __init__(self, section: TuneSection) -> None:
        self.section, self.num_trials = section, 0
        self.by_key: dict[str, Problem] = {}
        self.others: dict[str, tuple[Problem, list[Values]]] = {}  # caused by several values

    def add(self, values: Values, problem: Problem) -> None:
        key = problem.field
        given = [own for own in values if f"{key}.".startswith(f"{own}.")]
        if not given:
            self.others.setdefault(str(problem), (problem, []))[1].append(values)
            return
        own, place = max(given, key=len), "tune.space"
        for number, change in enumerate(self.section.changes):
            if own in change.set and change.set[own] == values[own]:
                place = f"tune.changes.{number}.set"
        self.by_key[f"{place}.{problem}"] = problem._replace(field=f"{place}.{key}")

    def all(self) -> list[Problem]:
        """Each problem once; problems shared by all trials are problems of the recipe itself."""
        place = "tune.changes" if self.section.changes else "tune.space"
        found = list(self.by_key.values())
        for problem, trials in self.others.values():
            if len(trials) < self.num_trials:
                problem = Problem(place, trials[0], f"cannot be trained: {problem}")
            found.append(problem)
        return found


def check(recipe: Recipe, *, gate: Callable[[Recipe], None]) -> int:
    """The epochs of the longest trial; refuses trials that cannot be trained or compared.

    `gate` refuses single recipes. Wrong values are named by their place in the tune section.
    """
    found = _TrialProblems(tuned(recipe))
    budgets: set[float | None] = set()
    longest = 0
    for values in probes(recipe):
        found.num_trials += 1
        try:
            variant = trial_recipe(recipe, values)
            _check_objective(variant)
            gate(_trained_alone(variant))
            assert variant.train is not None
            budgets.add(variant.train.validation_eps(variant.objective_of(MAIN)))
            longest = max(longest, variant.epochs_of(MAIN))
        except RecipeError as error:
            for problem in error.problems:
                found.add(values, problem)
        except CasemateError as error:
            key = error.key.removeprefix("--set ")
            found.add(values, Problem(key, error.value, error.remedy))
        if len(found.by_key) >= MAX_SHOWN:
            break
    if problems := found.all() or list(_metric_problems(tuned(recipe), budgets)):
        raise RecipeError(recipe.source, problems[:MAX_SHOWN])
    return longest


def _trained_alone(variant: Recipe) -> Recipe:
    """A trial without attacks and certificates, which belong to the recipe's own models."""
    return variant.model_copy(update={"attack": {}, "certify": {}})


def _metric_problems(section: TuneSection, budgets: set[float | None]) -> Iterator[Problem]:
    """Trials whose measured accuracies cannot be compared."""
    if section.metric != "val_robust_accuracy":
        return
    if None in budgets:
        remedy = "needs an adversarial objective or train.val_eps"
        yield Problem("tune.metric", section.metric, remedy)
    elif len(budgets) > 1:
        shown = ", ".join(f"{eps:g}" for eps in sorted(eps for eps in budgets if eps))
        remedy = f"would compare attacks of eps {shown}; set train.val_eps"
        yield Problem("tune.metric", section.metric, remedy)


def _check_objective(variant: Recipe) -> None:
    """Refuse trials that do not train a classifier, or need a denoiser trained first."""
    if MAIN in variant.denoisers():
        remedy = "makes no classifier, and trials are compared by accuracy; tune another model"
        raise CasemateError("train.objective.kind", "denoiser", remedy)
    if behind := variant.denoiser_of(MAIN):
        remedy = "is trained by this recipe, and tuning trains no denoiser: train it first, then "
        remedy += f"name its folder, model:STORAGE/{variant.name}/train.{behind}-.../model"
        raise CasemateError("train.objective.denoiser", behind, remedy)


def longest_epochs(recipe: Recipe) -> int:
    """The epochs of the longest trial."""
    return max(trial.epochs_of(MAIN) for trial in variants(recipe))


def longest_warmup(recipe: Recipe) -> int:
    """The largest epsilon warm-up of a trial, in epochs."""
    return max(map(_warmup, variants(recipe)))


def _warmup(trial: Recipe) -> int:
    return trial.objective_of(MAIN).attack_warmup_epochs


def tune_warnings(recipe: Recipe) -> list[tuple[str, str]]:
    """(key, message) of settings of a valid tune section that are probably not intended."""
    if recipe.tune is None or recipe.train is None:
        return []
    trials = list(variants(recipe))
    epochs = longest_epochs(recipe)
    warmup = max(_warmup(trial) for trial in trials)
    found = []
    if warmup >= recipe.tune.grace_epochs and recipe.tune.grace_epochs < epochs:
        message = (
            f"{recipe.tune.grace_epochs:g} is not above the longest epsilon warm-up, {warmup}: "
            "trials may be stopped while they train on weaker attacks"
        )
        found.append(("tune.scheduler.grace_epochs", message))
    if isinstance(recipe.tune.scheduler, PbtScheduler):
        first = max(recipe.tune.scheduler.interval, warmup)
        if first >= epochs:
            message = f"the first change comes after {first} epochs, and trials have {epochs}"
            found.append(("tune.scheduler.interval", message))
    return [*found, *_plain_warnings(tuned(recipe), trials)]


def _plain_warnings(section: TuneSection, trials: list[Recipe]) -> Iterator[tuple[str, str]]:
    """Warn of trials without adversarial training: untrained models look most robust."""
    plain = {trial.objective_of(MAIN).attack_eps is None for trial in trials}
    if section.metric != "val_robust_accuracy" or plain == {False}:
        return
    if plain == {True}:
        message = "of trials trained without attacks prefers those that learn least; val_accuracy"
        yield "tune.metric", f"{section.metric} {message} compares what they learn"
    elif section.scheduler.kind != "none":
        message = "stops trials that are trained without attacks"
        yield "tune.scheduler.kind", f"{section.scheduler.kind} {message}"
