"""Pictures of single items: adversarial changes."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from components.report.content import Gallery, Picture, Strip
from components.report.pictures import amplification, perturbation, png_uri
from components.report.results import AttackResult, Examples
from components.report.wording import TIMES, short_threat


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
                outcome(before, label),
            ),
            Picture(
                png_uri(change), f"perturbation, largest change {largest:.3f}", f"{TIMES} {factor}"
            ),
            Picture(
                png_uri(adversarial),
                f"{name} after the attack",
                f"predicted {classes[after]}",
                outcome(after, label),
            ),
        ),
    )


def outcome(prediction: int, label: int) -> Literal["right", "wrong"]:
    """The mark of a prediction below its picture."""
    return "right" if prediction == label else "wrong"


def _first(examples: Examples, count: int) -> Examples:
    return Examples(
        examples.clean[:count],
        examples.adversarial[:count],
        examples.label[:count],
        examples.clean_prediction[:count],
        examples.adversarial_prediction[:count],
    )
