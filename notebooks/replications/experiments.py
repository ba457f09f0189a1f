"""The five published findings: which arms they compare, and what the papers measured.

Each function turns trials into tables and contrasts; nothing is trained here. Papers: A light
recipe to train robust vision transformers (Debenedetti et al.); Certified patch robustness via
smoothed vision transformers (Salman et al. 2022); Towards understanding and improving adversarial
robustness of vision transformers (Jain & Dutta).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from notebooks.replications.statistics import Estimate, paired, verdict
from notebooks.replications.trials import Results, Trial

Figures = Sequence[float]  # one per seed, %
SOUND, PAPER = "original network", "paper protocol"


@dataclass(frozen=True, slots=True)
class Contrast:
    """One comparison: the difference of two arms in one measure, and the published sign."""

    what: str
    published: str
    difference: Estimate
    expected: int

    @property
    def verdict(self) -> str:
        return verdict(self.difference, expected=self.expected)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A published claim and the results of the trials."""

    key: str
    claim: str
    table: Mapping[str, Mapping[str, Estimate]]  # arm -> measure -> accuracy
    contrasts: Sequence[Contrast]  # the first one decides about the claim
    remark: str  # differences from the published experiment


def share(pair: Sequence[int]) -> float:
    """A count as a percentage."""
    right, number = pair
    return 100 * right / number


def figures(trials: Sequence[Trial], measure: str) -> Figures:
    """One accuracy per seed."""
    return [share(trial["counts"][measure]) for trial in trials]


def _table(
    results: Results, arms: Sequence[str], measures: Sequence[str]
) -> dict[str, dict[str, Estimate]]:
    return {
        arm: {measure: Estimate(tuple(figures(results[arm], measure))) for measure in measures}
        for arm in arms
    }


def _between(results: Results, first: str, second: str, measure: str) -> Estimate:
    return paired(figures(results[first], measure), figures(results[second], measure))


def warmup(results: Results) -> Experiment:
    """Debenedetti et al., Table 2: 0 against 20 warm-up epochs of 110."""
    arms = ("fgsm", "fgsm, no warm-up")
    return Experiment(
        key="warm-up",
        claim="A linear rise of epsilon over the first epochs helps FGSM training.",
        table=_table(results, arms, ("clean", "apgd-ce")),
        contrasts=[
            Contrast(
                "robust accuracy, with minus without warm-up",
                "+4.4",
                _between(results, *arms, "apgd-ce"),
                +1,
            ),
            Contrast(
                "clean accuracy, with minus without warm-up",
                "+7.6",
                _between(results, *arms, "clean"),
                +1,
            ),
        ],
        remark="2 of 10 epochs here, 20 of 110 in the paper; basic augmentation here, heavy in the "
        "paper. In a short schedule a late start matters more: without warm-up the clean accuracy is "
        "also far below that of a longer training.",
    )


def augmentation(results: Results) -> Experiment:
    """Debenedetti et al., Table 3: all four heavy augmentations against none of them."""
    adversarial = ("fgsm, 20 epochs, heavy", "fgsm, 20 epochs")
    standard = ("standard, 20 epochs, heavy", "standard, 20 epochs")
    clean = _between(results, *standard, "clean")
    robust = _between(results, *adversarial, "apgd-ce")
    return Experiment(
        key="augmentation",
        claim="MixUp, CutMix, RandAugment and erasing together hurt adversarial training, and "
        "more than they hurt standard training.",
        table=_table(results, (*adversarial, *standard), ("clean", "apgd-ce")),
        contrasts=[
            Contrast("robust accuracy of FGSM training, heavy minus basic", "-3.8", robust, -1),
            Contrast(
                "clean accuracy of FGSM training, heavy minus basic",
                "-10.1",
                _between(results, *adversarial, "clean"),
                -1,
            ),
            Contrast("clean accuracy of standard training, heavy minus basic", "-1.3", clean, -1),
            Contrast(
                "change of clean accuracy by heavy augmentation, FGSM minus standard training",
                "-8.9",
                paired(_between(results, *adversarial, "clean").values, clean.values),
                -1,
            ),
        ],
        remark="Basic augmentation is a shift by up to one pixel; in the paper it is resized crops, "
        "mirroring and colour jitter. MixUp alpha 0.8, CutMix alpha 1, rand-m9-mstd0.5-inc1 and "
        "erasing with probability 0.25 are as published. These arms are trained twice as long as `fgsm`, at "
        "half its rate and with epsilon rising for 10 epochs: in the schedule of `fgsm` the heavily augmented "
        "FGSM arm stayed near chance, also on test items; the longer one was then chosen on "
        "validation items.",
    )


def weight_decay(results: Results) -> Experiment:
    """Debenedetti et al., Table 4: 0.5 was the best of seven values."""
    arms = ("fgsm, decay 0", "fgsm", "fgsm, decay 0.5", "fgsm, decay 1")
    published = {
        "fgsm, decay 0.5": ("+2.7", +1),
        "fgsm, decay 1": ("+1.6", +1),
        "fgsm, decay 0": ("-0.3", -1),
    }
    contrasts = [
        Contrast(
            f"robust accuracy, decay {arm.rpartition(' ')[2]} minus decay 0.05",
            figure,
            _between(results, arm, "fgsm", "apgd-ce"),
            sign,
        )
        for arm, (figure, sign) in published.items()
    ]
    return Experiment(
        key="weight decay",
        claim="Ten times the usual weight decay, 0.5 instead of 0.05, makes FGSM training better.",
        table=_table(results, arms, ("clean", "apgd-ce")),
        contrasts=contrasts,
        remark="The arm `fgsm` has decay 0.05. Three comparisons share it, so that one of them may "
        "look decided by chance more often than one in twenty.",
    )


def ablations(results: Results) -> Experiment:
    """Salman et al. 2022, sec. 3 and Table 2: ViT-S against ResNet-50, CIFAR-10, bands of 4."""
    arms = ("vit, tokens dropped", "vit, tokens masked", "resnet")
    measures = list(results["resnet"][0]["counts"])
    certified = measures[-2]  # of three patch sizes the middle one
    vit, masked, resnet = arms
    return Experiment(
        key="ablations",
        claim="Trained on column ablations, a ViT votes better than a ResNet of its size, so that "
        "more is certified; dropping hidden tokens costs no accuracy.",
        table=_table(results, arms, measures),
        contrasts=[
            Contrast(
                "accuracy on single ablations, ViT minus ResNet",
                "up to +12 (ImageNet)",
                _between(results, vit, resnet, "single ablations"),
                +1,
            ),
            Contrast(
                f"accuracy {certified} patch, ViT minus ResNet",
                "+3.4 (2x2), +4.8 (4x4)",
                _between(results, vit, resnet, certified),
                +1,
            ),
            Contrast(
                "accuracy on single ablations, tokens dropped minus masked",
                "barely any",
                _between(results, vit, masked, "single ablations"),
                0,
            ),
        ],
        remark="All three start from random weights; in the paper both start from ImageNet weights. The "
        "epoch with the best validation accuracy on ablations is kept. Rate, batch and epochs are the "
        "same for all three; the ViT has 4 tokens of 8x8 pixels, and the networks have 89 and 78 "
        "thousand weights.",
    )


def attention(results: Results) -> Experiment:
    """Jain & Dutta, Table 5: PGD-AT with and without AAS-AT, CIFAR-10, PGD-100."""
    plain, scaled = "pgd", "pgd + aas"
    measures = ("clean", "apgd-ce", "pgd", "pgd + restarts", "pgd + aas")
    table = _table(results, (plain, scaled), measures)
    for arm in (plain, scaled):
        for measure in ("clean", "pgd + aas"):
            table[arm][f"{PAPER}: {measure}"] = Estimate(tuple(_rescaled(results[arm], measure)))
    gaps = {arm: _gaps(results[arm]) for arm in (plain, scaled)}
    return Experiment(
        key="attention scales",
        claim="Training with adversarial attention scales (AAS-AT) narrows the gap between PGD and "
        "PGD with such scales.",
        table=table,
        contrasts=[
            Contrast(
                f"{SOUND}: gap of AAS-AT minus gap of PGD-AT",
                "not measured",
                paired(gaps[scaled][SOUND], gaps[plain][SOUND]),
                -1,
            ),
            Contrast(
                f"{PAPER}: gap of AAS-AT minus gap of PGD-AT",
                "-4.5",
                paired(gaps[scaled][PAPER], gaps[plain][PAPER]),
                -1,
            ),
            Contrast(
                f"{SOUND}: accuracy of PGD-AT under equally many restarts minus under scales",
                "not measured",
                paired(
                    figures(results[plain], "pgd + restarts"), figures(results[plain], "pgd + aas")
                ),
                +1,
            ),
            Contrast(
                "robust accuracy (APGD-CE), AAS-AT minus PGD-AT",
                "+3.5 (AutoAttack)",
                _between(results, scaled, plain, "apgd-ce"),
                +1,
            ),
        ],
        remark="Gap: accuracy under PGD minus accuracy under PGD + AAS. On the original network "
        "every point is evaluated by the trained model; in the paper's protocol by the rescaled networks, "
        "which are different classifiers (the mean of three draws of scales). PGD-20 here, "
        "PGD-100 in the paper; scales are searched in epochs 4 and 8 of 11, which train no weights.",
    )


def _rescaled(trials: Sequence[Trial], measure: str) -> Figures:
    """Accuracies of the rescaled networks: one mean over the draws per seed."""
    return [mean(share(n[measure]) for n in t["counts"]["paper_protocol"]) for t in trials]


def _gaps(trials: Sequence[Trial]) -> dict[str, Figures]:
    base = figures(trials, "pgd")
    others = {
        SOUND: figures(trials, "pgd + aas"),
        PAPER: _rescaled(trials, "pgd + aas"),
    }
    return {
        name: [a - b for a, b in zip(base, other, strict=True)] for name, other in others.items()
    }


EXPERIMENTS: Sequence[Callable[[Results], Experiment]] = (
    warmup,
    augmentation,
    weight_decay,
    ablations,
    attention,
)
