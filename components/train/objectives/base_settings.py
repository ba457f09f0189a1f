"""Base classes of the settings of training objectives."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from annotated_types import Ge

from components.attacks.settings import FeatureDistance, ScaleAscentSettings, ScaleObjective
from components.core.settings import (
    Count,
    NonNegative,
    Positive,
    PositivePixels,
    Problem,
    Settings,
    default_of,
    settings,
)
from components.train.schedules import epsilon_at

if TYPE_CHECKING:
    from components.train.settings import TrainSettings

Epochs = Annotated[int, Ge(0)]


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
        if self.aas and train.compiled:
            remedy = "cannot be combined with aas: compiled code does not apply its scales"
            yield Problem("compiled", "true", remedy)
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


@settings
class TwoTermSettings(AdversarialSettings):
    """A loss of clean predictions plus a robust term, as in TRADES and MART."""

    beta: NonNegative = 6.0
    """Weight of the robust term."""
    passes: Literal["auto", "joint", "separate"] = "auto"
    """Clean and attacked images in one forward pass or two; `auto`: two if the network has batch
    statistics."""
