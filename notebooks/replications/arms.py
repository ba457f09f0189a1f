"""The base recipe, and for every arm the keys in which it differs.

The sizes below were chosen on validation items; test items are used by finished arms only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EPS = 0.1  # l-inf, in pixels of full scale 1


@dataclass(frozen=True, slots=True)
class Size:
    """How much is computed; `small` only tests that everything runs, its figures mean nothing."""

    data: Mapping[str, Any]
    train: Mapping[str, Any]  # overrides the train section of every arm
    patch: int  # side of an XCiT's token, pixels
    band: int  # visible columns of an ablation
    patch_sizes: tuple[int, ...]  # of the certified adversary
    seeds: tuple[int, ...]
    apgd_steps: int
    pgd_steps: int


SIZES: Mapping[str, Size] = {
    "full": Size(
        data={
            "source": "mnist5k",
            "image_size": 16,
            "fit": "resize",
            "split_seed": 7,
            "limits": {"train": 2500},
        },
        train={},
        patch=4,
        band=3,
        patch_sizes=(1, 2, 3),
        seeds=(0, 1, 2),
        apgd_steps=20,
        pgd_steps=20,
    ),
    "small": Size(
        data={
            "source": "digits",
            "image_size": 8,
            "split_seed": 7,
            "limits": {"train": 48, "val": 16, "test": 24},
        },
        train={"epochs": 1},
        patch=2,
        band=2,
        patch_sizes=(1, 2),
        seeds=(0, 1),
        apgd_steps=3,
        pgd_steps=2,
    ),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One training per seed; `measure` names a function of `measures.py`."""

    measure: str
    model: Mapping[str, Any]
    train: Mapping[str, Any] = field(default_factory=dict)  # differences from TRAIN


XCIT = {"architecture": "tiny_xcit", "options": {"embed_dim": 32, "depth": 2}}
CENTRED = {"mean": [0.13], "std": [0.3]}  # of these digits; a plain ViT then learns faster
VIT = {"architecture": "tiny_vit", "options": {"embed_dim": 48, "depth": 3}, **CENTRED}
RESNET = {
    "architecture": "preact_resnet18",
    "options": {"layers": [1, 1, 1], "widths": [16, 32, 64]},
    **CENTRED,
}
WARM_FGSM = {"kind": "fgsm", "eps": EPS, "eps_warmup_epochs": 2}
SHIFTED = {"crop": "pad", "pad": 1}  # basic augmentation; flips would change the digit
HEAVY = {
    **SHIFTED,
    "mixup": 0.8,
    "cutmix": 1.0,
    "rand_augment": "rand-m9-mstd0.5-inc1",
    "erase_prob": 0.25,
}
# Heavily augmented images need a longer schedule and a smaller rate to be learned at all.
LONG = {"epochs": 20, "learning_rate": 2e-3}
LONG_FGSM = {**WARM_FGSM, "eps_warmup_epochs": 10}
STANDARD = {"kind": "standard"}
ABLATED = {"epochs": 20, "batch_size": 32, "learning_rate": 1e-3, "select": "best"}
# A plain ViT learns nothing under the full attack from the start: both arms have a long warm-up.
PGD = {"kind": "pgd", "eps": EPS, "num_steps": 2, "eps_zero_epochs": 2, "eps_warmup_epochs": 6}
ATTACKED = {"epochs": 11, "batch_size": 32, "learning_rate": 1e-3}

# The base of all trainings. Validation is short: only the ablation arms are selected by it.
TRAIN = {
    "objective": WARM_FGSM,
    "epochs": 10,
    "batch_size": 64,
    "learning_rate": 4e-3,
    "weight_decay": 0.05,
    "augment": SHIFTED,
    "val_items": 64,
    "val_steps": 5,
}

ARMS: Mapping[str, Arm] = {
    "fgsm": Arm("robustness", XCIT),
    "fgsm, no warm-up": Arm("robustness", XCIT, {"objective": {"kind": "fgsm", "eps": EPS}}),
    "fgsm, 20 epochs": Arm("robustness", XCIT, {**LONG, "objective": LONG_FGSM}),
    "fgsm, 20 epochs, heavy": Arm(
        "robustness", XCIT, {**LONG, "objective": LONG_FGSM, "augment": HEAVY}
    ),
    "standard, 20 epochs": Arm("robustness", XCIT, {**LONG, "objective": STANDARD}),
    "standard, 20 epochs, heavy": Arm(
        "robustness", XCIT, {**LONG, "objective": STANDARD, "augment": HEAVY}
    ),
    "fgsm, decay 0": Arm("robustness", XCIT, {"weight_decay": 0.0}),
    "fgsm, decay 0.5": Arm("robustness", XCIT, {"weight_decay": 0.5}),
    "fgsm, decay 1": Arm("robustness", XCIT, {"weight_decay": 1.0}),
    "vit, tokens dropped": Arm("ablations", {**VIT, "token_policy": "drop"}, ABLATED),
    "vit, tokens masked": Arm("ablations", VIT, ABLATED),
    "resnet": Arm("ablations", RESNET, ABLATED),
    "pgd": Arm("attention", VIT, {**ATTACKED, "objective": PGD}),
    "pgd + aas": Arm("attention", VIT, {**ATTACKED, "objective": {**PGD, "aas": {"every": 4}}}),
}


def values_of(arm: Arm, size: Size, *, seed: int) -> dict[str, Any]:
    """The arm as the values of a recipe, which `casemate train` also accepts."""
    model, train = dict(arm.model), {**TRAIN, **arm.train, **size.train}
    # A plain ViT embeds pixels by one matrix: with large tokens it learns far faster.
    tokens = {"tiny_xcit": size.patch, "tiny_vit": 2 * size.patch}
    if model["architecture"] in tokens:
        model["options"] = {**model["options"], "patch_size": tokens[model["architecture"]]}
    if arm.measure == "ablations":
        train["objective"] = {"kind": "ablation", "size": size.band, "position": "image"}
    values = {"name": "replications", "seed": seed, "data": dict(size.data)}
    return {**values, "model": model, "train": train}
