"""The worker of the evaluate stage: loads each model once, then runs one task after the other.

A task is an object of a suite with a method `run`; its result depends on its settings and items
alone, as every forward pass has `micro_batch` rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import pyarrow as pa
import torch
from torch import Tensor

from components.attacks.gradient import in_fixed_batches
from components.attacks.gradients import attack_mode
from components.attacks.sanity.model import refuse_probabilities
from components.core.arithmetic import EXACT, use
from components.core.folders import Folder
from components.core.types import Images, Logits, LogitsFn
from components.core.units import WorkFn
from components.data.memory import MemoryDataset
from components.data.prepared import ImageSplit, PreparedDataset, Split
from components.models.checkpoint import load_model
from components.models.fast import fast_forward
from components.models.logits import check_independent_rows, check_logits
from components.models.pixels import PixelModel
from pipelines.runtime.devices import device_name, worker_device

DEVICE = "device"  # column of every table
NUM_PROBED = 25  # items on which a model must return logits before it is evaluated


@dataclass(frozen=True, slots=True)
class EvaluateConfig:
    """Paths and settings of a worker; in this process also loaded images and models."""

    dataset: Folder | MemoryDataset
    models: Mapping[str, Folder | PixelModel]
    micro_batch: int
    seed: int


class Counted(Protocol):
    """A task that progress can count."""

    @property
    def num_items(self) -> int:
        """Images that it looks at."""
        ...


class Task(Counted, Protocol):
    """The payload of a unit."""

    def run(self, worker: "EvaluateWorker") -> pa.Table:
        """The rows of this task."""
        ...


class PlacesTask:
    """A task on test items, by their places."""

    __slots__ = ()
    places: tuple[int, ...]

    @property
    def num_items(self) -> int:
        return len(self.places)


class EvaluateWorker:
    """Test images and models on one device."""

    def __init__(self, config: EvaluateConfig, device: str) -> None:
        self.config, self.device = config, device
        given = config.dataset
        self.dataset = given if isinstance(given, MemoryDataset) else PreparedDataset.open(given)
        self.split: Split = self.dataset.on_demand("test")
        self.model = cache(self._load)
        self._opened: dict[str, Any] = {}

    def __call__(self, task: Task) -> pa.Table:
        """The results of a task; every row names the device that computed it."""
        table = task.run(self)
        names = pa.array([device_name(self.device)] * len(table), pa.string())
        return table.append_column(DEVICE, names)

    @property
    def models(self) -> list[str]:
        """Names of all models."""
        return list(self.config.models)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, kept under this key: a dataset that several tasks read."""
        if key not in self._opened:
            self._opened[key] = make()
        return self._opened[key]

    def items(self, places: Sequence[int]) -> ImageSplit:
        """Test items by their places in the split."""
        return self.split.rows(torch.tensor(places, dtype=torch.int64))

    def pixels(self, images: Tensor) -> Images:
        """uint8 images as pixels in [0, 1] on the device."""
        return images.to(self.device).to(torch.float32) / 255

    def fixed(self, model: PixelModel) -> LogitsFn:
        """The model in passes of `micro_batch` rows."""
        return in_fixed_batches(model, size=self.config.micro_batch)

    @contextmanager
    def ready(self, name: str) -> Iterator[PixelModel]:
        """A model in eval mode with frozen weights."""
        model: PixelModel = self.model(name)
        with attack_mode(model), fast_forward(model.net):
            yield model

    @torch.no_grad()
    def logits(self, name: str, x: Images, item_ids: Sequence[str]) -> Logits:
        """Finite logits of a model."""
        with self.ready(name) as model:
            return check_logits(self.fixed(model)(x), item_ids)

    @torch.no_grad()
    def _load(self, name: str) -> PixelModel:
        """A model that returns logits of each image by itself, tried on random images."""
        given = self.config.models[name]
        model = given if isinstance(given, PixelModel) else load_model(given, device=self.device)
        side, generator = model.spec.image_size, torch.Generator().manual_seed(0)
        shape = (NUM_PROBED, model.spec.channels, side, side)
        probed = torch.rand(shape, generator=generator).to(self.device)
        with attack_mode(model):
            logits = check_logits(self.fixed(model)(probed))
            refuse_probabilities(logits, model=name)
            check_independent_rows(model, probed, network=model, name=name)
        return model


def make_worker(config: EvaluateConfig) -> WorkFn:
    use(EXACT)
    return EvaluateWorker(config, worker_device())
