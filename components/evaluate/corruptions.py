"""Scores on common corruptions: means, corruption errors and their relative form.

Hendrycks & Dietterich 2019, sec. 4.3, normalise errors by those of AlexNet. With E[c, s] the error
under corruption c at severity s and A[c] AlexNet's mean over severities:

- corruption error CE[c] = mean_s E[c, s] / A[c], mCE its mean over the 15 of the benchmark;
- relative CE[c] = (mean_s E[c, s] - E_clean) / (A[c] - A_clean), relative mCE its mean over the 15.

Both are percentages: AlexNet has 100. `mean75` and `mean95` are accuracies over 15 x 5 and 19 x 5
variants; Bhojanapalli et al. 2021, "Understanding Robustness of Transformers for Image
Classification", report the latter (appendix C). A score that lacks a part is None with its reason,
never a mean over fewer variants.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from components.data.corruptions.settings import CORRUPTIONS
from components.data.sources.names import BENCHMARK_CORRUPTIONS, SEVERITIES

Variant = tuple[str, int]  # (corruption, severity)

ALEXNET_CLEAN = 0.43478  # top-1 error of torchvision's AlexNet
ALEXNET: Mapping[str, float] = {  # mean error over the five severities
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
    "speckle_noise": 0.845388,
    "gaussian_blur": 0.787108,
    "spatter": 0.717512,
    "saturate": 0.658248,
}
LISTED = 5  # missing variants that a reason names
MISSING_CLASSES = "missing_classes"  # flag of a published dataset without all of its classes


@dataclass(frozen=True, slots=True)
class Score:
    """A number, or None with the reason."""

    value: float | None
    reason: str = ""


def groups() -> dict[str, tuple[str, ...]]:
    """Group -> its corruptions: noise, blur, weather, digital, extra."""
    found: dict[str, tuple[str, ...]] = {}
    for name in CORRUPTIONS:
        group = CORRUPTIONS[name].settings.group  # type: ignore[attr-defined]
        found[group] = (*found.get(group, ()), name)
    return found


def not_comparable(flags: Collection[str], *, imagenet: bool) -> str | None:
    """Why errors may not be divided by AlexNet's; None if they may.

    `flags` are those of `components.data.corruptions.settings.flags_of` and `MISSING_CLASSES`.
    """
    if not imagenet:
        return "AlexNet's errors are those of the 1000 classes of ImageNet"
    if "procedural_frost" in flags:
        return "frost has procedural textures, not the published photographs"
    if "nonstandard_resolution" in flags:
        return "images were not corrupted at 224 pixels"
    if MISSING_CLASSES in flags:
        return "the dataset lacks classes of ImageNet"
    return None


def corruption_scores(
    accuracy: Mapping[Variant, float],
    *,
    clean: float | None,
    incomparable: str | None,
    incomplete: Mapping[Variant, str] | None = None,
) -> dict[str, Score]:
    """Scores of one model by name: `mean75`, `mean95`, `mean_<group>`, `ce_<corruption>`, `mce`,
    `relative_mce`, `mean_error75`.

    `accuracy` and `clean` are shares of correct items. `incomparable` is the reason to leave out
    what is divided by AlexNet's errors (`not_comparable`); `incomplete` says of variants that are
    left out of `accuracy` why they are.
    """
    _check(accuracy, clean)
    measured = Measured(accuracy, incomplete or {})
    scores = {
        "mean75": measured.mean(BENCHMARK_CORRUPTIONS),
        "mean95": measured.mean(CORRUPTIONS),
    }
    scores |= {f"mean_{group}": measured.mean(names) for group, names in groups().items()}
    mean = scores["mean75"]
    scores["mean_error75"] = Score(None if mean.value is None else 1 - mean.value, mean.reason)
    for name in CORRUPTIONS:
        scores[f"ce_{name}"] = _corruption_error(measured, name, incomparable)
    scores["mce"] = _mean_of([scores[f"ce_{name}"] for name in BENCHMARK_CORRUPTIONS])
    scores["relative_mce"] = _relative_mce(measured, clean, incomparable)
    return scores


def variants_of_score(name: str) -> list[Variant] | None:
    """The variants whose mean accuracy a score is; None for other scores."""
    by_group = {f"mean_{group}": names for group, names in groups().items()}
    means = {"mean75": BENCHMARK_CORRUPTIONS, "mean95": tuple(CORRUPTIONS), **by_group}
    if name not in means:
        return None
    return [(corruption, level) for corruption in means[name] for level in SEVERITIES]


@dataclass(frozen=True, slots=True)
class Measured:
    """Accuracy of variants, and why others cannot be used."""

    accuracy: Mapping[Variant, float]
    incomplete: Mapping[Variant, str]

    def mean(self, names: Iterable[str]) -> Score:
        """Mean over all severities of these corruptions."""
        wanted = [(name, level) for name in names for level in SEVERITIES]
        if missing := [variant for variant in wanted if variant not in self.accuracy]:
            return Score(None, self._lacks(missing))
        return Score(math.fsum(self.accuracy[variant] for variant in wanted) / len(wanted))

    def _lacks(self, missing: list[Variant]) -> str:
        named = [f"{name}/{level}{self._why((name, level))}" for name, level in missing[:LISTED]]
        more = [f"{len(missing) - LISTED} more"] if len(missing) > LISTED else []
        return f"lacks {', '.join(named + more)}"

    def _why(self, variant: Variant) -> str:
        return f" ({self.incomplete[variant]})" if variant in self.incomplete else ""


def _corruption_error(measured: Measured, name: str, incomparable: str | None) -> Score:
    mean = measured.mean([name])
    if incomparable or mean.value is None:
        return Score(None, incomparable or mean.reason)
    return Score(100 * (1 - mean.value) / ALEXNET[name])


def _relative_mce(measured: Measured, clean: float | None, incomparable: str | None) -> Score:
    if incomparable or clean is None:
        return Score(None, incomparable or "lacks the clean accuracy on the same images")
    parts = []
    for name in BENCHMARK_CORRUPTIONS:
        mean = measured.mean([name])
        if mean.value is None:
            parts.append(mean)
        else:
            parts.append(Score(100 * (clean - mean.value) / (ALEXNET[name] - ALEXNET_CLEAN)))
    return _mean_of(parts)


def _mean_of(parts: list[Score]) -> Score:
    """The mean, or the first reason for a missing part."""
    values = [part.value for part in parts if part.value is not None]
    if len(values) < len(parts):
        return Score(None, next(part.reason for part in parts if part.value is None))
    return Score(math.fsum(values) / len(values))


def _check(accuracy: Mapping[Variant, float], clean: float | None) -> None:
    for (name, level), value in accuracy.items():
        if name not in CORRUPTIONS or level not in SEVERITIES:
            raise ValueError(f"accuracy: {name}/{level} is not a variant")
        if not 0 <= value <= 1:
            raise ValueError(f"accuracy: {name}/{level} has {value}, outside [0, 1]")
    if clean is not None and not 0 <= clean <= 1:
        raise ValueError(f"clean: {clean} is outside [0, 1]")
