"""Optuna behind Ray Tune; imported only by searches of kind optuna."""

from collections.abc import Mapping

from ray.tune.search.optuna import OptunaSearch

from components.core.errors import CasemateError
from components.core.seeding import stream_key
from pipelines.recipe.schema.tune import Axis, IntegersAxis, LogUniformAxis, UniformAxis
from pipelines.stages.tune.training import SCORE, Point

try:
    import optuna
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )
except ImportError as error:
    remedy = "needs the package optuna; install it, or choose grid or random"
    raise CasemateError("tune.search.kind", "optuna", remedy) from error


class NumberedSearch(OptunaSearch):  # type: ignore[misc]
    """Numbered points of Optuna; from a list it chooses indices, so values may be of any type.

    Its state, random numbers and past trials included, is saved and restored with the experiment.
    """

    def __init__(self, space: Mapping[str, Axis], *, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.axes = dict(space)
        axes = {key: distribution(axis) for key, axis in space.items()}
        super().__init__(
            axes, metric=SCORE, mode="max", seed=stream_key(seed, "tune", "optuna", 0) % 2**32
        )

    def suggest(self, trial_id: str) -> dict[str, Point]:
        """The config of a new trial."""
        found = super().suggest(trial_id)
        values = {
            key: axis[found[key]] if isinstance(axis, list) else found[key]
            for key, axis in self.axes.items()
        }
        return {"point": {"trial": self._ot_trials[trial_id].number, "values": values}}


def distribution(axis: Axis) -> BaseDistribution:
    """An axis as a distribution of Optuna."""
    match axis:
        case UniformAxis():
            return FloatDistribution(axis.low, axis.high, step=axis.step)
        case LogUniformAxis():
            return FloatDistribution(axis.low, axis.high, log=True)
        case IntegersAxis():
            return IntDistribution(int(axis.low), int(axis.high), step=axis.step)
        case list():
            return CategoricalDistribution(range(len(axis)))
    raise ValueError(f"optuna has no distribution for {axis!r}")
