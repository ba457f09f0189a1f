"""Training data: which samples form each batch, and batches built ahead of their step."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.data.augment.repeats import repeat_augment_indices, split_indices
from components.data.prepared import ImageSplit, LazySplit, Split
from components.train.settings import TrainSettings

Planned = TypeVar("Planned")
Built = TypeVar("Built")


@dataclass(frozen=True, slots=True)
class Worker:
    """Rank of this process among those that share the global batch."""

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

    @contextmanager
    def planned(self, index: Tensor) -> Iterator["TrainingSet"]:
        """The same items for a pass over these positions: shards on disk are read ahead, once."""
        generated = index >= len(self.real)
        real, synthetic = self.real, self.synthetic
        with ExitStack() as stack:
            if isinstance(real, LazySplit):
                real, reader = real.planned(index[~generated])
                stack.enter_context(reader)
            if isinstance(synthetic, LazySplit):
                synthetic, reader = synthetic.planned(index[generated] - len(self.real))
                stack.enter_context(reader)
            yield replace(self, real=real, synthetic=synthetic)


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Samples of every batch of an epoch: a function of seed and epoch, not of workers.

    One epoch is one pass over the real items. Every batch holds floor(batch_size * ratio)
    generated ones, in passes over all of them that continue across epochs, as in Gowal et al. 2021
    (arXiv:2110.09468).
    """

    data: TrainingSet
    train: TrainSettings
    seed: int

    def __post_init__(self) -> None:
        copies = self.train.augment.copies
        if self.train.order == "balanced" and self.data.synthetic is not None:
            remedy = "cannot be combined with data.synthetic; remove one of them"
            raise CasemateError("train.order", self.train.order, remedy)
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
        items, copies, slots = self._real_samples(epoch)
        made = self._generated_samples(epoch)
        for step in range(self.num_batches):
            span = slice(step * real, (step + 1) * real)
            batch, which = items[span], copies[span]
            if slots is not None:
                near = by_slot(slots[batch])
                batch, which = batch[near], which[near]
            if generated:
                batch = torch.cat([batch, made[step * generated : (step + 1) * generated]])
                which = torch.zeros(len(batch), dtype=torch.int64)
                address = (self.seed, "mixture", epoch, step)
                batch = batch[torch.randperm(len(batch), generator=generator_for(*address))]
            yield Share(batch[mine], which[mine])

    def _real_samples(self, epoch: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Items and copies of an epoch; slots of the items by which batches are sorted, if any."""
        generator, slots = generator_for(self.seed, "shuffle", epoch), None
        if self.train.order == "balanced" and isinstance(self.data.real, LazySplit):
            order, slots = self.data.real.balanced_order(generator)
        else:
            order = self.data.real.order(generator)
        copies, size = self.train.augment.copies, self.train.batch_size
        if self.train.augment.clean_copy:  # every item in all copies
            return *split_indices(order, num_splits=copies, batch_size=size), slots
        return *repeat_augment_indices(order, num_repeats=copies, batch_size=size), slots

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


def by_slot(slots: Tensor) -> Tensor:
    """Places of the rows of a batch, sorted by slot; pairs of neighbours stay, as mixing needs."""
    if len(slots) % 2:
        return torch.argsort(slots, stable=True)
    pairs = torch.argsort(slots[::2], stable=True)
    return torch.stack([2 * pairs, 2 * pairs + 1], dim=1).flatten()


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
    were not read, ends the threads and calls `close`. `wait_seconds` is the time the reader waited.
    """

    def __init__(
        self,
        build: Callable[[Planned], Built],
        plan: Iterable[Planned],
        *,
        feeding: Feeding,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self.wait_seconds, self._close = 0.0, close
        self._build, self._plan, self._num_ahead = build, iter(plan), feeding.num_ahead
        self._coming: deque[Future[Built]] = deque()
        self._pool = ThreadPoolExecutor(feeding.num_threads, thread_name_prefix="feed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._close()

    def __iter__(self) -> Iterator[Built]:
        return self

    def __next__(self) -> Built:
        began = time.perf_counter()
        self._order_more()
        if not self._coming:
            raise StopIteration
        built = self._coming.popleft().result()
        self._order_more()  # so that the threads work while the reader does
        self.wait_seconds += time.perf_counter() - began
        return built

    def _order_more(self) -> None:
        while len(self._coming) < self._num_ahead:
            try:
                planned = next(self._plan)
            except StopIteration:
                return
            self._coming.append(self._pool.submit(self._build, planned))
