"""Settings of all attacks; defaults are the published ones, with the paper at each implementation.

An attack is called with these settings and a budget: a norm and an eps in pixels on [0, 1].
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Gt, Le

from components.core.settings import (
    Budget,
    ByKind,
    Count,
    NonNegative,
    Positive,
    Problem,
    Settings,
    Share,
    settings,
)


@settings
class FgsmSettings(Settings):
    """One or few large sign steps from a random start."""

    kind: Literal["fgsm"] = "fgsm"
    num_steps: Count = 1
    step_size: Budget | None = None
    """None: 1.5 eps / num_steps."""
    random_start: bool = True


@settings
class PgdSettings(Settings):
    """Projected gradient ascent that keeps every misclassified point."""

    kind: Literal["pgd"] = "pgd"
    loss: Literal["ce", "margin", "dlr", "kl"] = "ce"
    """`margin` is the objective of Carlini & Wagner."""
    num_steps: Count = 20
    step_size: Budget | None = None
    """None: eps / 4, which explores the ball in 20 steps."""
    num_restarts: Count = 1
    random_start: bool = True
    kappa: float | None = None
    """Clips loss `margin`."""

    def problems(self) -> Iterator[Problem]:
        if self.kappa is not None and self.loss != "margin":
            yield Problem("kappa", self.kappa, "would be ignored: loss is not margin")
        if not self.random_start and self.loss == "kl":
            yield Problem("random_start", False, "leaves loss kl with a zero gradient at x")
        if not self.random_start and self.num_restarts > 1:
            yield Problem("num_restarts", self.num_restarts, "repeats one fixed start")


@settings
class MimSettings(Settings):
    """Steps along an accumulated gradient."""

    kind: Literal["mim"] = "mim"
    num_steps: Count = 10
    step_size: Budget | None = None
    """None: eps / num_steps."""
    decay: NonNegative = 1.0
    """mu: the share of the last direction that is kept."""
    random_start: bool = False


@settings
class GamaSettings(Settings):
    """Margin of probabilities, guided away from a reference prediction first."""

    kind: Literal["gama"] = "gama"
    num_steps: Count = 100
    num_restarts: Count = 1
    reference: Literal["start", "clean"] = "start"
    """Whose prediction guides: the code of the paper takes the start, its text the clean image."""


@settings
class ApgdSettings(Settings):
    """APGD; AutoAttack starts once, what many papers call APGD-CE starts five times."""

    kind: Literal["apgd-ce", "apgd-dlr"] = "apgd-ce"
    num_steps: Count = 100
    num_restarts: Count = 1
    rho: Share = 0.75
    """The step size is halved if at most this share of a window's steps raised the loss."""
    eot_iter: Count = 1
    """Gradients that are summed at each point of a randomized model."""


@settings
class ApgdTargetedSettings(Settings):
    """APGD towards one wrong class after the other."""

    kind: Literal["apgd-t"] = "apgd-t"
    num_targets: Count = 9
    num_steps: Count = 100


@settings
class FabSettings(Settings):
    """The nearest misclassified point."""

    kind: Literal["fab"] = "fab"
    num_steps: Count = 100
    num_restarts: Count = 1
    alpha_max: Share = 0.1
    eta: Positive = 1.05
    beta: Share = 0.9


@settings
class FabTargetedSettings(FabSettings):
    """The nearest point of one wrong class after the other."""

    kind: Literal["fab-t"] = "fab-t"  # type: ignore[assignment]
    num_targets: Count = 9


@settings
class SquareSettings(Settings):
    """Random squares, without a gradient."""

    kind: Literal["square"] = "square"
    num_queries: Count = 5000
    p_init: Annotated[float, Gt(0), Le(1)] = 0.8
    """Share of the pixels that the first squares cover."""


@settings
class SpatialSettings(Settings):
    """The worst rotation and shift of a grid; goes with `norm: spatial`."""

    kind: Literal["spatial"] = "spatial"
    max_shift: NonNegative = 3.0
    """Pixels."""
    num_shifts: Count = 5
    max_angle: NonNegative = 30.0
    """Degrees."""
    num_angles: Count = 31


@settings
class AutoAttackSettings(Settings):
    """The published ensemble; fewer steps or queries make it weaker."""

    kind: Literal["autoattack"] = "autoattack"
    version: Literal["standard", "plus", "rand"] = "standard"
    num_steps: Count | None = None
    """None: 100, as published."""
    num_queries: Count | None = None
    """None: 5000, as published."""


InnerSettings = Annotated[
    FgsmSettings
    | PgdSettings
    | MimSettings
    | GamaSettings
    | ApgdSettings
    | ApgdTargetedSettings
    | FabSettings
    | FabTargetedSettings,
    ByKind(),
]


@settings
class ScaleAscentSettings(Settings):
    """Factors on attention logits found by gradient ascent (Jain & Dutta, Algorithm 1)."""

    objective: Literal["lpips", "ce", "margin", "gama"] = "lpips"
    distance: Literal["unit", "eq3_squared", "eq3_literal"] = "unit"
    """Of objective `lpips`; eq. 3 as printed falls when features grow."""
    num_draws: Count = 3
    """Random starts; each gives one candidate."""
    num_steps: Count = 10
    step_size: Positive = 1.0
    noise: Positive = 1.0
    num_items: Count = 64
    """The first test items: the factors are fixed for the whole run."""
    batch_size: Count = 64


@settings
class AasSettings(Settings):
    """Adaptive attention scaling around a gradient attack, always replayed on the model itself."""

    kind: Literal["aas"] = "aas"
    inner: InnerSettings
    search: ScaleAscentSettings | None = ScaleAscentSettings()
    scales: tuple[Budget, ...] = (0.1, 0.01, 0.001)
    """Further candidates, each the same factor in every attention module. Searched ones alone often
    leave nothing to attack."""
    surrogate: Literal["network", "gradient"] = "network"

    def problems(self) -> Iterator[Problem]:
        if self.search is None and not self.scales:
            yield Problem("scales", [], "is empty and there is no search; set one of them")


AttackSettings = (
    FgsmSettings
    | PgdSettings
    | MimSettings
    | GamaSettings
    | ApgdSettings
    | ApgdTargetedSettings
    | FabSettings
    | FabTargetedSettings
    | SquareSettings
    | SpatialSettings
    | AutoAttackSettings
    | AasSettings
)
