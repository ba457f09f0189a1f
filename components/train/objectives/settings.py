"""Settings of the training objectives.

To add one, write its settings class here, registered with its implementation.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Union

from annotated_types import Ge, Le

from components.core.pass_counts import CLEAN, TRAINED, PassCounts
from components.core.registry import Registry
from components.core.settings import ByKind, Count, Pixels, PositivePixels, Problem, settings
from components.core.user_code import UserEntry
from components.denoising.levels import certain_levels
from components.denoising.settings import DenoiserName
from components.train.objectives.base_settings import (
    AdversarialSettings,
    AttackedSettings,
    TrainingObjectiveSettings,
    TwoTermSettings,
)

if TYPE_CHECKING:
    from components.train.settings import TrainSettings

OBJECTIVES = Registry("objective")


@OBJECTIVES.register("components.train.objectives.standard:Standard")
@settings
class StandardSettings(TrainingObjectiveSettings):
    """Cross-entropy, or binary cross-entropy per class, on clean images."""

    kind: Literal["standard"] = "standard"
    criterion: Literal["ce", "bce"] = "ce"
    """Cross-entropy, or binary cross-entropy per class."""


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
class TradesSettings(TwoTermSettings):
    """Clean loss plus divergence between clean and attacked predictions (Zhang et al. 2019)."""

    kind: Literal["trades"] = "trades"  # type: ignore[assignment]

    def craft_counts(self) -> PassCounts:
        return CLEAN + TwoTermSettings.craft_counts(self)  # the clean prediction comes first

    def outer_counts(self, attacked: float) -> PassCounts:
        return (1 + attacked) * TRAINED  # without an attack there is no second term


@OBJECTIVES.register("components.train.objectives.mart:Mart")
@settings
class MartSettings(TwoTermSettings):
    """Adversarial training that up-weights misclassified examples (Wang et al. 2020)."""

    kind: Literal["mart"] = "mart"  # type: ignore[assignment]

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

    def lengths(self) -> Iterator[tuple[str, int]]:
        yield "size", self.size

    def trained_ablation(self) -> tuple[str, int]:
        return f"{self.shape}s", self.size


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

    def validation_counts(self) -> PassCounts:
        if self.sigmas:
            return len(self.sigmas) * CLEAN
        return (3 if self.range is None else 2) * CLEAN  # at most: PROBES within the schedule

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
    """A user-defined objective, `kind: python:file.py:Name`.

    Its settings may have `epoch_counts`; without it a step costs as much as a plain one.
    """

    def epoch_counts(self, epoch: int, *, num_steps: int) -> PassCounts:
        own = getattr(self.settings, "epoch_counts", None)
        return TRAINED if own is None else own(epoch, num_steps=num_steps)


if TYPE_CHECKING:
    ObjectiveSettings = TrainingObjectiveSettings
else:
    ObjectiveSettings = Annotated[Union[(*OBJECTIVES.classes(), UserObjectiveSettings)], ByKind()]
