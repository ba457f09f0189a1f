"""Settings of l2 certificates by randomized smoothing, and of the attack that challenges them."""

from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt, MinLen

from components.certify.l2.reach import LEAST_UNIFORM, Method, draws_to_reach, reach
from components.certify.settings import CertificateSettings, ChallengeSettings
from components.core.settings import (
    Count,
    Positive,
    PositivePixels,
    Problem,
    Settings,
    default_of,
    settings,
)
from components.denoising.settings import (
    DenoiserName,
    HeunSettings,
    OneShotSettings,
    SamplerSettings,
)

USUAL_RADII = (0.25, 0.5, 0.75, 1.0)  # of published tables
ROUNDING = 1e-9  # closed forms may be off by the last digits; the exact test decides those
MAX_FAILURE_PROB = {"fixed": 1.0, "randomized": LEAST_UNIFORM, "sequential": 0.3}  # exclusive


@settings
class L2ChallengeSettings(ChallengeSettings):
    """An l2 attack on the smoothed classifier; a certified item that falls fails the stage."""

    eps: Positive
    num_items: Count = 20
    num_steps: Count = 10
    num_draws: Count = 16
    num_predict: Count = 1000


@settings
class GaussianSettings(CertificateSettings):
    """Randomized smoothing; defaults are the setting of Cohen et al. 2019, sec. 4."""

    kind: Literal["gaussian"] = "gaussian"
    model: str = "main"
    denoiser: DenoiserName | None = None
    """A model of this recipe, diffusers:PATH or model:PATH."""
    sampler: SamplerSettings = OneShotSettings()
    """How it denoises."""
    sigma: PositivePixels
    method: Method = "fixed"
    """`sequential`: an item is drawn until its radii are decided, at most `num_estimate` times.
    `randomized`: the randomized bound, slightly larger radii from as many draws as `fixed`."""
    num_select: Count = 100
    """n0: draws that choose the class."""
    num_estimate: Count = 100_000
    """n: draws that bound its probability."""
    failure_prob: Annotated[float, Gt(0), Lt(1)] = 0.001
    """alpha: probability that the certificate of one item is wrong."""
    radii: Annotated[tuple[Annotated[float, Ge(0)], ...], MinLen(1)] = ()
    """Declared before the first draw; left out: those of published tables that are certifiable.
    With `sequential`, radius 0 asks for a label at any distance."""
    look_every: Count = 64
    """Draws between looks (sequential)."""
    futility_prob: Annotated[float, Gt(0), Lt(0.3)] = 0.01
    """Probability of giving up wrongly (sequential)."""
    block_size: Count = 1_000
    """Draws per unit of work, at most."""
    micro_batch: Count = 100
    num_items: Count | None = None
    """The first test items; None: all."""
    challenge: L2ChallengeSettings | None = None

    def __post_init__(self) -> None:
        if not self.radii:
            most = self._reach_if_known()
            usual = tuple(radius for radius in USUAL_RADII if most is None or radius <= most)
            object.__setattr__(self, "radii", usual or USUAL_RADII[:1])
        Settings.__post_init__(self)

    def _reach_if_known(self) -> float | None:
        """The largest certifiable radius; None if a value is wrong, which is refused anyway."""
        try:
            return self.reach
        except (TypeError, ValueError, ArithmeticError, KeyError):
            return None

    @property
    def denoiser_name(self) -> str | None:
        return self.denoiser

    def max_votes(self, *, side: int) -> int:
        drawn = self.num_select + self.num_estimate
        return 0 if self.method == "sequential" else drawn  # those stop long before

    @property
    def reach(self) -> float:
        """The largest radius that this many draws can certify."""
        return reach(
            sigma=self.sigma, n=self.num_estimate, alpha=self.failure_prob, method=self.method
        )

    def problems(self) -> Iterator[Problem]:
        yield from self._method_problems()
        yield from self._sampler_problems()
        yield from self._radius_problems()
        if self.block_size % self.micro_batch:
            remedy = f"is not a multiple of micro_batch {self.micro_batch}"
            yield Problem("block_size", self.block_size, remedy)
        # PREDICT of unanimous draws has the p-value 2 / 2^n (Cohen et al. 2019, sec. 3.2).
        if self.challenge and 2 * 0.5**self.challenge.num_predict > self.failure_prob:
            remedy = (
                f"draws can never show a lead at failure_prob {self.failure_prob:g}: "
                "the challenge would pass whatever it finds"
            )
            yield Problem("challenge.num_predict", self.challenge.num_predict, remedy)

    def _method_problems(self) -> Iterator[Problem]:
        for name in ("look_every", "futility_prob"):
            value = getattr(self, name)
            if self.method != "sequential" and value != default_of(GaussianSettings, name):
                yield Problem(name, value, "applies to method sequential only")
        limit = MAX_FAILURE_PROB[self.method]
        if self.failure_prob >= limit:
            remedy = f"is too large: method {self.method} needs less than {limit:g}"
            yield Problem("failure_prob", self.failure_prob, remedy)
        if self.method != "sequential" and 0 in self.radii:
            yield Problem("radii", 0, "is not a distance; leave it out")

    def _sampler_problems(self) -> Iterator[Problem]:
        if self.denoiser is None and self.sampler != OneShotSettings():
            yield Problem("sampler", self.sampler.kind, "needs a denoiser; name one")
        if isinstance(self.sampler, HeunSettings) and self.sampler.last >= 2 * self.sigma:
            remedy = f"is not below {2 * self.sigma:g}, the level of sigma"
            yield Problem("sampler.last", self.sampler.last, remedy)

    def _radius_problems(self) -> Iterator[Problem]:
        """Radii that no votes could certify."""
        if self.failure_prob >= MAX_FAILURE_PROB[self.method]:
            return  # reported already, and no radius is certifiable with it
        if self.reach == 0:  # even draws that all agree leave the bound at 1/2 or below
            needed = self._draws_for(self.sigma * ROUNDING)
            raised = f"num_estimate to {needed} or failure_prob" if needed else "failure_prob"
            remedy = (
                f"draws with failure_prob {self.failure_prob} can never certify anything; "
                f"raise {raised}"
            )
            yield Problem("num_estimate", self.num_estimate, remedy)
            return
        for radius in self.radii:
            if radius > self.reach * (1 + ROUNDING):
                needed = self._draws_for(radius)
                raised = f"raise num_estimate to {needed} or" if needed else "raise sigma or"
                remedy = (
                    f"is above {self.reach:.4f}, the most that {self.num_estimate} draws of sigma "
                    f"{self.sigma:g} certify; {raised} drop it"
                )
                yield Problem("radii", f"{radius:g}", remedy)

    def _draws_for(self, radius: float) -> int | None:
        return draws_to_reach(radius, sigma=self.sigma, alpha=self.failure_prob, method=self.method)
