"""Chapter of the patch certificates: accuracy by patch side, sweeps, inputs of single votes."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from components.core.types import Array
from components.report.certified import (
    attack_legend,
    budget_points,
    challenge_sentences,
    challenged_point,
    describe_votes,
    primary_budget,
    proof_paragraphs,
    proven_column,
    share,
    standard_sentence,
    wrong_sentence,
)
from components.report.content import (
    Accuracy,
    Cell,
    Chapter,
    Chart,
    Column,
    Gallery,
    LegendEntry,
    Picture,
    Strip,
    Table,
)
from components.report.galleries import outcome
from components.report.patch_figures import patch_curve
from components.report.patch_sweeps import patch_sizes, sweep_charts, sweep_table
from components.report.pictures import HIDDEN_TINT, png_uri, spread_starts
from components.report.records import CertifyResult
from components.report.results import read_item_votes
from components.report.run_results import Results
from components.report.sweeps import own_charts
from components.report.wording import side

MAX_ABLATED_ITEMS = 4  # one wide strip each; more would hide the chart above
NUM_ABLATIONS = 5  # with the whole image this makes six pictures: two rows of three on a phone


def chapter(results: Results, found: Sequence[CertifyResult], *, num_examples: int) -> Chapter:
    """Patch certificates with pictures of what their votes see."""
    area, swept = results.dataset.height * results.dataset.width, results.sweeps()
    alone = own_charts(found, swept)
    own = [patch_chart(c, model=results.model_of(c), image_area=area) for c in alone]
    of_sweeps = [
        chart for sweep in swept for chart in sweep_charts(sweep, results.model_of, image_area=area)
    ]
    images = results.first_images(min(num_examples, MAX_ABLATED_ITEMS))
    pictures = [vote_gallery(c, images=images, classes=results.dataset.classes) for c in alone]
    return Chapter(
        "patches",
        "Proven against patches",
        " ".join(proof_paragraphs(found)),
        charts=(*own, *of_sweeps),
        galleries=tuple(gallery for gallery in pictures if gallery),
        tables=tuple(sweep_table(sweep, results.model_of, image_area=area) for sweep in swept),
    )


def patch_chart(result: CertifyResult, *, model: str, image_area: int) -> Chart:
    """Certified accuracy by patch side."""
    sizes = patch_sizes(result)
    certified, standard = [share(result.certified_at(m)) for m in sizes], share(result.correct)
    steps = budget_points((f"{side(m)} " for m in sizes), certified)
    svg = patch_curve(
        sizes,
        certified=certified,
        standard=standard,
        attacked=challenged_point(result),
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
            *attack_legend(result),
        ),
        (
            *_unsound_note(result),
            f"Votes: {describe_votes(result)}.",
            standard_sentence(result, standard),
            *wrong_sentence(result, primary_budget(result), side(int(primary_budget(result)))),
            *_vote_sentences(result),
            *challenge_sentences(result, side(int(primary_budget(result)))),
        ),
        _patch_table(result, certified, image_area=image_area),
    )


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


def vote_gallery(
    result: CertifyResult,
    *,
    images: Mapping[str, Tensor],
    classes: Sequence[str],
) -> Gallery | None:
    """Inputs of single votes; `images` are (C, H, W) in [0, 1] by item, None: not certified."""
    rows = {item: i for i, item in enumerate(result.columns["item_id"])}
    images = {item: image for item, image in images.items() if item in rows}
    if not images:
        return None
    visible, votes = _visible(result), read_item_votes(result, list(images))
    strips, num_votes = [], len(next(iter(votes.values())))
    for item, image in images.items():
        label = int(result.columns["label"][rows[item]])
        seen = [Picture(png_uri(image.numpy()), f"item {item}", "whole item")]
        evaluated = tuple(k for k, vote in enumerate(votes[item]) if vote < len(classes))
        for index in (evaluated[i] for i in spread_starts(evaluated, count=NUM_ABLATIONS)):
            vote = votes[item][index]
            uri = png_uri(_shown(image, visible[index]))
            alt = f"item {item}, vote {index}: {classes[vote]}"
            seen.append(Picture(uri, alt, f"vote {classes[vote]}", outcome(vote, label)))
        title, status = _claim(result, rows[item], classes=classes)
        strips.append(Strip(title, tuple(seen), status))
    caption = (
        f"Votes: {describe_votes(result)}. The blue-grey part is hidden (black in the "
        f"model's input). A few of the {num_votes} votes on each item are shown."
    )
    return Gallery("Inputs of single votes", caption, tuple(strips))


def _visible(result: CertifyResult) -> Tensor:
    """(K, H, W) bool: the visible pixels of each vote, in the order of votes."""
    visible = result.family.visible(result.document.evidence)
    assert visible is not None, f"votes of {result.name} see whole images"
    return visible


def _shown(image: Tensor, visible: Tensor) -> Array:
    """A (C, H, W) image with a flat tint on hidden pixels, which are black for the model."""
    colour = image if image.shape[0] == 3 else image.expand(3, -1, -1)
    tint = (torch.tensor(HIDDEN_TINT, dtype=torch.float32) / 255).view(3, 1, 1)
    return np.asarray(torch.where(visible, colour, tint).numpy())


def _claim(
    result: CertifyResult, row: int, *, classes: Sequence[str]
) -> tuple[str, Literal["", "right", "wrong"]]:
    """The claim of an item, and whether its certificate is about the right label."""
    columns = result.columns
    label, winner = classes[columns["label"][row]], classes[columns["prediction"][row]]
    sizes = columns["certified_patch_sizes"][row]
    wrong = columns["label"][row] != columns["prediction"][row]
    status: Literal["", "right", "wrong"] = ("wrong" if wrong else "right") if sizes else ""
    proven = f"proven up to {side(max(sizes))}" if sizes else "not proven at any size"
    if status == "wrong":
        proven += ", but a wrong label"
    for count in ("top_votes", "num_agreeing"):  # votes that stopped early have no final count
        if count in columns:
            return f"label {label}: {columns[count][row]} votes for {winner}, {proven}", status
    return f"label {label}: voted {winner}, {proven}", status
