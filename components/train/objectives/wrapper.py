"""An objective around another one; delegates every method that it does not override."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from components.core.types import Images, Logits
from components.models.pixels import PixelModel
from components.train.objectives.base import Batch, LossOut, Objective
from components.train.objectives.leak import LeakDetector


class ObjectiveWrapper(Objective):
    """Delegates to `inner`; subclasses override single methods."""

    def __init__(self, inner: Objective, settings: Any) -> None:
        super().__init__(settings, label_smoothing=inner.label_smoothing)
        self.inner = inner
        self.classifies = inner.classifies
        self.validation_metric = inner.validation_metric
        self.lower_is_better = inner.lower_is_better

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        return self.inner.loss(wrapped, bare, batch)

    def perturbed(
        self, wrapped: nn.Module, bare: nn.Module, batch: Batch
    ) -> AbstractContextManager[Batch]:
        return self.inner.perturbed(wrapped, bare, batch)

    @property
    def eps(self) -> float | None:
        return self.inner.eps

    def eps_at(self, epoch: int) -> float | None:
        return self.inner.eps_at(epoch)

    def start_noise(
        self, item_ids: Sequence[str], shape: Sequence[int], *, run_seed: int, epoch: int
    ) -> Tensor | None:
        return self.inner.start_noise(item_ids, shape, run_seed=run_seed, epoch=epoch)

    def craft(self, bare: nn.Module, batch: Batch) -> Images:
        return self.inner.craft(bare, batch)

    def without_warmup(self, eps: float) -> Objective:
        return self.inner.without_warmup(eps)

    def leak_detector(self) -> LeakDetector | None:
        return self.inner.leak_detector()

    def validation_logits(self, bare: nn.Module, batch: Batch) -> Logits:
        return self.inner.validation_logits(bare, batch)

    def validation_scores(self, bare: PixelModel, batch: Batch) -> Tensor:
        return self.inner.validation_scores(bare, batch)

    def prepare(self, bare: nn.Module) -> None:
        self.inner.prepare(bare)

    def state(self) -> dict[str, Tensor] | None:
        return self.inner.state()

    def restore(self, state: Any) -> None:
        self.inner.restore(state)

    def searches(self, epoch: int) -> bool:
        return self.inner.searches(epoch)

    def begin_epoch(self, bare: nn.Module, epoch: int, batches: Iterable[Batch]) -> None:
        self.inner.begin_epoch(bare, epoch, batches)

    def trains(self, epoch: int) -> bool:
        return self.inner.trains(epoch)

    def finish(self, bare: nn.Module) -> None:
        self.inner.finish(bare)

    def not_shardable(self, model: PixelModel) -> str | None:
        return self.inner.not_shardable(model)
