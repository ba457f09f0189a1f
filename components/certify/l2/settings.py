"""Settings of l2 certificates by randomized smoothing, and of the attack that challenges them."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt, MinLen

from components.certify.l2.radius import (
    LEAST_UNIFORM,
    Method,
    draws_to_certify,
    max_certifiable_radius,
)
from components.certify.settings import (
    FAMILIES,
    CertificateSettings,
    ChallengeSettings,
    ClaimSettings,
    MicroBatch,
    TrainedModel,
    Warned,
)
from components.core.noise_streams import NoiseChoice, noise_impl
from components.core.settings import (
    EAGER,
    FLOAT32,
    Count,
    Later,
    Positive,
    PositivePixels,
    Precision,
    Problem,
    Settings,
    default_of,
    settings,
)
from components.denoising.settings import (
    DenoiserName,
    HeunSettings,
    OneShotSettings,
    SamplerBase,
    SamplerSettings,
)
from components.train.objectives.settings import (
    DenoisedTrainingSettings,
    DenoiserTrainingSettings,
    GaussianTrainingSettings,
    ObjectiveSettings,
)

L2_BOUND_VERSION = 2  # version of the bound of l2 certificates, part of their fingerprints
FailureProb = Annotated[float, Gt(0), Lt(1)]
Radii = Annotated[tuple[Annotated[float, Ge(0)], ...], MinLen(1)]
USUAL_RADII = (0.25, 0.5, 0.75, 1.0)  # of published tables
ROUNDING = 1e-9  # closed forms may be off in the last digits; the exact test decides
MAX_FAILURE_PROB = {"fixed": 1.0, "randomized": LEAST_UNIFORM, "sequential": 0.3}  # exclusive


@settings
class L2ChallengeSettings(ChallengeSettings):
    """An l2 attack on the smoothed classifier; a broken certified item fails the stage."""

    eps: Positive
    """l2 budget; items with at least this certified radius are attacked."""
    num_items: Count = 20
    """Items that are attacked, at most."""
    num_steps: Count = 10
    """Steps of the attack."""
    num_draws: Count = 16
    """Noisy copies whose mean loss gives each gradient."""
    num_predict: Count = 1000
    """Draws of the prediction at the attacked point."""


@FAMILIES.register("components.certify.l2.family:GaussianFamily")
@settings
class GaussianSettings(CertificateSettings):
    """Randomized smoothing; defaults are the setting of Cohen et al. 2019, sec. 4."""

    smoke_caps: ClassVar[dict[str, int]] = {
        **{"num_select": 20, "num_estimate": 200, "block_size": 100, "num_predict": 50},
    }

    kind: Literal["gaussian"] = "gaussian"
    model: str = "main"
    """The recipe's model that is smoothed."""
    denoiser: DenoiserName | None = None
    """A model of this recipe, diffusers:PATH or model:PATH."""
    sampler: SamplerSettings = OneShotSettings()
    """Sampler of the denoiser."""
    sigma: PositivePixels
    """Standard deviation of the noise."""
    method: Method = "fixed"
    """`sequential`: an item is drawn until its radii are decided, at most `num_estimate` times.
    `randomized`: the randomized bound, slightly larger radii from as many draws as `fixed`."""
    num_select: Count = 100
    """n0: draws that choose the class."""
    num_estimate: Count = 100_000
    """n: draws that bound its probability."""
    failure_prob: FailureProb = 0.001
    """alpha: probability that the certificate of one item is wrong."""
    radii: Radii = ()
    """Declared before the first draw; default: those of published tables that are certifiable.
    With `sequential`, radius 0 certifies a label without a distance."""
    look_every: Count = 64
    """Draws between looks (sequential)."""
    futility_prob: Annotated[float, Gt(0), Lt(0.3)] = 0.01
    """Probability of giving up a certifiable radius (sequential)."""
    block_size: Count = 1_000
    """Maximum number of draws per unit of work."""
    micro_batch: MicroBatch = 100
    """Noisy copies in one forward pass; `auto`: measured by the first worker."""
    noise: Annotated[NoiseChoice, Later()] = "auto"
    """Generator of the draws: `numpy` on the host, `philox` on the device of the model; `auto`:
    numpy on CPUs, philox on GPUs. Recorded with the votes."""
    precision: Annotated[Precision, Later()] = FLOAT32
    """Precision of the classifier that is certified. `auto`: tf32 on GPUs that have it, else
    float32. Certificates hold for the classifier in this precision and name it."""
    compiled: Annotated[bool, Later()] = EAGER
    """Compile networks with torch.compile; a failure is told. Recorded with the votes."""
    num_items: Count | None = None
    """Number of test items, from the first; None: all."""
    challenge: L2ChallengeSettings | None = None
    """An attack inside the claimed radius; a certified item that it breaks fails the stage."""

    def __post_init__(self) -> None:
        if not self.radii:
            most = self._max_radius_if_known()
            usual = tuple(radius for radius in USUAL_RADII if most is None or radius <= most)
            object.__setattr__(self, "radii", usual or USUAL_RADII[:1])
        Settings.__post_init__(self)

    def _max_radius_if_known(self) -> float | None:
        """The largest certifiable radius; None if a value is invalid, which is reported anyway."""
        try:
            return self.max_certifiable_radius
        except (TypeError, ValueError, ArithmeticError, KeyError):
            return None

    @property
    def denoiser_name(self) -> str | None:
        return self.denoiser

    @property
    def noise_sigma(self) -> float:
        return self.sigma

    @property
    def denoising_sampler(self) -> SamplerBase | None:
        return self.sampler if self.denoiser else None

    def max_votes(self, *, side: int) -> int:
        drawn = self.num_select + self.num_estimate
        return 0 if self.method == "sequential" else drawn  # unknown: items stop early

    @property
    def max_certifiable_radius(self) -> float:
        """The largest radius that this many draws can certify."""
        return max_certifiable_radius(
            sigma=self.sigma, n=self.num_estimate, alpha=self.failure_prob, method=self.method
        )

    def device_problems(self, device: str) -> Iterator[Problem]:
        if device == "cpu" and self.precision == "tf32":
            remedy = "needs GPUs; set cluster.gpus_per_actor, or use float32"
            yield Problem("precision", self.precision, remedy)

    def problems(self) -> Iterator[Problem]:
        yield from self._method_problems()
        yield from self._sampler_problems()
        yield from self._radius_problems()
        if self.micro_batch != "auto" and self.block_size % self.micro_batch:
            remedy = f"is not a multiple of micro_batch {self.micro_batch}"
            yield Problem("block_size", self.block_size, remedy)
        # PREDICT of unanimous draws has the p-value 2 / 2^n (Cohen et al. 2019, sec. 3.2).
        if self.challenge and 2 * 0.5**self.challenge.num_predict > self.failure_prob:
            remedy = (
                f"draws can never show a lead at failure_prob {self.failure_prob:g}: "
                "the challenge would always pass"
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
        """Radii that this number of draws cannot certify."""
        if self.failure_prob >= MAX_FAILURE_PROB[self.method]:
            return  # reported already, and no radius is certifiable with it
        # Even draws that all agree may leave the bound at 1/2 or below.
        if self.max_certifiable_radius == 0:
            needed = self._draws_for(self.sigma * ROUNDING)
            raised = f"num_estimate to {needed} or failure_prob" if needed else "failure_prob"
            remedy = (
                f"draws with failure_prob {self.failure_prob} can never certify anything; "
                f"raise {raised}"
            )
            yield Problem("num_estimate", self.num_estimate, remedy)
            return
        most = self.max_certifiable_radius
        for radius in self.radii:
            if radius > most * (1 + ROUNDING):
                needed = self._draws_for(radius)
                raised = f"raise num_estimate to {needed} or" if needed else "raise sigma or"
                remedy = (
                    f"is above {most:.4f}, the most that {self.num_estimate} draws of sigma "
                    f"{self.sigma:g} certify; {raised} drop it"
                )
                yield Problem("radii", f"{radius:g}", remedy)

    def _draws_for(self, radius: float) -> int | None:
        return draws_to_certify(
            radius, sigma=self.sigma, alpha=self.failure_prob, method=self.method
        )

    def _formula(self) -> dict[str, object]:
        found: dict[str, Any] = {"bound": L2_BOUND_VERSION}
        if self.method != "fixed":  # whose draws are those of the first version
            found["noise_impl"] = noise_impl(self.method)
        return found

    def warnings(self, trained: TrainedModel) -> Iterator[Warned]:
        if trained.denoiser_objective is not None:
            yield from self._level_warnings(trained.denoiser_objective)
        if trained.objective is not None:
            yield from self._noise_warnings(trained.objective)
        if self.challenge and self.challenge.eps > self.max_certifiable_radius:
            text = "is above the largest certifiable radius: no certified item is challenged"
            yield Warned("challenge.eps", text)

    def _noise_warnings(self, objective: ObjectiveSettings) -> Iterator[Warned]:
        """Warnings if the classifier sees different images in certification than in training."""
        behind = self.denoiser is not None
        if not isinstance(objective, GaussianTrainingSettings | DenoisedTrainingSettings):
            if not behind:
                text = f"{self.model} was not trained on Gaussian noise: expect many abstentions"
                yield Warned("model", text)
        elif isinstance(objective, DenoisedTrainingSettings) and not behind:
            yield Warned("denoiser", f"is not set, but {self.model} was trained behind one")
        elif isinstance(objective, GaussianTrainingSettings) and behind:
            text = f"removes the noise that {self.model} was trained on"
            yield Warned("denoiser", text)
        elif objective.sigma != self.sigma:
            text = f"{self.sigma:g} differs from the training sigma {objective.sigma:g}"
            yield Warned("sigma", text)

    def _level_warnings(self, objective: ObjectiveSettings) -> Iterator[Warned]:
        """Noise levels of the schedule that the denoiser was not trained on."""
        assert isinstance(objective, DenoiserTrainingSettings)
        low, high = objective.range or (0.0, 0.0)
        known = objective.full or self.sigma in objective.sigmas or low <= self.sigma <= high
        if not known:
            text = f"{self.sigma:g} is not a noise level that {self.denoiser} was trained on"
            yield Warned("sigma", text)

    @classmethod
    def keep_valid(cls, values: dict[str, Any]) -> None:
        """Use whole micro-batches and enough draws for the smallest radius; drop larger radii that
        this many draws cannot certify.
        """
        if values["micro_batch"] != "auto":
            values["block_size"] -= values["block_size"] % values["micro_batch"]
        sigma, alpha, method = values["sigma"], values["failure_prob"], values["method"]
        least = min(values["radii"])
        needed = draws_to_certify(least, sigma=sigma, alpha=alpha, method=method) or 0
        n = max(values["num_estimate"], needed)
        most = max_certifiable_radius(sigma=sigma, n=n, alpha=alpha, method=method)
        values["num_estimate"] = n
        values["radii"] = [radius for radius in values["radii"] if radius <= most]


@settings
class PublishedRadiiSettings(Settings):
    """Published per-image l2 radii: a table with the columns of Cohen et al. 2019.

    With `sigma`, radii that so many draws cannot certify are pointed out.
    """

    reader: ClassVar[str] = "components.certify.l2.cohen_tsv:read_published"

    path: str
    """A table with the columns of Cohen et al. 2019."""
    sigma: PositivePixels | None = None
    """Their noise; with it, radii that so many draws cannot certify are pointed out."""
    num_estimate: Count = default_of(GaussianSettings, "num_estimate")
    """Their draws for each item."""
    failure_prob: FailureProb = default_of(GaussianSettings, "failure_prob")
    """Failure probability of the published radii."""


@settings
class GaussianClaimSettings(ClaimSettings):
    """Settings of a claim from draws under Gaussian noise."""

    help: ClassVar[dict[str, str]] = {
        "failure_prob": "Failure probability per item (l2).",
        "radii": "Comma-separated l2 radii.",
    }

    failure_prob: FailureProb
    radii: Radii
