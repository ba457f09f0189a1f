"""Pictures of single items: adversarial changes."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from components.report.content import Gallery, Picture, Strip
from components.report.pictures import amplification, perturbation, png_uri
from components.report.records import AttackedModel, AttackResult, Examples
from components.report.wording import TIMES, pixels, short_threat


def attack_galleries(
    attack: AttackResult, *, classes: Sequence[str], num_examples: int
) -> tuple[Gallery, ...]:
    """One gallery per attacked model with broken items: others have no perturbation to show."""
    galleries = []
    for model, attacked in attack.models.items():
        shown = _broken(attacked, num_examples)
        if not len(shown.label):
            continue
        factor = amplification(shown.clean, shown.adversarial)
        strips = tuple(
            _attack_strip(shown, i, classes=classes, factor=factor) for i in range(len(shown.label))
        )
        caption = (
            f"Items that {attack.title} broke, {short_threat(attack.threat)}. The middle picture "
            f"is the difference, {factor} times as strong: grey is unchanged, lighter pixels were "
            "raised, darker ones lowered."
        )
        galleries.append(Gallery(f"{model}: broken items", caption, strips))
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
                png_uri(change),
                f"perturbation, largest change {_levels(largest)}",
                f"{TIMES} {factor}, at most {_levels(largest)}",
            ),
            Picture(
                png_uri(adversarial),
                f"{name} after the attack",
                f"predicted {classes[after]}",
                outcome(after, label),
            ),
        ),
    )


def _levels(change: float) -> str:
    """A measured change; float32 moves a multiple of 1/255 a little."""
    nearest = round(255 * change) / 255
    return pixels(nearest) if abs(change - nearest) < 1e-5 else f"{change:.3f}"


def outcome(prediction: int, label: int) -> Literal["right", "wrong"]:
    """The mark of a prediction below its picture."""
    return "right" if prediction == label else "wrong"


def _broken(attacked: AttackedModel, count: int) -> Examples:
    """The first items that were right before the attacks and wrong after them."""
    kept = attacked.broken or attacked.examples
    fell = (kept.clean_prediction == kept.label) & (kept.adversarial_prediction != kept.label)
    rows = np.flatnonzero(fell)[:count]
    return Examples(
        kept.clean[rows],
        kept.adversarial[rows],
        kept.label[rows],
        kept.clean_prediction[rows],
        kept.adversarial_prediction[rows],
    )
