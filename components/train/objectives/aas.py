"""AAS training: adversarial attention scales are searched every few epochs and used in training.

Jain & Dutta, "Towards Understanding and Improving Adversarial Robustness of Vision Transformers",
sec. 5. The scales S belong to the model: they are its buffer `attention_scales`, apply in every
pass (training, attacks, validation) and are saved with its weights, until `finish` multiplies them
into the weights and leaves an ordinary model.

Our reading: every `every` epochs, but not at the start, Algorithm 1 runs over the epoch's batches,
from the current S (`attacks/scales.py` lists its other ambiguities). In the text such an epoch
updates S alone (`replace`); `augment` trains the weights in it as well.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.scales import ScaleSearch
from components.core.seeding import generator_for
from components.core.settings import plain
from components.models.attention.discover import attention_of
from components.models.attention.scaling import attach_scales, detach_scales, fold_scales
from components.models.pixels import PixelModel
from components.train.objectives.base import Batch, Objective
from components.train.objectives.base_settings import AasTrainingSettings
from components.train.objectives.wrapper import ObjectiveWrapper


class ScaleAscent(ScaleSearch):
    """Scale search from the current S; that of an attack always starts at S = 1."""

    def from_scales(self, model: nn.Module, net: nn.Module, batch: Batch, scales: Tensor) -> Tensor:
        """S' after one mini-batch: the first `batch_size` items of a batch."""
        items = Items(batch.images, batch.hard_labels, batch.item_ids, batch.seed)
        part = items.take(torch.arange(min(len(items), self.batch_size), device=items.x.device))
        generator = generator_for(batch.seed, "attention scales", batch.epoch, batch.step)
        noise = self.noise * torch.randn(len(scales), generator=generator)
        return self.ascent(model, net, part, scales=scales, delta=noise)


class AasTraining(ObjectiveWrapper):
    """`inner` on a network with attention scales; `max_batches` limits the batches of a search."""

    has_state = True
    settings: AasTrainingSettings

    def __init__(self, inner: Objective, settings: AasTrainingSettings) -> None:
        super().__init__(inner, settings)
        self.search = ScaleAscent(**plain(settings, exclude={"every", "mode", "max_batches"}))
        self._net: nn.Module | None = None

    def prepare(self, bare: nn.Module) -> None:
        """Attach S = 1, which leaves all outputs unchanged."""
        self._net = bare.get_submodule("net")
        device = next(self._net.parameters()).device
        attach_scales(self._net, torch.ones(len(attention_of(self._net)), device=device))

    def state(self) -> dict[str, Tensor]:
        return {"attention_scales": self._scales.detach().clone()}

    def restore(self, state: Any) -> None:
        self._scales.copy_(state["attention_scales"])

    def searches(self, epoch: int) -> bool:
        """Whether S changes at the beginning of this epoch."""
        return epoch > 0 and epoch % self.settings.every == 0

    def trains(self, epoch: int) -> bool:
        return self.settings.mode == "augment" or not self.searches(epoch)

    def begin_epoch(self, bare: nn.Module, epoch: int, batches: Iterable[Batch]) -> None:
        if not self.searches(epoch):
            return
        scales = self._scales
        if _rank() == 0:
            scales.copy_(self._found(bare, islice(batches, self.settings.max_batches)))
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(scales, src=0)

    def _found(self, bare: nn.Module, batches: Iterable[Batch]) -> Tensor:
        attached, net = self._scales, bare.get_submodule("net")
        scales = kept = attached.detach().cpu().clone()
        try:
            attached.fill_(1)  # the search applies its own; factors would multiply
            with attack_mode(bare):
                for batch in batches:
                    scales = self.search.from_scales(bare, net, batch, scales)
        finally:
            attached.copy_(kept)
        return scales

    def finish(self, bare: nn.Module) -> None:
        """Fold the scales of a model, which may be an average of this one, into its weights."""
        net = bare.get_submodule("net")
        fold_scales(net, detach_scales(net))

    def not_shardable(self, model: PixelModel) -> str:
        return "train.objective.aas, whose scales one worker searches alone"

    @property
    def _scales(self) -> Tensor:
        if self._net is None:
            raise ValueError("the objective has no network yet: call prepare first")
        return self._net.get_buffer("attention_scales")


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
