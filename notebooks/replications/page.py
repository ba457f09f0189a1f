"""The results page and its pictures, made from trials alone: equal trials, equal bytes."""

import io
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from components.core.statistics import clopper_pearson_interval
from notebooks.replications.arms import EPS, Size
from notebooks.replications.experiments import EXPERIMENTS, Contrast, Experiment
from notebooks.replications.statistics import Estimate
from notebooks.replications.trials import Results

STYLE = {"svg.fonttype": "none", "svg.hashsalt": "casemate"}
COLOURS = {"reproduced": "#14568f", "the opposite": "#b8480f"}  # anything else: grey

INTRODUCTION = """# Published findings on training, in miniature

Made by `python -m notebooks.replications` from [training.jsonl](training.jsonl); do not edit. The experiments are defined
in [arms.py](../replications/arms.py) and [experiments.py](../replications/experiments.py).

Data: `{source}` at {side}x{side} pixels, {num_train} training and {num_test} test items. Networks have tens of thousands
of weights and start from random ones. Robust accuracy is that under APGD-CE ({apgd} steps) in the l-inf ball of radius
{eps:g}, counted over all test items. Settings were chosen on validation items. A figure is the mean over {n} seeds with
its 95 % t-interval ({freedom} degrees of freedom, not clipped to 0 and 100); a difference is taken seed by seed.

A comparison is *reproduced* where its whole interval has the published sign, *the opposite* where it has the other one,
and *not decided* where it contains 0: that is not evidence of no effect, and the interval shows how large an effect is
still possible. A reproduced sign is not a reproduced size. Networks this small on digits say little about the published
networks on photographs, in either direction.

## In short
"""


def experiments_of(results: Results) -> list[Experiment]:
    return [make(results) for make in EXPERIMENTS]


def summary(experiments: Sequence[Experiment]) -> pd.DataFrame:
    """One row per comparison."""
    return pd.DataFrame(
        {
            "finding": experiment.key,
            "comparison, in points": contrast.what,
            "published": contrast.published,
            "here": str(contrast.difference),
            "seeds": contrast.difference.range,
            "verdict": contrast.verdict,
        }
        for experiment in experiments
        for contrast in experiment.contrasts
    )


def arm_table(experiment: Experiment) -> pd.DataFrame:
    """One row per arm: mean with interval, and the range over seeds."""
    return pd.DataFrame(
        {
            "arm": arm,
            **{f"{name}, %": f"{value}; {value.range}" for name, value in row.items()},
        }
        for arm, row in experiment.table.items()
    )


def seed_table(results: Results, measure: str) -> pd.DataFrame:
    """One row per trial: the count, and its exact 95 % interval over items."""
    rows = []
    for arm, trials in results.items():
        for trial in trials:
            if measure in trial["counts"]:
                right, number = trial["counts"][measure]
                low, high = (100 * edge for edge in clopper_pearson_interval(right, number))
                interval = f"{100 * right / number:.1f} [{low:.1f}, {high:.1f}]"
                rows.append({"arm": arm, "seed": trial["seed"], "right": right, "%": interval})
    return pd.DataFrame(rows)


def differences_figure(experiments: Sequence[Experiment]) -> Figure:
    """Every comparison as a line: the interval, the mean, and one dot per seed."""
    rows = [len(experiment.contrasts) for experiment in experiments]
    figure = Figure(figsize=(9, 0.5 * sum(rows) + 2.5), layout="constrained")
    panels = figure.subplots(len(rows), 1, height_ratios=rows, squeeze=False)[:, 0]
    for axis, experiment in zip(panels, experiments, strict=True):
        for place, contrast in enumerate(experiment.contrasts):
            _draw(axis, place, contrast)
        labels = [textwrap.fill(contrast.what, 46) for contrast in experiment.contrasts]
        axis.axvline(0, color="black", linewidth=0.8)
        _finish(axis, labels, title=experiment.key)
    panels[-1].set_xlabel("points; bar: 95 % t-interval, tick: mean, dots: seeds", fontsize=8)
    return figure


def _draw(axis: mpl.axes.Axes, place: int, contrast: Contrast) -> None:
    colour = COLOURS.get(contrast.verdict, "#6f7b8a")
    low, high = contrast.difference.interval
    axis.plot([low, high], [place, place], color=colour, linewidth=3, alpha=0.45)
    values = contrast.difference.values
    axis.plot(values, [place] * len(values), "o", color=colour, markersize=3)
    axis.plot(contrast.difference.mean, place, "|", color=colour, markersize=13)


def arms_figure(experiments: Sequence[Experiment]) -> Figure:
    """Every measure of every arm: one dot per seed, a tick at the mean."""
    figure = Figure(figsize=(9, 11), layout="constrained")
    axes = figure.subplots(len(experiments), 1, squeeze=False)[:, 0]
    for axis, experiment in zip(axes, experiments, strict=True):
        _draw_arms(axis, experiment.table)
        _finish(axis, list(experiment.table), title=experiment.key)
    axes[-1].set_xlabel("accuracy, %; tick: mean, dots: seeds", fontsize=8)
    return figure


def _draw_arms(axis: mpl.axes.Axes, table: Mapping[str, Mapping[str, Estimate]]) -> None:
    for place, row in enumerate(table.values()):
        for number, (measure, value) in enumerate(row.items()):
            dots = axis.plot(
                value.values,
                [place] * len(value.values),
                "o",
                markersize=3.5,
                color=f"C{number}",
                label=measure if place == 0 else None,
            )
            axis.plot(value.mean, place, "|", markersize=13, color=dots[0].get_color())
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _finish(axis: mpl.axes.Axes, labels: Sequence[str], *, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.tick_params(labelsize=8)
    axis.grid(axis="x", linewidth=0.4)


def svg(figure: Figure) -> str:
    """The same text for the same figure."""
    text = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def markdown(table: pd.DataFrame) -> str:
    """A table of a Markdown page."""
    rows = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows) + "\n"


def render(results: Results, size: Size) -> str:
    """The whole page."""
    experiments = experiments_of(results)
    num_test = results["fgsm"][0]["counts"]["clean"][1]
    parts = [
        INTRODUCTION.format(
            source=size.data["source"],
            side=size.data["image_size"],
            num_train=size.data["limits"]["train"],
            num_test=num_test,
            apgd=size.apgd_steps,
            eps=EPS,
            n=len(size.seeds),
            freedom=len(size.seeds) - 1,
        ),
    ]
    parts += findings(experiments, picture="![Every comparison with its interval](differences.svg)")
    parts += [
        "## All arms\n",
        "![Every arm, one dot per seed](arms.svg)\n",
        "Robust accuracy (APGD-CE) of every trial, with exact 95 % intervals over test items:\n",
        markdown(seed_table(results, "apgd-ce")),
        _cost(results),
    ]
    return "\n".join(parts)


def findings(experiments: Sequence[Experiment], *, picture: str) -> list[str]:
    """The verdicts in short, every comparison in a table, and a chapter for each finding."""
    parts = [
        "\n".join(f"- {headline(experiment)}" for experiment in experiments) + "\n",
        markdown(summary(experiments)),
        f"{picture}\n",
    ]
    for number, experiment in enumerate(experiments, start=1):
        parts += chapter(number, experiment)
    return parts


def chapter(number: int, experiment: Experiment) -> list[str]:
    """One finding: the published claim, what the intervals show, all figures."""
    return [
        f"## {number}. {experiment.key.capitalize()}\n",
        f"Published: {experiment.claim}\n",
        "\n".join(_sentence(contrast) for contrast in experiment.contrasts) + "\n",
        "Mean with t-interval; smallest to largest of the seeds:\n",
        markdown(arm_table(experiment)),
        f"Not as published: {experiment.remark}\n",
    ]


def headline(experiment: Experiment) -> str:
    """The verdict of the first comparison, which is the claim, and the counts of all verdicts."""
    first = experiment.contrasts[0]
    name = experiment.key.capitalize()
    said = f"{name}: **{first.verdict}**; {first.what}: {first.difference} points."
    counts = Counter(contrast.verdict for contrast in experiment.contrasts)
    if len(counts) == 1:
        return said
    each = ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())
    return f"{said} Of all {len(experiment.contrasts)} comparisons: {each}."


def _sentence(contrast: Contrast) -> str:
    """The verdict on a comparison and its interval, as a sentence."""
    low, high = (f"{edge:+.1f}" for edge in contrast.difference.interval)
    allowed = {
        "reproduced": f"the sign is the published one; between {low} and {high} points",
        "the opposite": f"the sign is the other one; between {low} and {high} points",
        "a difference": f"there is one, between {low} and {high} points",
    }
    undecided = f"anything from {low} to {high} points is possible"
    said = allowed.get(contrast.verdict, undecided)
    return f"- **{contrast.verdict}**: {contrast.what} (published: {contrast.published}): {said}."


def _cost(results: Results) -> str:
    trials = [trial for arm in results.values() for trial in arm]
    minutes = sum(trial["seconds"] for trial in trials) / 60
    return f"{len(trials)} trainings with their measurements, {minutes:.0f} minutes of one core.\n"


def write_page(folder: Path, results: Results, size: Size) -> None:
    """`training.md` with its two pictures."""
    experiments = experiments_of(results)
    (folder / "differences.svg").write_text(svg(differences_figure(experiments)))
    (folder / "arms.svg").write_text(svg(arms_figure(experiments)))
    (folder / "training.md").write_text(render(results, size))
