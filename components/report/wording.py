"""Threat models and sizes in words, with units."""

from collections.abc import Mapping, Sequence
from typing import Any

from components.core.errors import CasemateError

TIMES = "\N{MULTIPLICATION SIGN}"


def pixels(value: float) -> str:
    """A pixel quantity in [0, 1]; as k/255 if it is a multiple of 1/255."""
    levels = value * 255
    if value and abs(levels - round(levels)) < 1e-6:
        return f"{round(levels)}/255"
    return f"{value:g}"


def side(patch: int) -> str:
    """A square patch by its side."""
    return f"{patch} {TIMES} {patch} px"


def patch_with_area(patch: int, image_area: int) -> str:
    """A square patch by its side and its share of the image, as in the papers."""
    return f"{side(patch)}, {100 * patch * patch / image_area:.2g}%"


def short_threat(threat: Mapping[str, Any]) -> str:
    """The threat model of an attack in a few words, for a column heading."""
    budgets = {"linf": "l∞, eps {}", "l2": "l2, eps {}"}
    words = budgets.get(threat["kind"], str(threat["kind"])).format(_eps(threat))
    return f"{words}, {threat['precision']}" if "precision" in threat else words


def long_threat(threat: Mapping[str, Any]) -> str:
    """The threat model of an attack as a sentence; certificate families word their own."""
    sentences = {
        "linf": "Every pixel of every channel may move by at most {}.",
        "l2": "The whole image may move by an l2 distance of at most {}.",
        "spatial": "The image may be rotated and shifted within the limits of the settings.",
    }
    if threat["kind"] not in sentences:
        raise CasemateError("threat.kind", threat["kind"], f"is not one of {', '.join(sentences)}")
    words = sentences[threat["kind"]].format(_eps(threat))
    reduced = " Models are attacked in {}: accuracies are those of the models in this precision."
    return words + reduced.format(threat["precision"]) if "precision" in threat else words


def _eps(threat: Mapping[str, Any]) -> str:
    """The budget: one of pixels, or a distance."""
    if threat.get("eps") is None:
        return ""
    return pixels(threat["eps"]) if threat["kind"] == "linf" else f"{threat['eps']:g}"


ATTACK_NAMES = {"autoattack-standard": "AutoAttack", "autoattack-plus": "AutoAttack+"}
ATTACK_NAMES |= {"autoattack-rand": "AutoAttack (rand)", "square": "Square", "spatial": "Spatial"}
ACRONYMS = ("fgsm", "pgd", "mim", "gama", "apgd", "fab", "aas")
MOST_NAMES = 3  # of a list of attacks in a heading


def attack_name(entry: str) -> str:
    """An entry of an attack list as papers write it: AutoAttack, PGD-20, APGD-CE."""
    if entry in ATTACK_NAMES:
        return ATTACK_NAMES[entry]
    if entry.split("-")[0] not in ACRONYMS:
        return entry
    shown = entry.upper()
    return shown.removesuffix("-CE") if shown.startswith("PGD") else shown


def attack_list_words(entries: Sequence[str]) -> str:
    """The names of a list's entries, ensembles first; of a long list the first and a number."""
    names = list(dict.fromkeys(map(attack_name, entries)))
    names.sort(key=lambda name: not name.startswith("AutoAttack"))
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    return f"{names[0]} and {len(names) - 1} more attacks"


def settings_text(settings: Mapping[str, Any]) -> str:
    """`key = value` pairs in one line."""
    return ", ".join(f"{key} = {_value(key, value)}" for key, value in sorted(settings.items()))


def _value(key: str, value: object) -> str:
    if isinstance(value, float):
        return pixels(value) if key in ("eps", "step_size") else f"{value:.6g}"
    if isinstance(value, Mapping):
        return "{" + settings_text(value) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(key, v) for v in value) + "]"
    return str(value)
