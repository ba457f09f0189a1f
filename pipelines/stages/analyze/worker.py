"""The worker of the analyze stage: that of the evaluate stage, with the blocks of its models.

Studies look inside networks, so their passes have the rows of the unit and no padding. A unit
is always cut the same way; its result depends on its task alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from components.analyze.blocks import Blocks, find_blocks
from components.analyze.settings import BlockSettings
from components.analyze.states import State, merge_all
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.core.arithmetic import EXACT, use
from components.core.types import Images
from components.core.units import WorkFn
from components.models.pixels import PixelModel
from pipelines.runtime.devices import worker_device
from pipelines.stages.evaluate.worker import EvaluateConfig, EvaluateWorker


class AnalyzeWorker(EvaluateWorker):
    """Test images, models and their blocks on one device."""

    @contextmanager
    def plain(self, name: str) -> Iterator[PixelModel]:
        """A model in eval mode with frozen weights; every layer runs its own code."""
        model: PixelModel = self.model(name)
        with attack_mode(model):
            yield model

    def blocks(self, name: str, how: BlockSettings) -> Blocks:
        """The blocks of a model."""
        found: Blocks = self.once(f"blocks {name}", lambda: find_blocks(self.model(name).net, how))
        return found

    def under_attack(self, places: Sequence[int]) -> Items:
        """Test items whose random numbers depend on (seed, item id)."""
        part = self.items(places)
        x, y = self.pixels(part.images), part.labels.to(self.device)
        return Items(x, y, tuple(part.item_ids), self.config.seed)

    def merged(
        self, x: Images, states_of: Callable[[Images], Mapping[str, Any]]
    ) -> dict[str, State]:
        """The states of passes of at most `micro_batch` rows, merged in order."""
        found = [states_of(rows) for rows in torch.split(x, self.config.micro_batch)]
        return {name: merge_all(states[name] for states in found) for name in found[0]}


def make_worker(config: EvaluateConfig) -> WorkFn:
    use(EXACT)
    return AnalyzeWorker(config, worker_device())
