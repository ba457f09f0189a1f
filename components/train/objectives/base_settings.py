"""Base classes of the settings of training objectives."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from annotated_types import Ge

from components.attacks.settings import FeatureDistance, ScaleAscentSettings, ScaleObjective
from components.core.pass_counts import CLEAN, NO_PASSES, TRAINED, PassCounts, ascent
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

    # Costs, known before anything runs

    def epoch_counts(self, epoch: int, *, num_steps: int) -> PassCounts:
        """Passes of a training item in an epoch of so many steps, on average over the steps."""
        return TRAINED

    def search_counts(self, epoch: int, *, num_steps: int, batch_size: int) -> PassCounts:
        """Passes before the steps of an epoch, for all items together."""
        return NO_PASSES

    def validation_counts(self) -> PassCounts:
        """Passes of a validation item that is not attacked."""
        return CLEAN

    def craft_counts(self) -> PassCounts:
        """Passes of an item that the training attack changes, at full epsilon."""
        return NO_PASSES


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

    def epoch_counts(self, epoch: int, *, num_steps: int) -> PassCounts:
        if self.aas and self.aas.mode == "replace" and self._searches(epoch):
            return NO_PASSES  # the scales change instead of the weights
        attacked = self._attacked_share(epoch, num_steps)
        outer = self.outer_counts(attacked) + self.look_counts(num_steps)
        repeats = 2 if self.awp and epoch >= self.awp.start_epoch else 1
        return attacked * self.craft_counts() + repeats * outer

    def outer_counts(self, attacked: float) -> PassCounts:
        """Passes of the loss and its gradient, where this share of the steps is attacked."""
        return TRAINED

    def look_counts(self, num_steps: int) -> PassCounts:
        """Passes that measure the training, on average over so many steps."""
        return NO_PASSES

    def craft_counts(self) -> PassCounts:
        return ascent(self.num_steps)

    def search_counts(self, epoch: int, *, num_steps: int, batch_size: int) -> PassCounts:
        own = self.aas
        if own is None or not self._searches(epoch):
            return NO_PASSES
        num_batches = min(num_steps, own.max_batches or num_steps)
        num_items = num_batches * min(own.batch_size, batch_size)
        return num_items * (CLEAN + ascent(own.num_steps))

    def _searches(self, epoch: int) -> bool:
        return self.aas is not None and epoch > 0 and epoch % self.aas.every == 0

    def _attacked_share(self, epoch: int, num_steps: int) -> float:
        """Share of the steps of an epoch whose epsilon is not 0: the others skip the attack."""
        if self.eps_at(epoch) > 0:
            return 1.0
        if self.eps_per == "epoch":
            return 0.0
        clean = sum(self.eps_at(epoch + step / num_steps) == 0 for step in range(num_steps))
        return 1 - clean / num_steps

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

    def look_counts(self, num_steps: int) -> PassCounts:
        if self.clean_forward == "train_stats":
            return CLEAN
        looks = -(-num_steps // self.clean_every) if self.clean_forward == "no_grad_eval" else 0
        return 2 * looks / num_steps * CLEAN


@settings
class TwoTermSettings(AdversarialSettings):
    """A loss of clean predictions plus a robust term, as in TRADES and MART."""

    beta: NonNegative = 6.0
    """Weight of the robust term."""
    passes: Literal["auto", "joint", "separate"] = "auto"
    """Clean and attacked images in one forward pass or two; `auto`: two if the network has batch
    statistics."""

    def outer_counts(self, attacked: float) -> PassCounts:
        return 2 * TRAINED
