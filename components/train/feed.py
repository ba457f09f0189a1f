"""Training data: which samples make each batch, and batches built ahead of their step."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.data.augment.repeats import repeat_augment_indices, split_indices
from components.data.prepared import ImageSplit, Split
from components.train.settings import TrainSettings

Planned = TypeVar("Planned")
Built = TypeVar("Built")


@dataclass(frozen=True, slots=True)
class Worker:
    """This process among those that share the global batch."""

    rank: int = 0
    world: int = 1


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's samples of one global batch."""

    index: Tensor  # positions in the training set
    copies: Tensor  # which augmented copy of its item each sample is


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """Real items, optionally followed by generated ones."""

    real: Split
    synthetic: Split | None = None
    ratio: float = 0.0  # share of every batch that is generated

    def __post_init__(self) -> None:
        if not len(self.real):
            raise CasemateError("data", "train", "is an empty split: there is nothing to train on")
        if not 0 <= self.ratio < 1:
            raise CasemateError("data.synthetic.ratio", self.ratio, "is outside [0, 1)")
        if (self.ratio > 0) != bool(self.synthetic):
            raise ValueError(f"ratio {self.ratio} with {len(self.synthetic or [])} generated items")

    def rows(self, index: Tensor) -> ImageSplit:
        """The items at these positions, in this order."""
        if self.synthetic is None:
            return self.real.rows(index)
        generated = index >= len(self.real)
        own = self.real.rows(index[~generated])
        made = self.synthetic.rows(index[generated] - len(self.real))
        joined = ImageSplit(
            own.item_ids + made.item_ids,
            torch.cat([own.images, made.images]),
            torch.cat([own.labels, made.labels]),
        )
        places = torch.cat([torch.nonzero(~generated)[:, 0], torch.nonzero(generated)[:, 0]])
        return joined.rows(torch.argsort(places))


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Which samples make the batches of every epoch: a function of seed and epoch, not of workers.

    One epoch is one pass over the real items. Every batch holds floor(batch_size * ratio)
    generated ones, in passes over all of them that continue across epochs, as in Gowal et al. 2021
    (arXiv:2110.09468).
    """

    data: TrainingSet
    train: TrainSettings
    seed: int

    def __post_init__(self) -> None:
        copies = self.train.augment.copies
        if copies > 1 and self.data.synthetic is not None:
            remedy = "cannot be combined with data.synthetic; set it to 1"
            raise CasemateError("train.augment.copies", copies, remedy)
        if self.data.synthetic is not None and not self.parts[1]:
            remedy = f"of a batch of {self.train.batch_size} is not a whole image; raise it"
            raise CasemateError("data.synthetic.ratio", self.data.ratio, remedy)

    @property
    def parts(self) -> tuple[int, int]:
        """Real and generated samples of a global batch; a set smaller than a batch is one batch."""
        size = self.train.batch_size
        generated = int(Fraction(str(self.data.ratio)) * size)  # 0.29 means 29/100
        real = size - generated
        if self._num_real < real:
            return self._num_real, generated * self._num_real // real
        return real, generated

    @property
    def num_batches(self) -> int:
        """Whole batches of an epoch."""
        return self._num_real // self.parts[0]

    @property
    def _num_real(self) -> int:
        augment = self.train.augment
        return len(self.data.real) * (augment.copies if augment.clean_copy else 1)

    def shares(self, epoch: int, worker: Worker) -> Iterator[Share]:
        """This worker's share of every global batch, in an order given by (seed, epoch).

        Shares are equal, so the mean of the workers' gradients is the gradient of the whole batch.
        """
        real, generated = self.parts
        size = (real + generated) // worker.world
        if size == 0:
            raise ValueError(
                f"batch of {self.train.batch_size} cannot be shared by {worker.world} workers"
            )
        mine = slice(worker.rank * size, (worker.rank + 1) * size)
        items, copies = self._real_samples(epoch)
        made = self._generated_samples(epoch)
        for step in range(self.num_batches):
            span = slice(step * real, (step + 1) * real)
            batch, which = items[span], copies[span]
            if generated:
                batch = torch.cat([batch, made[step * generated : (step + 1) * generated]])
                which = torch.zeros(len(batch), dtype=torch.int64)
                address = (self.seed, "mixture", epoch, step)
                batch = batch[torch.randperm(len(batch), generator=generator_for(*address))]
            yield Share(batch[mine], which[mine])

    def _real_samples(self, epoch: int) -> tuple[Tensor, Tensor]:
        order = self.data.real.order(generator_for(self.seed, "shuffle", epoch))
        copies, size = self.train.augment.copies, self.train.batch_size
        if self.train.augment.clean_copy:  # every item in all copies
            return split_indices(order, num_splits=copies, batch_size=size)
        return repeat_augment_indices(order, num_repeats=copies, batch_size=size)

    def _generated_samples(self, epoch: int) -> Tensor:
        """Positions of the generated items of an epoch; passes continue across epochs."""
        if self.data.synthetic is None:
            return torch.arange(0)
        num_items, needed = len(self.data.synthetic), self.num_batches * self.parts[1]
        first = epoch * needed
        passes = range(first // num_items, (first + needed - 1) // num_items + 1)
        orders = [
            self.data.synthetic.order(generator_for(self.seed, "synthetic", number))
            for number in passes
        ]
        start = first - passes.start * num_items
        return torch.cat(orders)[start : start + needed] + len(self.data.real)


@dataclass(frozen=True, slots=True)
class Feeding:
    """How batches are built ahead; it does not affect their content."""

    num_threads: int = 1
    num_ahead: int = 2  # batches being built or waiting

    @classmethod
    def by_threads(cls, num_threads: int) -> "Feeding":
        """So many threads, each with a batch in work and one waiting."""
        return cls(num_threads, 2 * num_threads)


class Feed(Generic[Planned, Built]):
    """Results of `build` for each planned part, in order, built ahead by background threads.

    A part that fails raises its error when its turn comes. Leaving the context drops parts that
    were not read and ends the threads. `wait_seconds` is the time the reader waited.
    """

    def __init__(
        self, build: Callable[[Planned], Built], plan: Iterable[Planned], *, feeding: Feeding
    ) -> None:
        self.wait_seconds = 0.0
        self._build, self._plan, self._num_ahead = build, iter(plan), feeding.num_ahead
        self._coming: deque[Future[Built]] = deque()
        self._pool = ThreadPoolExecutor(feeding.num_threads, thread_name_prefix="feed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[Built]:
        return self

    def __next__(self) -> Built:
        began = time.perf_counter()
        self._order_more()
        if not self._coming:
            raise StopIteration
        built = self._coming.popleft().result()
        self._order_more()  # at once: the threads work while the reader does
        self.wait_seconds += time.perf_counter() - began
        return built

    def _order_more(self) -> None:
        while len(self._coming) < self._num_ahead:
            try:
                planned = next(self._plan)
            except StopIteration:
                return
            self._coming.append(self._pool.submit(self._build, planned))
