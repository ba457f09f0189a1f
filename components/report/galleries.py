"""Pictures of single items: adversarial changes, and the visible part of ablations."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from components.core.types import Array
from components.report.certified import describe_votes
from components.report.content import Gallery, Picture, Strip
from components.report.pictures import (
    HIDDEN_TINT,
    amplification,
    perturbation,
    png_uri,
    spread_starts,
)
from components.report.results import AttackResult, CertifyResult, Examples
from components.report.wording import TIMES, short_threat, side

NUM_ABLATIONS = 5  # with the whole image this makes six pictures: two rows of three on a phone


def attack_galleries(
    attack: AttackResult, *, classes: Sequence[str], num_examples: int
) -> tuple[Gallery, ...]:
    """One gallery per attacked model that has examples."""
    galleries = []
    for model, attacked in attack.models.items():
        shown = _first(attacked.examples, num_examples)
        if not len(shown.label):
            continue
        factor = amplification(shown.clean, shown.adversarial)
        strips = tuple(
            _attack_strip(shown, i, classes=classes, factor=factor) for i in range(len(shown.label))
        )
        caption = (
            f"After {attack.title}, {short_threat(attack.threat)}. The middle picture is the "
            f"difference, {factor} times as strong: grey is unchanged, lighter pixels were raised, "
            "darker ones lowered."
        )
        galleries.append(Gallery(f"{model}: attacked items", caption, strips))
    return tuple(galleries)


def ablation_gallery(
    result: CertifyResult,
    *,
    images: dict[str, Tensor],
    votes: dict[str, list[int]],
    classes: Sequence[str],
) -> Gallery:
    """Inputs of single votes of a patch certificate; `images` are (C, H, W) in [0, 1] by item."""
    visible = _visible(result)
    rows = {item: i for i, item in enumerate(result.columns["item_id"])}
    strips, num_votes = [], len(next(iter(votes.values())))
    for item, image in images.items():
        label = int(result.columns["label"][rows[item]])
        seen = [Picture(png_uri(image.numpy()), f"item {item}", "whole item")]
        evaluated = tuple(k for k, vote in enumerate(votes[item]) if vote < len(classes))
        for index in (evaluated[i] for i in spread_starts(evaluated, count=NUM_ABLATIONS)):
            vote = votes[item][index]
            uri = png_uri(_shown(image, visible[index]))
            alt = f"item {item}, vote {index}: {classes[vote]}"
            seen.append(Picture(uri, alt, f"vote {classes[vote]}", _outcome(vote, label)))
        strips.append(Strip(_claim(result, rows[item], classes=classes), tuple(seen)))
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


def _claim(result: CertifyResult, row: int, *, classes: Sequence[str]) -> str:
    columns = result.columns
    label, winner = classes[columns["label"][row]], classes[columns["prediction"][row]]
    sizes = columns["certified_patch_sizes"][row]
    proven = f"proven up to {side(max(sizes))}" if sizes else "not proven at any size"
    for count in ("top_votes", "num_agreeing"):  # votes that stopped early have no final count
        if count in columns:
            return f"label {label}: {columns[count][row]} votes for {winner}, {proven}"
    return f"label {label}: voted {winner}, {proven}"


def _attack_strip(examples: Examples, i: int, *, classes: Sequence[str], factor: int) -> Strip:
    clean, adversarial = examples.clean[i], examples.adversarial[i]
    label, before, after = (
        int(values[i])
        for values in (examples.label, examples.clean_prediction, examples.adversarial_prediction)
    )
    change = perturbation(clean, adversarial, factor=factor)
    largest = float(np.abs(adversarial.astype(np.float64) - clean).max())
    name = classes[label]
    return Strip(
        f"label {name}",
        (
            Picture(
                png_uri(clean),
                f"clean {name}",
                f"predicted {classes[before]}",
                _outcome(before, label),
            ),
            Picture(
                png_uri(change), f"perturbation, largest change {largest:.3f}", f"{TIMES} {factor}"
            ),
            Picture(
                png_uri(adversarial),
                f"{name} after the attack",
                f"predicted {classes[after]}",
                _outcome(after, label),
            ),
        ),
    )


def _outcome(prediction: int, label: int) -> Literal["right", "wrong"]:
    return "right" if prediction == label else "wrong"


def _first(examples: Examples, count: int) -> Examples:
    return Examples(
        examples.clean[:count],
        examples.adversarial[:count],
        examples.label[:count],
        examples.clean_prediction[:count],
        examples.adversarial_prediction[:count],
    )
