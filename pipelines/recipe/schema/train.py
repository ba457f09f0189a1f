"""Objectives and optimisation."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pipelines.recipe.schema.base import Count, Name, PositivePixels, Section
from pipelines.recipe.schema.data import ModelSection
from pipelines.recipe.schema.denoise import DenoisedObjective, DenoiserObjective


class StandardObjective(Section):
    """Cross-entropy, or binary cross-entropy per class, on clean images."""

    kind: Literal["standard"] = "standard"
    criterion: Literal["ce", "bce"] = "ce"


class AwpSection(Section):
    """Adversarial weight perturbation around the objective (Wu et al. 2020)."""

    gamma: float = Field(default=0.005, gt=0)
    start_epoch: int = Field(default=0, ge=0)


class AasSection(Section):
    """Adversarial attention scales, found anew every few epochs (Jain & Dutta, sec. 5)."""

    every: Count = 10  # epochs
    mode: Literal["replace", "augment"] = "replace"  # train the weights in such epochs too
    max_batches: Count | None = None  # that a search looks at; None: all of the epoch
    objective: Literal["lpips", "ce", "margin", "gama"] = "lpips"
    distance: Literal["unit", "eq3_squared", "eq3_literal"] = "unit"
    num_steps: Count = 10
    step_size: float = Field(default=1.0, gt=0)
    noise: float = Field(default=1.0, gt=0)
    batch_size: Count = 64  # items of a batch that a search looks at


class AdversarialSection(Section):
    """What objectives with a training attack share."""

    kind: str
    eps: PositivePixels
    num_steps: int = Field(default=10, ge=1)
    step_size: PositivePixels | None = None  # None: 1.5 eps / num_steps
    step_rule: Literal["fixed", "proportional"] = "fixed"  # while epsilon warms up
    start: Literal["uniform", "normal"] = "uniform"
    eps_warmup_epochs: int = Field(default=0, ge=0)
    eps_zero_epochs: int = Field(default=0, ge=0)  # of the warm-up: at its beginning
    eps_shape: Literal["linear", "sine"] = "linear"
    eps_per: Literal["epoch", "step"] = "epoch"  # how often epsilon rises
    awp: AwpSection | None = None
    aas: AasSection | None = None

    @model_validator(mode="after")
    def _warmup_has_room(self) -> Self:
        if self.eps_zero_epochs and self.eps_zero_epochs >= self.eps_warmup_epochs:
            raise PydanticCustomError(
                "train",
                "eps_zero_epochs: {zero} leaves no room in eps_warmup_epochs: {all}",
                {"zero": self.eps_zero_epochs, "all": self.eps_warmup_epochs},
            )
        return self


class AttackedImages(AdversarialSection):
    """Cross-entropy on attacked images alone."""

    attack_target: Literal["hard", "soft"] = "hard"  # of mixed labels
    clean_forward: Literal["none", "no_grad_eval", "train_stats"] = "no_grad_eval"
    clean_every: Count = 20  # steps between measurements of clean accuracy


class FgsmObjective(AttackedImages):
    """Adversarial training with 1 or 2 FGSM steps (Debenedetti et al. 2022, sec. 4)."""

    kind: Literal["fgsm"]
    num_steps: int = Field(default=1, ge=1, le=10)


class PgdObjective(AttackedImages):
    """Adversarial training with many small steps (Madry et al. 2018)."""

    kind: Literal["pgd"]


class TradesObjective(AdversarialSection):
    """Accuracy traded for equal answers on attacked images (Zhang et al. 2019)."""

    kind: Literal["trades"]
    beta: float = Field(default=6.0, ge=0)
    passes: Literal["auto", "joint", "separate"] = "auto"


class MartObjective(AdversarialSection):
    """Adversarial training that looks hardest at what is wrong already (Wang et al. 2020)."""

    kind: Literal["mart"]
    beta: float = Field(default=6.0, ge=0)
    passes: Literal["auto", "joint", "separate"] = "auto"


class ColumnsObjective(Section):
    """Training on column ablations (Salman et al. 2022, sec. 2)."""

    kind: Literal["columns"]
    band: Count


class AblationObjective(Section):
    """Training on ablations of any shape, at one place per batch or per image."""

    kind: Literal["ablation"]
    shape: Literal["column", "row", "block"] = "column"
    size: Count  # pixels on the visible side
    position: Literal["batch", "image"] = "batch"


class GaussianObjective(Section):
    """Training on Gaussian noise (Cohen et al. 2019, sec. 3.3)."""

    kind: Literal["gaussian"]
    sigma: PositivePixels


Objective = Annotated[
    StandardObjective
    | FgsmObjective
    | PgdObjective
    | TradesObjective
    | MartObjective
    | ColumnsObjective
    | AblationObjective
    | GaussianObjective
    | DenoiserObjective
    | DenoisedObjective,
    Field(discriminator="kind"),
]


Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamW(Section):
    """Adam with decoupled weight decay."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)


class Sgd(Section):
    """Gradient descent with momentum."""

    kind: Literal["sgd"]
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise PydanticCustomError("train", "nesterov: needs a momentum above 0")
        return self


Optimizer = Annotated[AdamW | Sgd, Field(discriminator="kind")]


class CosineSchedule(Section):
    """Half a cosine down to the floor, then rest."""

    kind: Literal["cosine"] = "cosine"
    floor: float | None = Field(default=None, ge=0)  # None: a hundredth of the learning rate
    cooldown_epochs: int = Field(default=0, ge=0)  # the last of `epochs`: at the floor


class StepSchedule(Section):
    """Times gamma at every milestone, or every so many epochs."""

    kind: Literal["step"]
    every: Count | None = None
    milestones: list[Count] = []
    gamma: float = Field(default=0.1, gt=0, lt=1)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.every is None) == (not self.milestones):
            raise PydanticCustomError("train", "schedule: give either every or milestones")
        if any(a >= b for a, b in pairwise(self.milestones)):
            raise PydanticCustomError("train", f"schedule.milestones: {self.milestones} must rise")
        return self


class ConstantSchedule(Section):
    """The learning rate as written, after its warm-up."""

    kind: Literal["constant"]


Schedule = Annotated[CosineSchedule | StepSchedule | ConstantSchedule, Field(discriminator="kind")]


class EmaAverage(Section):
    """Exponential average of the weights, after every step."""

    kind: Literal["ema"]
    decay: float = Field(default=0.9999, gt=0, lt=1)


class SwaAverage(Section):
    """Plain average of the weights at the end of epochs (Izmailov et al. 2018)."""

    kind: Literal["swa"]
    start_epoch: int = Field(default=0, ge=0)


Average = Annotated[EmaAverage | SwaAverage, Field(discriminator="kind")]


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

    @field_validator("scale", "ratio")
    @classmethod
    def _small_before_large(
        cls, value: tuple[float, float], info: ValidationInfo
    ) -> tuple[float, float]:
        if not 0 < value[0] <= value[1]:
            raise PydanticCustomError("limits", "is no pair of positive numbers, small and large")
        if info.field_name == "scale" and value[1] > 1:
            raise PydanticCustomError("limits", "is a share of the image's area: at most 1")
        return value


class VariantSection(Section):
    """A further model of the same recipe: the train section with another objective."""

    objective: Objective
    epochs: Count | None = None
    model: ModelSection | None = None  # None: that of the recipe


class TrainSection(Section):
    """Optimisation of the model `main` and of its variants."""

    objective: Objective = StandardObjective()
    variants: dict[Name, VariantSection] = {}
    epochs: Count = 10
    batch_size: Count = 128  # global, whatever the number of workers
    optimizer: Optimizer = AdamW()
    learning_rate: float = Field(default=1e-3, gt=0)
    rate_rule: Literal["absolute", "linear", "sqrt"] = "absolute"  # else: for a batch of 512
    schedule: Schedule = CosineSchedule()
    warmup_epochs: int = Field(default=1, ge=0)  # of the learning rate
    warmup_start: float | None = Field(default=None, ge=0)  # None: equal rises from 0
    weight_decay: float = Field(default=0.05, ge=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    clip_norm: float | None = Field(default=1.0, gt=0)  # None: gradients as they are
    average: Average | None = None  # of the weights: then validated and kept in their place
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    micro_batch: Count | None = None  # items of a worker per pass; None: its share of the batch
    augment: AugmentSection = AugmentSection()
    memory_mb: Count = 4096  # a larger split is streamed, in an order with locality
    val_items: Count = 256  # how many validation items are attacked after each epoch
    val_eps: PositivePixels | None = None  # None: eps of an adversarial objective, else no attack
    val_attack: Literal["pgd", "apgd-ce", "train"] = "pgd"  # train: the objective's, at full eps
    val_steps: Count = 10  # of pgd and apgd-ce
    select: Literal["last", "best"] = "last"  # best: on validation, under attack where there is one
    patience: Count | None = None  # epochs without a new best one; None: train to the end
    stop_on_leak: bool = True  # when attacked training images are easier than clean ones

    @model_validator(mode="after")
    def _objectives_fit(self) -> Self:
        objectives = self._objectives()
        if any(isinstance(o, MartObjective) for o in objectives):
            soft = "makes soft labels, which mart cannot weigh"
            if self.augment.mixup or self.augment.cutmix:
                raise PydanticCustomError("train", f"augment: {soft}; turn mixup and cutmix off")
            if self.label_smoothing:
                value = f"label_smoothing: {self.label_smoothing:g}"
                raise PydanticCustomError("train", f"{value} {soft}; leave it out")
        if any(isinstance(o, AdversarialSection) and o.awp for o in objectives):
            if self.micro_batch is not None:
                remedy = "cannot be combined with awp, whose step belongs to the whole batch"
                raise PydanticCustomError("train", f"micro_batch: {remedy}")
            if self.precision == "fp16":
                remedy = "loses the gradients that awp follows; use bf16"
                raise PydanticCustomError("train", f"precision: fp16 {remedy}")
        return self

    @model_validator(mode="after")
    def _denoisers_see_images_alone(self) -> Self:
        which = [isinstance(o, DenoiserObjective) for o in self._objectives()]
        if any(which) and (self.augment.mixup or self.augment.cutmix):
            remedy = "mixes the images that a denoiser learns; turn mixup and cutmix off"
            raise PydanticCustomError("train", f"augment: {remedy}")
        if all(which):
            for key in ("val_eps", "label_smoothing"):
                if getattr(self, key):
                    remedy = "would be ignored: a denoiser knows no classes; leave it out"
                    raise PydanticCustomError("train", f"{key}: {getattr(self, key):g} {remedy}")
        return self

    @model_validator(mode="after")
    def _training_attack_exists(self) -> Self:
        if self.val_attack != "train":
            return self
        plain = [o.kind for o in self._objectives() if not isinstance(o, AdversarialSection)]
        # Without val_eps a plain model is not attacked at all, beside others that are.
        if plain and (self.val_eps or len(plain) == len(self._objectives())):
            remedy = f"is none: {plain[0]} attacks nothing; choose pgd or apgd-ce"
            raise PydanticCustomError("train", f"val_attack: train {remedy}")
        return self

    def _objectives(self) -> list[Objective]:
        return [self.objective, *(v.objective for v in self.variants.values())]

    @model_validator(mode="after")
    def _cooldown_fits(self) -> Self:
        rest = getattr(self.schedule, "cooldown_epochs", 0)
        lengths = [self.epochs, *(v.epochs for v in self.variants.values() if v.epochs)]
        if rest and rest >= min(lengths):
            remedy = "leaves no epoch before it"
            raise PydanticCustomError("train", f"schedule: cooldown_epochs: {rest} {remedy}")
        return self
