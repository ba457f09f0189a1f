"""The page on denoised smoothing and its picture, made from the counts of `denoised.jsonl` alone."""

import math
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from components.certify.l2.radius import max_certifiable_radius
from components.core.statistics import clopper_pearson_interval
from notebooks.replications import page
from notebooks.replications.denoised_findings import (
    REGIMES,
    SAMPLED,
    SAMPLED_AT,
    SAMPLERS,
    SIGMAS,
    STEP,
    experiments_of,
    percent,
    single,
    values,
)
from notebooks.replications.experiments import share
from notebooks.replications.runs import Line, Lines
from notebooks.replications.statistics import Estimate

TUNING_EPOCHS = 10
TITLE = {"loc": "left", "fontsize": 9, "fontweight": "bold"}
CLASSIFIERS = {
    "plain, denoiser": "plain-050",
    "tuned on denoised images, denoiser": "tuned-050",
    "trained on noise, no denoiser": "noisy-050",
    "plain, no denoiser": "bare-050",
}

INTRODUCTION = """# Published findings on denoised smoothing, in miniature

Made by `python -m notebooks.replications.denoised` from [denoised.jsonl](denoised.jsonl), the counts of {seeds} runs of
the recipe `dds-mnist5k-mini`; do not edit. Paper: Carlini et al. 2023, (Certified!!) adversarial robustness for free!

Data: `mnist5k` at 16x16 pixels, 2500 training items. The classifier is a ViT with 4 tokens, the denoisers are UNets of
0.16 million weights with a cosine schedule of 1000 steps; all start from random weights and see the digits 20 times. The
paper has 32x32 and 224x224 photographs, denoisers of 50 and 552 million weights, 100,000 or 10,000 draws. Sigma and radii
are on the scale of pixels from 0 to 1, but a radius means something different for 256 grey pixels than for 3072 coloured
ones: do not compare figures with published ones, only signs of differences.

Certificates are those of Cohen et al. 2019 with failure probability {alpha:g} per item: {draws} draws for each of {items}
test items, and {few_draws} draws for each of {few_items} where samplers are compared, because they cost up to 64 passes
each. These numbers of draws certify radii up to {most:.2f} sigma and {few_most:.2f} sigma. *Single draws* is the share of
these draws that are classified correctly; where denoisers are compared, it is one draw of each of {single_items} test
items, as in the paper's Table 4, counted by the code of this page. That code also adds to the runs what the recipe does
not contain: for each sigma a classifier that starts from the finished one and is tuned on denoised images for {tuning}
more epochs, one that is trained as much longer without noise, and certificates of the plain classifier without a
denoiser.

A figure is the mean over {seeds} seeds with its 95 % t-interval ({freedom} degrees of freedom, not clipped to 0 and 100);
a difference is taken seed by seed, on the same items under the same noise. Such an interval is about other seeds, not
about other test items: those of single certificates are at the end. Networks and lengths of training were chosen on
validation items. The arms were made in two rounds: after the first, with three denoisers and classifiers for sigma 0.5
alone, its figures had been seen when the comparisons of the second were written down. Those that concern arms of the
second round alone or in part had not been seen before: sigma 0.25 and 1 in chapters 2 and 3, the control of chapter 3, 64
steps in chapter 4, and eleven of the thirteen comparisons of chapter 6. *Reproduced*, *the opposite* and *not decided*
are defined in [training.md](training.md). Of the {contrasts} comparisons made here, one in twenty would look decided even
if nothing differed.

## In short
"""


def item_table(lines: Lines) -> pd.DataFrame:
    """Every certificate at half its sigma, with exact intervals over test items."""
    rows = []
    for name in sorted({x["certificate"] for x in lines.lines if "certificate" in x}):
        found = lines.find(certificate=name)
        radius = found[0]["sigma"] / 2
        row: dict[str, object] = {
            "certificate": name,
            "radius": f"{radius:g}",
            "items": found[0]["num_items"],
            "draws": found[0]["num_estimate"],
        }
        for line in found:
            count = line["certified"][round(radius / STEP)]
            low, high = (100 * x for x in clopper_pearson_interval(count, line["num_items"]))
            row[f"seed {line['seed']}, %"] = f"{percent(line, radius):.1f} [{low:.1f}, {high:.1f}]"
        rows.append(row)
    return pd.DataFrame(rows)


def draw(found: Sequence[Line]) -> Figure:
    """Certified accuracy against the radius by sigma and by classifier; samplers; denoisers."""
    lines, figure = Lines(found), Figure(figsize=(9, 6.5), layout="constrained")
    (by_sigma, by_classifier), (samplers, regimes) = figure.subplots(2, 2)
    _draw_curves(by_sigma, lines, {f"sigma {s:g}": f"plain-{e}" for e, s in SIGMAS.items()})
    by_sigma.set_title("plain classifier, denoiser", **TITLE)
    _draw_curves(by_classifier, lines, CLASSIFIERS)
    by_classifier.set_title("classifiers at sigma 0.5", **TITLE)
    _draw_bars(
        samplers,
        {
            f"sigma {SIGMAS[end]:g}": [values(lines, f"{name}-{end}", None) for name in SAMPLED]
            for end in SAMPLED_AT
        },
        labels=[SAMPLERS[name] for name in SAMPLED],
    )
    samplers.set_title("samplers, plain classifier", **TITLE)
    _draw_bars(
        regimes,
        {f"tested at {s:g}": [single(lines, name, s) for name in REGIMES] for s in SIGMAS.values()},
        labels=[*REGIMES.values()],
    )
    regimes.set_title("noise in the training of the denoiser", **TITLE)
    return figure


def _draw_curves(axes: mpl.axes.Axes, lines: Lines, names: Mapping[str, str]) -> None:
    """The mean over seeds, and a thin line for each seed; 0 beyond the largest certifiable radius."""
    for number, (label, name) in enumerate(names.items()):
        counts = [(line["certified"], line["num_items"]) for line in lines.find(certificate=name)]
        curves = np.array([[share((count, items)) for count in (*c, 0)] for c, items in counts])
        radii = STEP * np.arange(curves.shape[1])
        for curve in curves:
            axes.plot(radii, curve, color=f"C{number}", linewidth=0.6, alpha=0.5)
        axes.plot(radii, curves.mean(axis=0), color=f"C{number}", linewidth=1.8, label=label)
    axes.set(xlabel="l2 radius, pixels from 0 to 1", ylabel="certified, %", ylim=(0, 100))
    axes.grid(linewidth=0.4)
    axes.legend(frameon=False, fontsize=8)


def _draw_bars(
    axes: mpl.axes.Axes, groups: Mapping[str, Sequence[Sequence[float]]], *, labels: Sequence[str]
) -> None:
    """Means with t-intervals over seeds: one row per label, one colour per group."""
    for number, (group, rows) in enumerate(groups.items()):
        found = [Estimate(tuple(row)) for row in rows]
        places = [place + 0.15 * (number - (len(groups) - 1) / 2) for place in range(len(found))]
        half = [(e.interval[1] - e.interval[0]) / 2 for e in found]
        axes.errorbar([e.mean for e in found], places, xerr=half, fmt="o", capsize=2, label=group)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("right single draws, %; bars: t-intervals", fontsize=8)
    axes.grid(linewidth=0.4)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": len(groups)}
    axes.legend(frameon=False, fontsize=8, **place)


def render(found: Sequence[Line]) -> str:
    """The whole page."""
    lines = Lines(found)
    experiments = experiments_of(lines)
    many, few = (lines.find(certificate=name)[0] for name in ("plain-050", "one-shot-050"))
    introduction = INTRODUCTION.format(
        seeds=len(lines.seeds),
        freedom=len(lines.seeds) - 1,
        alpha=many["failure_prob"],
        draws=many["num_estimate"],
        items=many["num_items"],
        few_draws=few["num_estimate"],
        few_items=few["num_items"],
        most=_max_radius(many),
        few_most=_max_radius(few),
        single_items=lines.find(denoiser="full", sigma=0.5)[0]["num_items"],
        tuning=TUNING_EPOCHS,
        contrasts=sum(len(experiment.contrasts) for experiment in experiments),
    )
    parts = [
        introduction,
        *page.findings(experiments, picture="![Certified accuracy and samplers](denoised.svg)"),
        "## All certificates\n",
        "Certified at half of sigma, of each seed, with exact 95 % intervals over test items:\n",
        page.markdown(item_table(lines)),
    ]
    return "\n".join(parts)


def _max_radius(line: Line) -> float:
    """The largest radius of unanimous draws in units of sigma, rounded down to two digits."""
    n, alpha = line["num_estimate"], line["failure_prob"]
    most = max_certifiable_radius(sigma=1.0, n=n, alpha=alpha, method="fixed")
    return math.floor(100 * most) / 100
