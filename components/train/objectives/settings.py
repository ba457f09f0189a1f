"""Settings of the training objectives.

To add one, write its settings class here, registered with its implementation.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self, Union

from annotated_types import Ge, Le

from components.attacks.settings import FeatureDistance, ScaleAscentSettings, ScaleObjective
from components.core.registry import Registry
from components.core.settings import (
    ByKind,
    Count,
    NonNegative,
    Pixels,
    Positive,
    PositivePixels,
    Problem,
    Settings,
    default_of,
    settings,
)
from components.core.user_code import UserEntry
from components.denoising.levels import certain_levels
from components.denoising.settings import DenoiserName
from components.train.schedules import epsilon_at

if TYPE_CHECKING:
    from components.train.settings import TrainSettings

Epochs = Annotated[int, Ge(0)]
OBJECTIVES = Registry("objective")


class TrainingObjectiveSettings(Settings):
    """Base of all objective settings: the features that other parts of a recipe depend on.

    Every property defaults to an objective without the feature.
    """

    __slots__ = ()

    kind: str

    @property
    def attack_eps(self) -> float | None:
        """Final epsilon of the training attack; None: images are not attacked."""
        return None

    @property
    def attack_warmup_epochs(self) -> int:
        """Epochs until the training attack has its final epsilon."""
        return 0

    @property
    def noise_sigma(self) -> float | None:
        """Standard deviation of the Gaussian noise that a classifier is trained on."""
        return None

    @property
    def is_denoiser(self) -> bool:
        """Whether the model estimates images instead of classifying them."""
        return False

    @property
    def denoiser_name(self) -> str | None:
        """The denoiser in front of the trained classifier."""
        return None

    def certain_levels(self) -> tuple[float, float] | None:
        """First and last sigma that a denoiser's schedule certainly covers; None: unknown."""
        return None

    @property
    def scales_attention(self) -> bool:
        """Whether training needs a network with attention modules that can be scaled."""
        return False

    def never_used(self, epochs: int) -> Iterator[tuple[str, str]]:
        """(field, message) of parts that would not start within this many epochs."""
        return iter(())

    def max_sigma(self) -> float:
        """The strongest noise that a denoiser is trained on; 0: as in its schedule."""
        return 0.0

    def trained_ablation(self) -> tuple[str, int] | None:
        """The kind of certificate and the visible side in pixels that the model is trained for."""
        return None

    def training_problems(self, train: "TrainSettings") -> Iterator[Problem]:
        """Values of the train section that do not fit this objective."""
        return iter(())


@OBJECTIVES.register("components.train.objectives.standard:Standard")
@settings
class StandardSettings(TrainingObjectiveSettings):
    """Cross-entropy, or binary cross-entropy per class, on clean images."""

    kind: Literal["standard"] = "standard"
    criterion: Literal["ce", "bce"] = "ce"
    """Cross-entropy, or binary cross-entropy per class."""


@settings
class AwpSettings(Settings):
    """Adversarial weight perturbation around the objective (Wu et al. 2020)."""

    gamma: Positive = 0.005
    """Size of the perturbation relative to the norm of the weights."""
    start_epoch: Epochs = 0
    """First epoch with perturbed weights."""


@settings
class AasTrainingSettings(Settings):
    """Adversarial attention scales, searched every few epochs (Jain & Dutta, sec. 5)."""

    every: Count = 10
    """Epochs between searches."""
    mode: Literal["replace", "augment"] = "replace"
    """`augment`: the weights are also trained in epochs with a search."""
    max_batches: Count | None = None
    """Batches of a search; None: all of the epoch."""
    objective: ScaleObjective = default_of(ScaleAscentSettings, "objective")
    """What the scales increase."""
    distance: FeatureDistance = default_of(ScaleAscentSettings, "distance")
    """How distances of features are measured."""
    num_steps: Count = default_of(ScaleAscentSettings, "num_steps")
    """Ascent steps of a search."""
    step_size: Positive = default_of(ScaleAscentSettings, "step_size")
    """Length of an ascent step."""
    noise: Positive = default_of(ScaleAscentSettings, "noise")
    """Standard deviation of a draw of the scales."""
    batch_size: Count = default_of(ScaleAscentSettings, "batch_size")
    """Items of each batch that a search uses."""


@settings
class AdversarialSettings(TrainingObjectiveSettings):
    """Base of the settings of objectives with a training attack."""

    kind: str
    eps: PositivePixels
    """Final l-inf budget of the training attack."""
    num_steps: Count = 10
    """Steps of the training attack."""
    step_size: PositivePixels | None = None
    """None: 1.5 eps / num_steps."""
    step_rule: Literal["fixed", "proportional"] = "fixed"
    """The step size while eps warms up."""
    start: Literal["uniform", "normal"] = "uniform"
    """Start of the attack: uniform in the ball, or a small normal step (as in TRADES)."""
    eps_warmup_epochs: Epochs = 0
    """Epochs until eps has its final value."""
    eps_zero_epochs: Epochs = 0
    """Epochs with eps 0 at the beginning of the warm-up."""
    eps_shape: Literal["linear", "sine"] = "linear"
    """Shape of the rise of eps."""
    eps_per: Literal["epoch", "step"] = "epoch"
    """How often eps rises."""
    awp: AwpSettings | None = None
    """Adversarial weight perturbation."""
    aas: AasTrainingSettings | None = None
    """Adversarial attention scales."""

    def problems(self) -> Iterator[Problem]:
        if self.eps_zero_epochs and self.eps_zero_epochs >= self.eps_warmup_epochs:
            remedy = f"leaves no room in eps_warmup_epochs: {self.eps_warmup_epochs}"
            yield Problem("eps_zero_epochs", self.eps_zero_epochs, remedy)

    @property
    def attack_eps(self) -> float:
        return self.eps

    @property
    def attack_warmup_epochs(self) -> int:
        return self.eps_warmup_epochs

    @property
    def scales_attention(self) -> bool:
        return self.aas is not None

    def never_used(self, epochs: int) -> Iterator[tuple[str, str]]:
        if self.awp and self.awp.start_epoch >= epochs:
            yield "awp.start_epoch", "weights are never perturbed"
        if self.aas and self.aas.every >= epochs:
            yield "aas.every", "attention scales are never searched"

    def eps_at(self, epoch: float) -> float:
        """Epsilon after `epoch` epochs, which may be fractional."""
        return epsilon_at(
            epoch,
            final=self.eps,
            warmup_epochs=self.eps_warmup_epochs,
            zero_epochs=self.eps_zero_epochs,
            shape=self.eps_shape,
        )

    def without_warmup(self, eps: float) -> Self:
        """The same settings with another epsilon that holds from the first step on."""
        return replace(self, eps=eps, eps_warmup_epochs=0, eps_zero_epochs=0, eps_per="epoch")

    def training_problems(self, train: "TrainSettings") -> Iterator[Problem]:
        if self.awp and train.micro_batch is not None:
            remedy = "cannot be combined with awp, whose step belongs to the whole batch"
            yield Problem("micro_batch", train.micro_batch, remedy)
        if self.awp and train.precision == "fp16":
            yield Problem("precision", "fp16", "loses the gradients that awp follows; use bf16")


@settings
class AttackedSettings(AdversarialSettings):
    """Cross-entropy on attacked images alone."""

    attack_target: Literal["hard", "soft"] = "hard"
    """Which labels of mixed images the attack sees."""
    clean_forward: Literal["none", "no_grad_eval", "train_stats"] = "no_grad_eval"
    """`none`; `no_grad_eval`: measure clean accuracy now and then; `train_stats`: running
    statistics see clean images too."""
    clean_every: Count = 20
    """Steps between measurements of clean accuracy."""


@OBJECTIVES.register("components.train.objectives.adversarial:AdversarialTraining")
@settings
class FgsmTrainingSettings(AttackedSettings):
    """Adversarial training with 1 or 2 FGSM steps (Debenedetti et al. 2022, sec. 4)."""

    kind: Literal["fgsm"] = "fgsm"  # type: ignore[assignment]
    num_steps: Annotated[int, Ge(1), Le(10)] = 1
    """Steps of the training attack."""


@OBJECTIVES.register("components.train.objectives.adversarial:AdversarialTraining")
@settings
class PgdTrainingSettings(AttackedSettings):
    """Adversarial training with many small steps (Madry et al. 2018)."""

    kind: Literal["pgd"] = "pgd"  # type: ignore[assignment]


@OBJECTIVES.register("components.train.objectives.trades:Trades")
@settings
class TradesSettings(AdversarialSettings):
    """Clean loss plus divergence between clean and attacked predictions (Zhang et al. 2019)."""

    kind: Literal["trades"] = "trades"  # type: ignore[assignment]
    beta: NonNegative = 6.0
    """Weight of the divergence."""
    passes: Literal["auto", "joint", "separate"] = "auto"
    """Clean and attacked images in one forward pass or two; `auto`: two if the network has batch
    statistics."""


@OBJECTIVES.register("components.train.objectives.mart:Mart")
@settings
class MartSettings(AdversarialSettings):
    """Adversarial training that up-weights misclassified examples (Wang et al. 2020)."""

    kind: Literal["mart"] = "mart"  # type: ignore[assignment]
    beta: NonNegative = 6.0
    """Weight of the robust part of the loss."""
    passes: Literal["auto", "joint", "separate"] = "auto"
    """Clean and attacked images in one forward pass or two; `auto`: two if the network has batch
    statistics."""

    def training_problems(self, train: "TrainSettings") -> Iterator[Problem]:
        soft = "makes soft labels, which mart cannot weigh"
        if train.augment.mixes:
            yield Problem("augment", "", f"{soft}; turn mixup and cutmix off")
        if train.label_smoothing:
            yield Problem("label_smoothing", f"{train.label_smoothing:g}", f"{soft}; leave it out")
        yield from AdversarialSettings.training_problems(self, train)


@OBJECTIVES.register("components.train.objectives.ablation:AblationTraining")
@settings
class ColumnsTrainingSettings(TrainingObjectiveSettings):
    """Training on column ablations (Salman et al. 2022, sec. 2)."""

    kind: Literal["columns"] = "columns"
    band: Count
    """Width of the visible column in pixels."""

    @property
    def ablation(self) -> "AblationTrainingSettings":
        """The same training as settings of the general objective."""
        return AblationTrainingSettings(shape="column", size=self.band, position="batch")

    def trained_ablation(self) -> tuple[str, int]:
        return self.ablation.trained_ablation()

    def lengths(self) -> Iterator[tuple[str, int]]:
        yield "band", self.band


@OBJECTIVES.register("components.train.objectives.ablation:AblationTraining")
@settings
class AblationTrainingSettings(TrainingObjectiveSettings):
    """Training on ablations of any shape, at one place per batch or per image."""

    kind: Literal["ablation"] = "ablation"
    shape: Literal["column", "row", "block"] = "column"
    """Shape of the visible part."""
    size: Count
    """Pixels on the visible side."""
    position: Literal["batch", "image"] = "batch"
    """One place per batch, or one per image."""

    @property
    def ablation(self) -> "AblationTrainingSettings":
        return self

    def trained_ablation(self) -> tuple[str, int]:
        return f"{self.shape}s", self.size

    def lengths(self) -> Iterator[tuple[str, int]]:
        yield "size", self.size


@OBJECTIVES.register("components.train.objectives.noise:GaussianNoise")
@settings
class GaussianTrainingSettings(TrainingObjectiveSettings):
    """Training on Gaussian noise (Cohen et al. 2019, sec. 3.3)."""

    kind: Literal["gaussian"] = "gaussian"
    sigma: PositivePixels
    """Standard deviation of the noise."""

    @property
    def noise_sigma(self) -> float:
        return self.sigma


@OBJECTIVES.register("components.train.objectives.denoiser:DenoiserTraining")
@settings
class DenoiserTrainingSettings(TrainingObjectiveSettings):
    """Noise prediction at the noise levels of certification (Carlini et al. 2023, 5.2)."""

    kind: Literal["denoiser"] = "denoiser"
    sigmas: tuple[PositivePixels, ...] = ()
    """Sigmas that certificates will use."""
    range: tuple[Pixels, Pixels] | None = None
    """Lowest and highest sigma; write this, `sigmas` or `full`."""
    full: bool = False
    """Train on the whole schedule, as for a model that generates images."""
    schedule: Literal["cosine", "linear", "pretrained"] = "cosine"
    """`pretrained`: the schedule of model.pretrained."""
    num_timesteps: Annotated[int, Ge(10)] = 4000
    """Omit with schedule `pretrained`."""
    sampling: Literal["sigma", "timestep"] = "sigma"
    """What is drawn uniformly from a range."""

    def problems(self) -> Iterator[Problem]:
        if bool(self.sigmas) + (self.range is not None) + self.full != 1:
            remedy = "give exactly one of sigmas: [0.25], range: [0, 1.0] and full: true"
            yield Problem("", "", remedy)
        if self.range is not None and self.range[0] >= self.range[1]:
            yield Problem("range", list(self.range), "must rise, e.g. [0, 1.0]")

    @property
    def is_denoiser(self) -> bool:
        return True

    def certain_levels(self) -> tuple[float, float] | None:
        return certain_levels(self.schedule, self.num_timesteps)

    def max_sigma(self) -> float:
        return max([*self.sigmas, *(self.range or ())], default=0.0)

    def training_problems(self, train: "TrainSettings") -> Iterator[Problem]:
        if train.augment.mixes:
            remedy = "mixes the images that a denoiser learns; turn mixup and cutmix off"
            yield Problem("augment", "", remedy)


@OBJECTIVES.register("components.train.objectives.noise:DenoisedFineTuning")
@settings
class DenoisedTrainingSettings(TrainingObjectiveSettings):
    """Cross-entropy on denoised noisy images (Carlini et al. 2023, 4.1)."""

    kind: Literal["denoised"] = "denoised"
    sigma: PositivePixels
    """Standard deviation of the noise in front of the denoiser."""
    denoiser: DenoiserName
    """A model of this recipe, diffusers:PATH or model:PATH."""

    @property
    def noise_sigma(self) -> float:
        return self.sigma

    @property
    def denoiser_name(self) -> str:
        return self.denoiser


class UserObjectiveSettings(UserEntry, TrainingObjectiveSettings):
    """A user-defined objective, `kind: python:file.py:Name`."""


if TYPE_CHECKING:
    ObjectiveSettings = TrainingObjectiveSettings
else:
    ObjectiveSettings = Annotated[Union[(*OBJECTIVES.classes(), UserObjectiveSettings)], ByKind()]
