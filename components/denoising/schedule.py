"""Noise levels of a diffusion model: sigma of the added noise to timestep, and back.

Carlini et al. 2023, "(Certified!!) adversarial robustness for free!", sec. 3. The model at timestep
t sees sqrt(abar_t) u + sqrt(1 - abar_t) n with u = 2 x - 1 in [-1, 1], so its noise-to-signal ratio
is s_t = sqrt((1 - abar_t) / abar_t). Noise of standard deviation sigma on x in [0, 1] has the ratio
2 sigma on u: a level matches where s_t = 2 sigma, that is abar = 1 / (1 + 4 sigma^2).

Symbols: beta_t = `betas[t]`, abar_t = `alphas_cumprod[t]` = prod of 1 - beta_i over i <= t, falling
in t; s_t = `ratios[t]`, rising. Timesteps are positions in these tables, from 0, maybe fractional.
"""

from dataclasses import dataclass, field

import numpy as np

from components.core.errors import CasemateError
from components.core.types import FloatArray


def abar_of(sigma: float) -> float:
    """abar of noise with this sigma: 1 / (1 + 4 sigma^2)."""
    return 1 / (1 + 4 * sigma**2)


@dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """A table of noise levels, in float64 for betas of any precision."""

    betas: FloatArray
    alphas_cumprod: FloatArray = field(init=False)
    ratios: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        betas = np.asarray(self.betas, dtype=np.float64)
        if betas.ndim != 1 or not len(betas) or not ((betas > 0) & (betas <= 1)).all():
            raise CasemateError("denoiser.schedule", "betas", "are not all in (0, 1]")
        abar = np.cumprod(1 - betas)
        with np.errstate(divide="ignore"):  # a schedule may end in pure noise
            ratios = np.sqrt((1 - abar) / abar)
        for name, table in (("betas", betas), ("alphas_cumprod", abar), ("ratios", ratios)):
            object.__setattr__(self, name, table)

    def __len__(self) -> int:
        return len(self.betas)

    @property
    def sigmas(self) -> FloatArray:
        """Sigma, in [0, 1] pixels, of every timestep."""
        return self.ratios / 2

    def check(self, sigma: float) -> None:
        """Raise an error for noise outside the levels of the schedule."""
        low, high = float(self.sigmas[0]), float(self.sigmas[-1])
        if not low <= sigma <= high:
            remedy = f"is outside the denoiser's schedule, which goes from {low:.3g} to {high:.3g}"
            raise CasemateError("sigma", sigma, remedy)

    def timestep(self, sigma: float) -> float:
        """The fractional timestep of a sigma, linear in log s between entries of the table."""
        self.check(sigma)
        return self.timestep_of_ratio(2 * sigma)

    def timestep_of_ratio(self, ratio: float) -> float:
        """The fractional timestep of a ratio s > 0; 0 below the first level."""
        finite = np.isfinite(self.ratios)
        known = np.log(self.ratios[finite])
        return float(np.interp(np.log(ratio), known, np.arange(len(known))))

    def sigma(self, timestep: float) -> float:
        """The sigma of a fractional timestep: the inverse of `timestep`."""
        finite = np.isfinite(self.ratios)
        known = np.log(self.ratios[finite])
        return float(np.exp(np.interp(timestep, np.arange(len(known)), known))) / 2

    def timestep_at_least(self, sigma: float) -> int:
        """The first timestep with at least this much noise.

        Noise at this level may be claimed as sigma, because it is never less. Rounding to the
        nearest level and claiming sigma would be unsound.
        """
        return int(self.timesteps_at_least(np.array([sigma]))[0])

    def timesteps_at_least(self, sigmas: FloatArray) -> np.ndarray:
        """`timestep_at_least` for many sigmas; 0 below the first level."""
        timesteps = np.searchsorted(self.sigmas, sigmas)
        if (timesteps == len(self)).any():
            self.check(float(np.max(sigmas)))
        return timesteps

    def timesteps_below(self, sigma: float, *, num_steps: int | None) -> list[int]:
        """The timesteps that are visited after the level of sigma itself, falling.

        Of `num_steps` visits the first is that level; the others are spread evenly over all
        timesteps below it, the first and the last of them included.
        """
        whole = self.timestep_at_least(sigma)
        if num_steps is None:
            return list(range(whole - 1, -1, -1))
        spread = np.linspace(0, max(whole - 1, 0), max(min(num_steps - 1, whole), 0))
        return [int(t) for t in np.unique(spread.round().astype(int))[::-1]]
