"""Settings of training, except the objective: optimiser, schedules, averages, validation."""

from collections.abc import Iterator
from dataclasses import field
from itertools import pairwise
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from components.core.settings import (
    EAGER,
    FLOAT32,
    ByKind,
    Count,
    Later,
    Name,
    NonNegative,
    Positive,
    PositivePixels,
    Problem,
    Settings,
    settings,
)
from components.data.settings import AugmentSettings
from components.models.settings import ModelSettings
from components.train.objectives.base_settings import Epochs
from components.train.objectives.settings import ObjectiveSettings, StandardSettings
from components.train.schedules import TrainingSpan, cosine_rate, peak_rate, warmup_rate

Decay = Annotated[float, Ge(0), Lt(1)]


@settings
class AdamWSettings(Settings):
    """Adam with decoupled weight decay."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the moments."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""


@settings
class SgdSettings(Settings):
    """Gradient descent with momentum."""

    kind: Literal["sgd"] = "sgd"
    momentum: Decay = 0.9
    """0: none."""
    nesterov: bool = False
    """Nesterov's momentum."""

    def problems(self) -> Iterator[Problem]:
        if self.nesterov and not self.momentum:
            yield Problem("nesterov", True, "needs a momentum above 0")


@settings
class CosineSettings(Settings):
    """Half a cosine down to the floor, then constant."""

    kind: Literal["cosine"] = "cosine"
    floor: NonNegative | None = None
    """None: a hundredth of the learning rate."""
    cooldown_epochs: Epochs = 0
    """Number of final epochs at the floor, part of `epochs`."""

    def rate_at(self, step: int, span: TrainingSpan, *, peak: float) -> float:
        """Learning rate of a step after the warm-up, counted from the start of training."""
        return cosine_rate(
            step,
            peak=peak,
            first_step=span.warmup_steps,
            last_step=(span.epochs - self.cooldown_epochs) * span.steps_per_epoch,
            floor_ratio=0.01 if self.floor is None else self.floor / peak,
        )

    def problems_in(self, epochs: int) -> Iterator[Problem]:
        """Problems of the schedule in a training of this many epochs."""
        if self.cooldown_epochs and self.cooldown_epochs >= epochs:
            key, remedy = "schedule.cooldown_epochs", "leaves no epoch before it"
            yield Problem(key, self.cooldown_epochs, remedy)


@settings
class StepSettings(Settings):
    """The rate is multiplied by gamma at every milestone, or once in `every` epochs."""

    kind: Literal["step"] = "step"
    every: Count | None = None
    """Epochs between drops; or write `milestones`."""
    milestones: tuple[Count, ...] = ()
    """Epochs of the drops; or write `every`."""
    gamma: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Factor of each drop."""

    def problems(self) -> Iterator[Problem]:
        if (self.every is None) == (not self.milestones):
            yield Problem("", "", "give either every or milestones")
        if any(a >= b for a, b in pairwise(self.milestones)):
            yield Problem("milestones", list(self.milestones), "must rise")

    def rate_at(self, step: int, span: TrainingSpan, *, peak: float) -> float:
        epoch = step // span.steps_per_epoch
        if self.every is not None:
            return peak * self.gamma ** (epoch // self.every)
        return peak * self.gamma ** sum(milestone <= epoch for milestone in self.milestones)

    def problems_in(self, epochs: int) -> Iterator[Problem]:
        return iter(())


@settings
class ConstantSettings(Settings):
    """The learning rate as written, after its warm-up."""

    kind: Literal["constant"] = "constant"

    def rate_at(self, step: int, span: TrainingSpan, *, peak: float) -> float:
        return peak

    def problems_in(self, epochs: int) -> Iterator[Problem]:
        return iter(())


@settings
class EmaSettings(Settings):
    """Exponential average of the weights, after every step."""

    kind: Literal["ema"] = "ema"
    decay: Annotated[float, Gt(0), Lt(1)] = 0.9999
    """Share of the old average that is kept at each step."""


@settings
class SwaSettings(Settings):
    """Plain average of the weights at the end of epochs (Izmailov et al. 2018)."""

    kind: Literal["swa"] = "swa"
    start_epoch: Epochs = 0
    """First epoch that is averaged."""


OptimizerSettings = Annotated[AdamWSettings | SgdSettings, ByKind()]
ScheduleSettings = Annotated[CosineSettings | StepSettings | ConstantSettings, ByKind()]
AverageSettings = Annotated[EmaSettings | SwaSettings, ByKind()]


@settings
class VariantSettings(Settings):
    """Another model of the same recipe: the train section with another objective."""

    objective: ObjectiveSettings
    """What this model is trained for."""
    epochs: Count | None = None
    """None: as `main`."""
    model: ModelSettings | None = None
    """None: that of the recipe."""


@settings
class TrainSettings(Settings):
    """Optimisation of the model `main` and of its variants."""

    objective: ObjectiveSettings = StandardSettings()
    """What the model `main` is trained for."""
    variants: dict[Name, VariantSettings] = field(default_factory=dict)
    """Further models, which differ from `main` in the given keys."""
    epochs: Count = 10
    """Passes over the training items."""
    batch_size: Count = 128
    """Global batch size, for any number of workers."""
    optimizer: OptimizerSettings = AdamWSettings()
    """How weights are changed."""
    learning_rate: Positive = 1e-3
    """Peak of the schedule, before `rate_rule`."""
    rate_rule: Literal["absolute", "linear", "sqrt"] = "absolute"
    """How the rate scales with the batch; `linear` and `sqrt` are relative to a batch of 512."""
    schedule: ScheduleSettings = CosineSettings()
    """Learning rate over epochs, after the warm-up."""
    warmup_epochs: Epochs = 1
    """Epochs of the learning rate's warm-up."""
    warmup_start: NonNegative | None = None
    """None: equal rises from 0."""
    weight_decay: NonNegative = 0.05
    """Not applied to norms and biases."""
    label_smoothing: Decay = 0.0
    """Share of the label that is spread over all classes."""
    clip_norm: Positive | None = 1.0
    """None: gradients are not clipped."""
    average: AverageSettings | None = None
    """Average of the weights, validated and kept instead of them."""
    precision: Literal["auto", "float32", "tf32", "bfloat16", "bf16", "fp16"] = FLOAT32
    """Of the passes; auto: the fastest of bfloat16 and tf32 on GPUs, float32 on CPUs; bf16 is
    bfloat16."""
    compiled: Annotated[bool, Later()] = EAGER
    """Compile networks with torch.compile: faster steps after a minute; a failure is reported."""
    recompute: Annotated[bool, Later()] = False
    """Recompute activations in the backward pass (gradient checkpointing): less memory, slower."""
    micro_batch: Count | None = None
    """Items of a worker per pass; None: its share of the batch."""
    augment: AugmentSettings = AugmentSettings()
    """Random changes of training images."""
    memory_mb: Count = 4096
    """A larger split is streamed, in an order with locality."""
    order: Annotated[Literal["window", "balanced"], Later()] = "window"
    """Of a streamed split: `window` shuffles the items of eight files; `balanced` also puts equally
    many of each into a batch, so that each train worker reads its own part of the files only."""
    decode: Annotated[Literal["host", "device"], Later()] = "host"
    """Where training images of `data.train_format: jpeg` are decoded. `device`: on the GPU, for
    each batch anew, by a decoder that rounds differently than that of the host."""
    val_items: Count = 256
    """Validation items that are attacked after each epoch."""
    val_eps: PositivePixels | None = None
    """None: eps of an adversarial objective, else no attack."""
    val_attack: Literal["pgd", "apgd-ce", "train"] = "pgd"
    """`train`: the attack of the objective, at full eps."""
    val_steps: Count = 10
    """Steps of pgd and apgd-ce."""
    select: Literal["last", "best"] = "last"
    """`best`: by validation accuracy, under attack where there is one."""
    patience: Count | None = None
    """Epochs allowed without a new best one; None: train to the end."""
    stop_on_leak: bool = True
    """Stop when attacked training images are easier than clean ones (label leaking)."""

    @property
    def peak_rate(self) -> float:
        """The learning rate after its warm-up, scaled with the batch size."""
        return peak_rate(self.learning_rate, batch_size=self.batch_size, rule=self.rate_rule)

    def objectives(self) -> list[ObjectiveSettings]:
        """Objectives of all models, `main` first."""
        return [self.objective, *(v.objective for v in self.variants.values())]

    def validation_eps(self, objective: ObjectiveSettings) -> float | None:
        """Epsilon of the validation attack: as written, else the objective's; None: no attack."""
        return self.val_eps or objective.attack_eps

    def rate_at(self, epoch: int, step: int, *, epochs: int, steps_per_epoch: int) -> float:
        """Learning rate of a step of an epoch, in a training of `epochs`."""
        span = TrainingSpan(epochs, self.warmup_epochs, steps_per_epoch)
        done = epoch * steps_per_epoch + step
        if done >= span.warmup_steps:
            return self.schedule.rate_at(done, span, peak=self.peak_rate)
        start, num_steps = self.warmup_start, span.warmup_steps
        return warmup_rate(done, peak=self.peak_rate, start=start, num_steps=num_steps)

    def problems(self) -> Iterator[Problem]:
        own = [problem for o in self.objectives() for problem in o.training_problems(self)]
        yield from {str(problem): problem for problem in own}.values()  # variants may share one
        yield from self._denoiser_problems()
        yield from self._validation_problems()
        if self.decode == "device" and self.augment.rand_augment is not None:
            remedy = "cannot be combined with rand_augment, which works on the host"
            yield Problem("decode", self.decode, remedy)
        lengths = [self.epochs, *(v.epochs for v in self.variants.values() if v.epochs)]
        yield from self.schedule.problems_in(min(lengths))

    def _denoiser_problems(self) -> Iterator[Problem]:
        if not all(o.is_denoiser for o in self.objectives()):
            return
        for key, value in (("val_eps", self.val_eps), ("label_smoothing", self.label_smoothing)):
            if value:
                remedy = "would be ignored: a denoiser has no classes; leave it out"
                yield Problem(key, f"{value:g}", remedy)

    def _validation_problems(self) -> Iterator[Problem]:
        if self.val_attack != "train":
            return
        plain = [o.kind for o in self.objectives() if o.attack_eps is None]
        # Without val_eps, a model without a training attack is not attacked in validation either.
        if plain and (self.val_eps or len(plain) == len(self.objectives())):
            remedy = f"does not exist: {plain[0]} has no training attack; choose pgd or apgd-ce"
            yield Problem("val_attack", "train", remedy)
