"""Settings of all attacks; defaults are the published ones, with the paper at each implementation.

An attack is called with these settings and a budget: a norm and an eps in pixels on [0, 1].
To add one, write its settings class here, registered with its implementation.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, Le

from components.attacks.base_settings import AttackSettings, GradientSettings
from components.core.pass_counts import CLEAN, PassCounts, ascent
from components.core.registry import Registry
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

Surrogate = Literal["network", "gradient"]
ScaleObjective = Literal["lpips", "ce", "margin", "gama"]
FeatureDistance = Literal["unit", "eq3_squared", "eq3_literal"]
AutoAttackVersion = Literal["standard", "plus", "rand"]
ATTACKS = Registry("attack")


@ATTACKS.register("components.attacks.gradient:Fgsm")
@settings
class FgsmSettings(GradientSettings):
    """One or few large sign steps from a random start."""

    weak_alone = True

    kind: Literal["fgsm"] = "fgsm"
    num_steps: Count = 1
    """Sign steps."""
    step_size: Budget | None = None
    """None: 1.5 eps / num_steps."""
    random_start: bool = True
    """Start at a random point of the ball instead of the image."""

    @property
    def name(self) -> str:
        return "fgsm" if self.num_steps == 1 else f"fgsm-{self.num_steps}"

    def step_size_at(self, eps: float) -> float:
        return 1.5 * eps / self.num_steps if self.step_size is None else self.step_size


@ATTACKS.register("components.attacks.gradient:Pgd")
@settings
class PgdSettings(GradientSettings):
    """Projected gradient ascent that keeps every misclassified point."""

    fewest_steps = 10

    kind: Literal["pgd"] = "pgd"
    loss: Literal["ce", "margin", "dlr", "kl"] = "ce"
    """`margin` is the objective of Carlini & Wagner."""
    num_steps: Count = 20
    """Steps of each start."""
    step_size: Budget | None = None
    """None: eps / 4, which explores the ball in 20 steps."""
    num_restarts: Count = 1
    """Starts of each item."""
    random_start: bool = True
    """Start at a random point of the ball instead of the image."""
    kappa: float | None = None
    """Lower clip of loss `margin`."""

    @property
    def name(self) -> str:
        return f"pgd-{self.num_steps}-{self.loss}"

    @property
    def min_classes(self) -> int:
        return 3 if self.loss == "dlr" else 2  # DLR ranks three logits

    def step_size_at(self, eps: float) -> float:
        return eps / 4 if self.step_size is None else self.step_size

    def weaknesses(self, eps: float | None) -> Iterator[Problem]:
        yield from AttackSettings.weaknesses(self, eps)
        if eps and self.step_size_at(eps) * self.num_steps < 2 * eps:
            step = f"{self.num_steps} steps of {self.step_size_at(eps):g}"
            yield Problem("step_size", step, "cannot cross the ball")

    def problems(self) -> Iterator[Problem]:
        if self.kappa is not None and self.loss != "margin":
            yield Problem("kappa", self.kappa, "would be ignored: loss is not margin")
        if not self.random_start and self.loss == "kl":
            yield Problem("random_start", False, "leaves loss kl with a zero gradient at x")
        if not self.random_start and self.num_restarts > 1:
            yield Problem("num_restarts", self.num_restarts, "repeats one fixed start")


@ATTACKS.register("components.attacks.gradient:Mim")
@settings
class MimSettings(GradientSettings):
    """Steps along an accumulated gradient."""

    kind: Literal["mim"] = "mim"
    num_steps: Count = 10
    """Steps with momentum."""
    step_size: Budget | None = None
    """None: eps / num_steps."""
    decay: NonNegative = 1.0
    """mu: weight of the previous direction."""
    random_start: bool = False
    """Start at a random point of the ball instead of the image."""

    @property
    def name(self) -> str:
        return f"mim-{self.num_steps}"

    def step_size_at(self, eps: float) -> float:
        return eps / self.num_steps if self.step_size is None else self.step_size


@ATTACKS.register("components.attacks.gradient:GamaPgd")
@settings
class GamaSettings(GradientSettings):
    """Margin of probabilities, first guided away from a reference prediction."""

    fewest_steps = 20

    kind: Literal["gama"] = "gama"
    num_steps: Count = 100
    """Steps of each start."""
    num_restarts: Count = 1
    """Random starts of each item."""
    reference: Literal["start", "clean"] = "start"
    """Reference prediction: at the start in the paper's code, at the clean image in its text."""

    @property
    def name(self) -> str:
        return f"gama-{self.num_steps}" + ("" if self.reference == "start" else "-clean")

    def step_size_at(self, eps: float) -> float:
        return 2 * eps


@ATTACKS.register("components.attacks.apgd:Apgd")
@settings
class ApgdSettings(AttackSettings):
    """APGD; AutoAttack starts once, papers that report APGD-CE alone often start five times."""

    fewest_steps = 20

    kind: Literal["apgd-ce", "apgd-dlr"] = "apgd-ce"
    num_steps: Count = 100
    """Steps of each start."""
    num_restarts: Count = 1
    """Random starts of each item."""
    rho: Share = 0.75
    """The step size is halved if at most this share of a window's steps increased the loss."""
    eot_iter: Count = 1
    """Number of gradients summed at each point, for randomized models."""

    def pass_counts(self, num_classes: int) -> PassCounts:
        return CLEAN + self.num_restarts * (ascent(self.num_steps * self.eot_iter) + CLEAN)

    @property
    def min_classes(self) -> int:
        return 3 if self.kind == "apgd-dlr" else 2  # DLR ranks three logits


@ATTACKS.register("components.attacks.apgd:ApgdTargeted")
@settings
class ApgdTargetedSettings(AttackSettings):
    """APGD towards one wrong class after the other."""

    kind: Literal["apgd-t"] = "apgd-t"
    num_targets: Count = 9
    """Most likely wrong classes that are targeted."""
    num_steps: Count = 100
    """Steps for each target class."""

    def pass_counts(self, num_classes: int) -> PassCounts:
        num_targets = min(self.num_targets, num_classes - 1)
        return CLEAN + num_targets * (ascent(self.num_steps) + CLEAN)

    @property
    def min_classes(self) -> int:
        return 4  # the targeted DLR ranks four logits


@ATTACKS.register("components.attacks.fab:Fab")
@settings
class FabSettings(AttackSettings):
    """The nearest misclassified point."""

    kind: Literal["fab"] = "fab"
    num_steps: Count = 100
    """Steps of each start."""
    num_restarts: Count = 1
    """Starts of each item."""
    alpha_max: Share = 0.1
    """The largest weight of the step from the clean image."""
    eta: Positive = 1.05
    """Overshoot beyond the linearised boundary."""
    beta: Share = 0.9
    """The share of a successful change that the next step starts from."""

    def pass_counts(self, num_classes: int) -> PassCounts:
        return CLEAN + self.num_restarts * self.run_counts(num_classes - 1)

    def run_counts(self, num_rivals: int) -> PassCounts:
        """Passes of one start: a pass, a gradient for each rival and a look, step after step."""
        steps = PassCounts(forward=2 * self.num_steps, to_pixels=self.num_steps * num_rivals)
        return steps + CLEAN


@ATTACKS.register("components.attacks.fab:FabTargeted")
@settings
class FabTargetedSettings(FabSettings):
    """The nearest point of one wrong class after the other."""

    kind: Literal["fab-t"] = "fab-t"  # type: ignore[assignment]
    num_targets: Count = 9
    """Most likely wrong classes that are targeted."""

    def pass_counts(self, num_classes: int) -> PassCounts:
        targets = min(self.num_targets, num_classes - 1)
        return CLEAN + targets * self.num_restarts * self.run_counts(1)


@ATTACKS.register("components.attacks.square:Square")
@settings
class SquareSettings(AttackSettings):
    """Random squares, without a gradient."""

    count_field = "num_queries"

    kind: Literal["square"] = "square"
    num_queries: Count = 5000
    """Queries of each item."""
    p_init: Annotated[float, Gt(0), Le(1)] = 0.8
    """Share of the pixels that the first squares cover."""

    def pass_counts(self, num_classes: int) -> PassCounts:
        return (2 + self.num_queries) * CLEAN  # the clean image and a start


@ATTACKS.register("components.attacks.spatial:SpatialGrid")
@settings
class SpatialSettings(AttackSettings):
    """The worst rotation and shift of a grid; goes with `norm: spatial`."""

    count_field = None
    norms = ("spatial",)

    kind: Literal["spatial"] = "spatial"
    max_shift: NonNegative = 3.0
    """Pixels."""
    num_shifts: Count = 5
    """Shifts along each axis, both ends included."""
    max_angle: NonNegative = 30.0
    """Degrees."""
    num_angles: Count = 31
    """Rotations between the largest ones, both included."""

    def pass_counts(self, num_classes: int) -> PassCounts:
        without_identity = self.num_shifts % 2 and self.num_angles % 2  # the clean pass covers it
        return (1 + self.num_shifts**2 * self.num_angles - without_identity) * CLEAN

    def problems(self) -> Iterator[Problem]:
        for name in ("max_shift", "max_angle"):
            if not math.isfinite(limit := getattr(self, name)):
                yield Problem(name, limit, "is not a limit; write a number >= 0")


Member = ApgdSettings | ApgdTargetedSettings | FabSettings | FabTargetedSettings | SquareSettings
# In the order of the published code. `rand` is for randomized models: each step sums 20 gradients.
AUTOATTACK: Mapping[AutoAttackVersion, tuple[Member, ...]] = {
    "standard": (ApgdSettings(), ApgdTargetedSettings(), FabTargetedSettings(), SquareSettings()),
    "plus": (
        ApgdSettings(num_restarts=5),
        ApgdSettings(kind="apgd-dlr", num_restarts=5),
        FabSettings(num_restarts=5),
        SquareSettings(),
        ApgdTargetedSettings(),
        FabTargetedSettings(),
    ),
    "rand": (ApgdSettings(eot_iter=20), ApgdSettings(kind="apgd-dlr", eot_iter=20)),
}


@ATTACKS.register("components.attacks.autoattack:AutoAttack")
@settings
class AutoAttackSettings(AttackSettings):
    """The published ensemble; fewer steps or queries make it weaker."""

    fewest_steps = 100

    kind: Literal["autoattack"] = "autoattack"
    version: AutoAttackVersion = "standard"
    """`standard`: APGD-CE, APGD-T, FAB-T, Square; `plus` adds restarts and untargeted attacks;
    `rand`: for randomized models."""
    num_steps: Count | None = None
    """None: 100, as published."""
    num_queries: Count | None = None
    """None: 5000, as published."""

    @property
    def min_classes(self) -> int:
        return max(member.min_classes for member in self.members())

    @property
    def name(self) -> str:
        return f"autoattack-{self.version}"

    def pass_counts(self, num_classes: int) -> PassCounts:
        return sum((member.pass_counts(num_classes) for member in self.members()), CLEAN)

    def members(self) -> tuple[Member, ...]:
        given = {"num_steps": self.num_steps, "num_queries": self.num_queries}
        changes: dict[str, Any] = {name: own for name, own in given.items() if own is not None}
        return tuple(
            replace(member, **{k: v for k, v in changes.items() if hasattr(member, k)})
            for member in AUTOATTACK[self.version]
        )

    @classmethod
    def from_suffix(cls, text: str) -> dict[str, object] | None:
        return {"version": text} if text in get_args(AutoAttackVersion) else None


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

    objective: ScaleObjective = "lpips"
    """What the scales increase: a distance of features (`lpips`) or a loss of the logits."""
    distance: FeatureDistance = "unit"
    """Feature distance of objective `lpips`; eq. 3 as printed decreases when features grow."""
    num_draws: Count = 3
    """Random starts; each gives one candidate."""
    num_steps: Count = 10
    """Ascent steps on the scales."""
    step_size: Positive = 1.0
    """Length of an ascent step."""
    noise: Positive = 1.0
    """Standard deviation of a draw; without noise the distance has no gradient."""
    num_items: Count = 64
    """Number of first test items to search on; the factors are fixed for the whole run."""
    batch_size: Count = 64
    """Items that a search uses."""

    def pass_counts(self) -> PassCounts:
        """Passes of each of its items: every draw looks once, then ascends."""
        return self.num_draws * (CLEAN + ascent(self.num_steps))


@ATTACKS.register("components.attacks.aas:ScaledAttack")
@settings
class AasSettings(AttackSettings):
    """Adaptive attention scaling around a gradient attack, always evaluated on the model itself."""

    kind: Literal["aas"] = "aas"
    inner: InnerSettings
    """The attack that is run on the network with scaled attention."""
    search: ScaleAscentSettings | None = ScaleAscentSettings()
    """How adversarial scales are found; None: only the fixed ones."""
    scales: tuple[Budget, ...] = (0.1, 0.01, 0.001)
    """Further candidates, each with one factor for all attention modules. Networks with searched
    factors often misclassify the clean images, which leaves no row to attack."""
    surrogate: Surrogate = "network"
    """`network`: attack the scaled network, evaluate on the original one; `gradient`: logits of the
    original network with gradients of the scaled one."""

    @property
    def name(self) -> str:
        return f"aas-{self.inner.name}"

    @property
    def num_candidates(self) -> int:
        """Sets of factors: those of the search, and the fixed ones."""
        return len(self.scales) + (self.search.num_draws if self.search else 0)

    def pass_counts(self, num_classes: int) -> PassCounts | None:
        """Passes of an item, without those of the search, which is made once for a model.

        The inner attack on the network and on each candidate, with two looks at both outcomes, and
        as many restarts as a control.
        """
        inner, count = self.inner.pass_counts(num_classes), self.num_candidates
        crafted = inner + CLEAN
        if self.surrogate == "gradient":  # each gradient passes forward through both networks
            crafted = inner + inner.to_pixels * CLEAN
        return inner + count * crafted + 2 * (count + 1) * CLEAN + (1 + count) * inner

    def most_evaluations(self, num_classes: int) -> int:
        return 0  # progress of a scaled attack counts items

    @property
    def min_classes(self) -> int:
        return self.inner.min_classes

    @property
    def base_attack(self) -> AttackSettings:
        return self.inner

    @property
    def scaling(self) -> "AasSettings":
        return self

    def weaknesses(self, eps: float | None) -> Iterator[Problem]:
        for found in self.inner.weaknesses(eps):
            yield found._replace(field=f"inner.{found.field}")

    def problems(self) -> Iterator[Problem]:
        if self.search is None and not self.scales:
            yield Problem("scales", [], "is empty and there is no search; set one of them")
