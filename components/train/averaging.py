"""Averages of the weights over a training: validated, selected and kept in place of the last ones.

EMA: Polyak & Juditsky 1992, with exponential weights; SWA: Izmailov et al. 2018, alg. 1.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from components.core.errors import CasemateError
from components.models.pixels import PixelModel
from components.train.objectives.inner import has_batch_statistics
from components.train.sharding import load_weights, shard, whole


@dataclass(frozen=True, slots=True)
class AverageSettings:
    """`ema` averages after every step, `swa` after every epoch from `start_epoch` on."""

    kind: str = "ema"
    decay: float = 0.9999
    start_epoch: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("ema", "swa"):
            raise CasemateError("train.average.kind", self.kind, "is unknown; choose ema or swa")


class WeightAverage:
    """A copy of the model that holds the average; buffers are copies of the model's present ones.

    Such statistics of batch normalisation fit weights that move slowly. They do not fit an average
    over far epochs, so `swa` refuses networks that have them.
    """

    def __init__(self, model: PixelModel, settings: AverageSettings) -> None:
        if settings.kind == "swa" and has_batch_statistics(model):
            remedy = "does not fit batch normalisation; use ema"
            raise CasemateError("train.average.kind", settings.kind, remedy)
        self.settings = settings
        ema = settings.kind == "ema"
        rule = get_ema_multi_avg_fn(settings.decay) if ema else get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        self._average = AveragedModel(model, multi_avg_fn=rule)

    @property
    def model(self) -> PixelModel | None:
        """The averaged model, once there is one."""
        module = self._average.module
        assert isinstance(module, PixelModel)
        return module if int(self._average.n_averaged) else None

    def shard(self) -> None:
        """Share the average out as the model is: every worker averages its own parts."""
        module = self._average.module
        assert isinstance(module, PixelModel)
        shard(module)

    def after_step(self, model: PixelModel) -> None:
        if self.settings.kind == "ema":
            self._average.update_parameters(model)

    def after_epoch(self, model: PixelModel, epoch: int) -> None:
        if self.settings.kind == "swa" and epoch >= self.settings.start_epoch:
            self._average.update_parameters(model)
        with torch.no_grad():  # also those that changed between the steps
            for own, theirs in zip(self._average.module.buffers(), model.buffers(), strict=True):
                own.copy_(theirs)

    def state(self) -> dict[str, Any]:
        return whole(self._average.state_dict())

    def restore(self, state: dict[str, Any]) -> None:
        load_weights(self._average, state)
