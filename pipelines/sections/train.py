"""Objectives, optimisation and tuning."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from pipelines.sections.base import Count, Name, PositivePixels, Section


class StandardObjective(Section):
    """Cross-entropy, or binary cross-entropy per class, on clean images."""

    kind: Literal["standard"] = "standard"
    criterion: Literal["ce", "bce"] = "ce"


class FgsmObjective(Section):
    """Adversarial training with 1 or 2 FGSM steps (Debenedetti et al. 2022, sec. 4)."""

    kind: Literal["fgsm"]
    eps: PositivePixels
    num_steps: int = Field(default=1, ge=1, le=10)
    eps_warmup_epochs: int = Field(default=0, ge=0)


class ColumnsObjective(Section):
    """Training on column ablations (Salman et al. 2022, sec. 2)."""

    kind: Literal["columns"]
    band: Count


class GaussianObjective(Section):
    """Training on Gaussian noise (Cohen et al. 2019, sec. 3.3)."""

    kind: Literal["gaussian"]
    sigma: PositivePixels


Objective = Annotated[
    StandardObjective | FgsmObjective | ColumnsObjective | GaussianObjective,
    Field(discriminator="kind"),
]


class AugmentSection(Section):
    """Random changes of training images; the defaults change nothing."""

    crop: Literal["none", "pad", "resized"] = "none"
    pad: int = Field(default=0, ge=0)  # pixels on each side, for crop: pad
    scale: tuple[float, float] = (0.08, 1.0)  # share of the area, for crop: resized
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width over height, for crop: resized
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    flip: bool = False
    jitter: float = Field(default=0.0, ge=0)  # brightness, contrast, saturation times 1 +- this
    rotation: float = Field(default=0.0, ge=0, le=180)  # degrees either way
    rand_augment: str | None = None  # timm's notation, e.g. rand-m9-mstd0.5-inc1
    erase_prob: float = Field(default=0.0, ge=0, le=1)  # random erasing
    mixup: float = Field(default=0.0, ge=0)  # alpha; 0 is off
    cutmix: float = Field(default=0.0, ge=0)  # alpha; 0 is off
    mix_prob: float = Field(default=1.0, gt=0, le=1)  # that a batch is mixed at all
    mix_switch: float = Field(default=0.5, ge=0, le=1)  # that it is CutMix where both are on
    mix_mode: Literal["batch", "pair"] = "batch"  # one lambda per global batch, or per pair
    copies: Count = 1  # of an item per batch, each augmented on its own
    clean_copy: bool = False  # the first copy stays as it is, and every item gets its copies

    @model_validator(mode="after")
    def _pad_goes_with_its_crop(self) -> Self:
        if (self.crop == "pad") != (self.pad > 0):
            raise PydanticCustomError(
                "pad", "pad: {pad} goes with crop: pad and is positive", {"pad": self.pad}
            )
        if self.clean_copy and self.copies < 2:
            raise PydanticCustomError("copies", "clean_copy needs copies: 2 or more")
        return self


class VariantSection(Section):
    """A further model of the same recipe: the train section with another objective."""

    objective: Objective
    epochs: Count | None = None


class TrainSection(Section):
    """Optimisation of the model `main` and of its variants."""

    objective: Objective = StandardObjective()
    variants: dict[Name, VariantSection] = {}
    epochs: Count = 10
    batch_size: Count = 128  # global, whatever the number of workers
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.05, ge=0)
    warmup_epochs: int = Field(default=1, ge=0)  # of the learning rate
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    clip_norm: float = Field(default=1.0, gt=0)
    augment: AugmentSection = AugmentSection()
    memory_mb: Count = 4096  # a larger split is streamed, in an order with locality
    val_items: Count = 256  # how many validation items are attacked after each epoch
    val_eps: PositivePixels | None = None  # None: eps of an fgsm objective, else no attack
    val_steps: Count = 10


class TuneSection(Section):
    """Ray Tune over dotted recipe keys; the objective is validation accuracy under PGD."""

    space: dict[str, list[Any]] = Field(min_length=1)
    metric: Literal["val_robust_accuracy", "val_accuracy"] = "val_robust_accuracy"
    epochs: Count | None = None  # None: train.epochs
    train_items: Count | None = None  # None: all
    grace_epochs: Count = 1
    reduction_factor: int = Field(default=2, ge=2)
