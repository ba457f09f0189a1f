"""Averages of the weights over a training: validated, selected and kept instead of the last ones.

EMA: Polyak & Juditsky 1992, with exponential weights; SWA: Izmailov et al. 2018, alg. 1.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from components.core.errors import CasemateError
from components.models.pixels import PixelModel
from components.train.objectives.inner import has_batch_statistics
from components.train.settings import AverageSettings, EmaSettings, SwaSettings
from components.train.sharding import load_weights, shard, whole


class WeightAverage:
    """A copy of the model with averaged weights; buffers are the model's current ones."""

    def __init__(self, model: PixelModel, rule: Callable[..., None]) -> None:
        self._average = AveragedModel(model, multi_avg_fn=rule)

    @property
    def model(self) -> PixelModel | None:
        """The averaged model; None before the first average."""
        module = self._average.module
        assert isinstance(module, PixelModel)
        return module if int(self._average.n_averaged) else None

    def shard(self) -> None:
        """Shard the average like the model: every worker averages its own parts."""
        module = self._average.module
        assert isinstance(module, PixelModel)
        shard(module)

    def after_step(self, model: PixelModel) -> None:
        """Called after every step."""

    def after_epoch(self, model: PixelModel, epoch: int) -> None:
        """Called after the last step of every epoch."""
        with torch.no_grad():  # includes changes between steps
            for own, theirs in zip(self._average.module.buffers(), model.buffers(), strict=True):
                own.copy_(theirs)

    def state(self) -> dict[str, Any]:
        return whole(self._average.state_dict())

    def restore(self, state: dict[str, Any]) -> None:
        load_weights(self._average, state)


class ExponentialAverage(WeightAverage):
    """Average after every step."""

    def __init__(self, model: PixelModel, settings: EmaSettings) -> None:
        super().__init__(model, get_ema_multi_avg_fn(settings.decay))  # type: ignore[no-untyped-call]

    def after_step(self, model: PixelModel) -> None:
        self._average.update_parameters(model)


class StochasticWeightAverage(WeightAverage):
    """Average at the end of epochs, from `start_epoch` on.

    Statistics of batch normalisation fit weights that move slowly. They do not fit an average over
    distant epochs, so networks with batch normalisation are rejected.
    """

    def __init__(self, model: PixelModel, settings: SwaSettings) -> None:
        if has_batch_statistics(model):
            remedy = "does not fit batch normalisation; use ema"
            raise CasemateError("train.average.kind", settings.kind, remedy)
        super().__init__(model, get_swa_multi_avg_fn())  # type: ignore[no-untyped-call]
        self.start_epoch = settings.start_epoch

    def after_epoch(self, model: PixelModel, epoch: int) -> None:
        if epoch >= self.start_epoch:
            self._average.update_parameters(model)
        super().after_epoch(model, epoch)


AVERAGES: dict[str, Callable[..., WeightAverage]] = {
    "ema": ExponentialAverage,
    "swa": StochasticWeightAverage,
}


def weight_average(model: PixelModel, settings: AverageSettings | None) -> WeightAverage | None:
    """The average of a model's weights, if the settings have one."""
    return AVERAGES[settings.kind](model, settings) if settings else None
