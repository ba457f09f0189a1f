"""Published findings on ViTs and ResNets: which models they compare, and what was measured.

Paper: Understanding robustness of transformers for image classification (Bhojanapalli et al. 2021).
Its rows with pre-training on ILSVRC-2012 alone are the nearest to networks from random weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from notebooks.replications import runs
from notebooks.replications.experiments import Contrast, Experiment
from notebooks.replications.statistics import Estimate, paired

DIGITS, PHOTOS = "digits", "photographs"
MODELS = {
    "main": "ViT, patches of 4 px",
    "vit-coarse": "ViT, patches of 8 px",
    "resnet": "ResNet",
    "resnet-narrow": "ResNet, narrower",
    "vit-robust": "ViT, FGSM training",
    "resnet-robust": "ResNet, FGSM training",
}
VIT, COARSE, RESNET, NARROW, ROBUST_VIT, ROBUST_RESNET = MODELS
Table = Mapping[str, Mapping[str, Estimate]]
SIGN = "sign only"  # the paper shows it in a figure, or another paper claims it
LOST = "lost to corruptions"
SHARE = "share lost to corruptions"
SHARE_OF_POSES = "share lost to rotations"
LOSSES = {  # accuracy before and after; whether the loss is a share of the accuracy before
    LOST: ("clean", "mean95", False),
    SHARE: ("clean", "mean95", True),
    SHARE_OF_POSES: ("clean, spatial", "spatial", True),
}


@dataclass(frozen=True, slots=True)
class Lines(runs.Lines):
    """Accuracies of all models and seeds, in percent."""

    data: str

    def values(self, model: str, measure: str) -> list[float]:
        """One percentage per seed."""
        found = self.find(data=self.data, model=model)
        if measure in LOSSES:
            before, after, is_share = LOSSES[measure]
            pairs = [(line["accuracy"][before], line["accuracy"][after]) for line in found]
            return [100 * (x - y) / (x if is_share else 1) for x, y in pairs]
        return [100 * line["accuracy"][measure] for line in found]

    def drops(self, kind: str, source: str, target: str) -> list[float]:
        """Clean accuracy of the target minus that under the perturbations of the source."""
        clean = self.values(target, "clean, transfer")
        attacked = self.values(target, f"{kind} of {source}")
        return [before - after for before, after in zip(clean, attacked, strict=True)]

    def between(self, measure: str, first: str, second: str) -> Estimate:
        return paired(self.values(first, measure), self.values(second, measure))

    def table(self, models: Sequence[str], measures: Sequence[str]) -> Table:
        return {
            MODELS[model]: {name: Estimate(tuple(self.values(model, name))) for name in measures}
            for model in models
        }


def experiments_of(lines: Lines) -> list[Experiment]:
    """All findings on one kind of images."""
    makers = (_corruptions, _robust_training, _own_perturbations, _transfer, _spatial)
    return [make(lines) for make in makers]


def _corruptions(lines: Lines) -> Experiment:
    """Bhojanapalli et al. 2021, Table 3, ILSVRC-2012: B/16, B/32 and R101x1."""
    measures = ("clean", "mean95", "mean75", "noise", "blur", "weather", "digital", LOST, SHARE)
    return Experiment(
        key=f"corruptions, {lines.data}",
        claim="Without large pre-training, a ViT withstands corruptions about as well as a ResNet "
        "of similar accuracy; larger patches cost accuracy.",
        table=lines.table([VIT, COARSE, RESNET, NARROW], measures),
        contrasts=[
            Contrast("mean95, ViT minus ResNet", "+2.0", lines.between("mean95", VIT, RESNET), +1),
            Contrast(
                "points lost to corruptions, ViT minus ResNet",
                "-2.1",
                lines.between(LOST, VIT, RESNET),
                -1,
            ),
            Contrast(
                "share of clean accuracy lost to corruptions, ViT minus ResNet",
                "-2.6",
                lines.between(SHARE, VIT, RESNET),
                -1,
            ),
            Contrast(
                "mean95, larger minus smaller patches",
                "-3.4",
                lines.between("mean95", COARSE, VIT),
                -1,
            ),
        ],
        remark="mean95 is the mean over 19 corruptions and 5 severities, frost with a procedural "
        "texture. The published pair (B/16, R101x1) has the same clean accuracy within 0.1 points; "
        "these networks have not. A network with little accuracy loses few points, so that the share "
        "of the clean accuracy is the fairest of these comparisons.",
    )


def _robust_training(lines: Lines) -> Experiment:
    """Ford et al. 2019, Adversarial examples are a natural consequence of test error in noise."""
    measures = ("clean", "mean95", "noise", "blur", "weather", "digital", "fog and contrast")
    pairs = {"ViT": (ROBUST_VIT, VIT), "ResNet": (ROBUST_RESNET, RESNET)}
    contrasts = [
        Contrast(
            f"{measure}, {family}: adversarial minus standard training",
            SIGN,
            lines.between(measure, *models),
            sign,
        )
        for family, models in pairs.items()
        for measure, sign in (("noise", +1), ("fog and contrast", -1))
    ]
    return Experiment(
        key=f"adversarial training, {lines.data}",
        claim="Adversarial training raises accuracy under noise and lowers it under fog and low "
        "contrast.",
        table=lines.table([VIT, ROBUST_VIT, RESNET, ROBUST_RESNET], measures),
        contrasts=contrasts,
        remark="FGSM training, l-inf, eps 4/255 on photographs and 0.1 on digits. The claim is not from "
        "this paper but from Ford et al. 2019, for convolutional networks.",
    )


def _own_perturbations(lines: Lines) -> Experiment:
    """Bhojanapalli et al. 2021, Tables 4 and 5, ILSVRC-2012, B/16 and R101x1 on themselves."""
    measures = ("clean, transfer", "fgsm, own", "pgd, own")
    return Experiment(
        key=f"own perturbations, {lines.data}",
        claim="With pre-training on ILSVRC-2012 alone, ViTs keep more accuracy than ResNets under "
        "their own FGSM and PGD perturbations of one gray level.",
        table=lines.table([*MODELS], measures),
        contrasts=[
            Contrast(
                f"{kind.upper()}, ViT minus ResNet",
                figure,
                lines.between(f"{kind}, own", VIT, RESNET),
                +1,
            )
            for kind, figure in (("pgd", "+12.3"), ("fgsm", "+15.9"))
        ],
        remark="One gray level on photographs, 0.05 on digits: a gray level changes no digit.",
    )


def _transfer(lines: Lines) -> Experiment:
    """Bhojanapalli et al. 2021, Figure 4 and Table 4: B/16 and R101x1, ILSVRC-2012."""
    drops = {
        (source, target): lines.drops("pgd", source, target)
        for source in (VIT, COARSE, RESNET, NARROW)
        for target in (VIT, COARSE, RESNET, NARROW)
    }
    table = {
        f"of {MODELS[source]}": {
            f"drop of {MODELS[target]}": Estimate(tuple(drops[source, target]))
            for target in (VIT, COARSE, RESNET, NARROW)
        }
        for source in (VIT, COARSE, RESNET, NARROW)
    }
    return Experiment(
        key=f"transfer, {lines.data}",
        claim="Perturbations hardly transfer between the families, and more within a family.",
        table=table,
        contrasts=[
            Contrast(
                "drop by PGD of the ViT: on the ResNet minus on the other ViT",
                SIGN,
                paired(drops[VIT, RESNET], drops[VIT, COARSE]),
                -1,
            ),
            Contrast(
                "drop by PGD of the ResNet: on the ViT minus on the other ResNet",
                SIGN,
                paired(drops[RESNET, VIT], drops[RESNET, NARROW]),
                -1,
            ),
            Contrast(
                "drop by PGD, from ViT to ResNet minus from ResNet to ViT",
                "+1.5",
                paired(drops[VIT, RESNET], drops[RESNET, VIT]),
                +1,
            ),
        ],
        remark="In points of accuracy; the diagonal is the attack on the model itself.",
    )


def _spatial(lines: Lines) -> Experiment:
    """Bhojanapalli et al. 2021, sec. 3.6 and Figure 3, right."""
    spatial = {
        model: paired(lines.values(model, "clean, spatial"), lines.values(model, "spatial")).values
        for model in MODELS
    }
    return Experiment(
        key=f"rotations and shifts, {lines.data}",
        claim="ViTs with small patches withstand rotations and shifts as well as ResNets; large "
        "patches are more susceptible.",
        table=lines.table([*MODELS], ("clean, spatial", "spatial", SHARE_OF_POSES)),
        contrasts=[
            Contrast(
                "points lost, ViT minus ResNet",
                "about equal",
                paired(spatial[VIT], spatial[RESNET]),
                0,
            ),
            Contrast(
                "points lost, larger minus smaller patches",
                SIGN,
                paired(spatial[COARSE], spatial[VIT]),
                +1,
            ),
            Contrast(
                "share of clean accuracy lost, ViT minus ResNet",
                "about equal",
                lines.between(SHARE_OF_POSES, VIT, RESNET),
                0,
            ),
            Contrast(
                "share of clean accuracy lost, larger minus smaller patches",
                SIGN,
                lines.between(SHARE_OF_POSES, COARSE, VIT),
                +1,
            ),
        ],
        remark="Worst of 775 poses: 31 angles up to 30 degrees, 5 x 5 shifts up to 3 pixels, black "
        "borders; accuracy counts items that are right in all of them. Where almost every item breaks, "
        "the points lost are the clean accuracy, and only the share says something of poses.",
    )
