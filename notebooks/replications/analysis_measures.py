"""What the page on the inside of ViTs is made of: studies, models, and measures of a line.

A measure is a function of a line of `analysis.jsonl`, one per seed, kind of images and model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from notebooks.replications import runs
from notebooks.replications.evaluation_findings import (
    COARSE,
    DIGITS,
    MODELS,
    NARROW,
    PHOTOS,
    RESNET,
    ROBUST_RESNET,
    ROBUST_VIT,
    SIGN,
    VIT,
    Table,
)
from notebooks.replications.experiments import Contrast
from notebooks.replications.runs import Line
from notebooks.replications.statistics import Estimate, paired

VITS = {PHOTOS: (VIT, COARSE, ROBUST_VIT), DIGITS: (COARSE, VIT, ROBUST_VIT)}  # accurate ones first
GENERATORS = (VIT, ROBUST_VIT, RESNET, ROBUST_RESNET)  # of perturbations
JUDGES = (COARSE, NARROW)  # standard models that generate none
NOISE = "noise"
NAMES = {**MODELS, NOISE: "uniform noise, no attack"}
PARTS = {"block": "blocks", "attn": "attention", "mlp": "MLPs"}
SIGNS = {"plus": "+delta", "minus": "-delta"}
STEPS = 20  # of PGD
PATCH = 4  # px, of the ViTs that generate perturbations
BUDGETS = {PHOTOS: "4/255", DIGITS: "0.1"}  # of adversarial training too
LITTLE = "hardly any"
Measure = Callable[[Line], float]


def _studies(eps: str) -> dict[str, tuple[str, str]]:
    """Stages and overrides of the recipe by study: a section has one list of models."""
    vits, generators, judges = map(", ".join, (VITS[PHOTOS], GENERATORS, JUDGES))
    pictures = f"eps: {eps}, patch_size: {PATCH}, top_k: 1, judge_models: [{judges}]"
    pictures += ", subset: {num_items: 500}"
    moving = f"num_steps: {STEPS}"
    still = "num_steps: 1, step_size: 1.0e-9"  # only the random start of PGD is left
    return {
        "clean": ("evaluate", "evaluate={}"),
        "inside": (
            "analyze",
            f"analyze={{models: [{vits}], correlation: {{}}, lesions: {{}}, "
            "restricted_attention: {}}",
        ),
        "perturbations": (
            "analyze",
            f"analyze={{models: [{generators}], perturbations: {{{pictures}, {moving}}}}}",
        ),
        NOISE: ("analyze", f"analyze={{models: [{VIT}], perturbations: {{{pictures}, {still}}}}}"),
    }


STUDIES = {data: _studies(eps) for data, eps in BUDGETS.items()}


@dataclass(frozen=True, slots=True)
class Lines(runs.Lines):
    """Numbers of all models and seeds, in percent."""

    data: str

    def values(self, model: str, measure: Measure) -> list[float]:
        """One percentage per seed."""
        return [100 * measure(line) for line in self.find(data=self.data, model=model)]

    def estimate(self, model: str, measure: Measure) -> Estimate:
        return Estimate(tuple(self.values(model, measure)))

    def table(self, models: Sequence[str], measures: Mapping[str, Measure]) -> Table:
        return {
            NAMES[model]: {name: self.estimate(model, how) for name, how in measures.items()}
            for model in models
        }

    def changed(self, measures: Mapping[str, Measure]) -> Table:
        """The ViTs, whole and changed."""
        return self.table(self.vits, {"whole network": whole, **measures})

    def contrast(
        self, model: str, what: str, first: Measure, second: Measure, *, sign: int
    ) -> Contrast:
        """`first` minus `second` of one model; `what` names both."""
        difference = paired(self.values(model, first), self.values(model, second))
        return Contrast(f"{NAMES[model]}: {what}", SIGN if sign else LITTLE, difference, sign)

    def contrasts(self, what: str, first: Measure, second: Measure, *, sign: int) -> list[Contrast]:
        """The contrast in every ViT."""
        return [self.contrast(model, what, first, second, sign=sign) for model in self.vits]

    def between(self, measure: Measure, first: str, second: str) -> Estimate:
        """One measure, the first model minus the second."""
        return paired(self.values(first, measure), self.values(second, measure))

    @property
    def vits(self) -> tuple[str, ...]:
        return VITS[self.data]

    @property
    def depth(self) -> int:
        """Number of blocks of the ViTs."""
        (depth,) = {
            len(line["lesions"]["block"]["single"])
            for model in self.vits
            for line in self.find(data=self.data, model=model)
        }
        return depth


def clean(line: Line) -> float:
    """Accuracy on all test items."""
    return float(line["clean"])


def whole(line: Line) -> float:
    """Accuracy of the whole network on the items of lesions."""
    return float(line["lesions"]["whole"])


def without(part: str, block: int) -> Measure:
    """Accuracy without this part of one block."""
    return lambda line: line["lesions"][part]["single"][block]


def without_later(part: str) -> Measure:
    """Mean accuracy without this part of one block, over all but the first."""
    return lambda line: mean(line["lesions"][part]["single"][1:])


def without_worst_later(line: Line) -> float:
    """Accuracy without the block whose removal costs most, the first excepted."""
    return float(min(line["lesions"]["block"]["single"][1:]))


def without_several(part: str, count: int) -> Measure:
    """Mean accuracy without this part of `count` blocks, the first is kept."""
    return lambda line: line["lesions"][part]["several"][count - 2]


def neighbours(tokens: str, first: int) -> Measure:
    """Correlation of block `first` with the next one; -1: that of the last two blocks."""
    return lambda line: line["correlation"][tokens][first]


def within(kind: str, distance: int) -> Measure:
    """Accuracy where patches see those at most so far apart, or equally many at random."""
    return lambda line: line["attention"][kind][distance]


def within_all(kind: str) -> Measure:
    """Mean accuracy over the distances that mask some pairs, 0 excepted."""
    return lambda line: mean(line["attention"][kind][1:-1])


def cls_only(where: str, count: int) -> Measure:
    """Accuracy where no patch sees another one in the `first` or `last` blocks."""
    return lambda line: line["attention"][f"cls_{where}"][count]


def recognised(sign: str, *judges: str) -> Measure:
    """Share of perturbation pictures that judges classify as the item; mean over judges."""
    return lambda line: mean(line["perturbations"][f"{judge}/{sign}"] for judge in judges)


def alignment(line: Line) -> float:
    """Change at the borders of patches over that inside them."""
    return float(line["perturbations"]["alignment"])
