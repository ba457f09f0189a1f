"""Reading one pass over a split ahead of the threads that use it, each shard once."""

from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from threading import Condition, Thread
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.data.sources.base import Pixels
from components.data.stream import ShardReader

WINDOWS = 2  # of shards in memory: one in use and the next
READERS = 2  # threads that read ahead


class PlannedReader(ShardReader):
    """A reader for positions that are known before they are requested, each as often as planned.

    Shards are read in the order of their first use and dropped after their last one, so each is
    read once, whatever the number of threads that request rows and however far these are apart. Two
    windows of shards are read ahead; a thread that needs another one reads it itself.
    """

    def __init__(self, reader: ShardReader, planned: NDArray[np.int64]) -> None:
        super().__init__(
            reader.folder,
            reader.shards,
            image_shape=reader.image_shape,
            cache_shards=reader.cache_shards,
            encoding=reader.encoding,
            verified=reader.verified,
        )
        numbers = self.numbers(planned)
        used, first = np.unique(numbers, return_index=True)
        self._left = np.bincount(numbers, minlength=len(self.shards))  # uses to come
        self._queue: deque[int] = deque(used[np.argsort(first)].tolist())
        self._changed = Condition(self._lock)
        self._closed = False
        self._readers: list[Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and drop all shards."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._readers:
            thread.join()
        self._tables.clear()

    def _table(self, number: int) -> pa.Table:
        self._start()
        return super()._table(number)

    def _empty(self, num_images: int) -> Pixels:
        """Room for (N, C, H, W), in the order of memory that decoders write and crops read."""
        channels, height, width = self.image_shape
        room = np.empty((num_images, height, width, channels), dtype=np.uint8)
        return room.transpose(0, 3, 1, 2)

    def _make_room(self) -> None:
        """Shards leave after their last use only."""

    def _used(self, number: int, count: int) -> None:
        with self._changed:
            self._left[number] -= count
            if self._left[number] <= 0 or self._closed:
                self._tables.pop(number, None)
                self._changed.notify_all()

    def _start(self) -> None:
        with self._lock:
            if self._readers or self._closed:
                return
            self._readers = [
                Thread(target=self._read_ahead, name=f"read-ahead-{i}", daemon=True)
                for i in range(READERS)
            ]
        for thread in self._readers:
            thread.start()

    def _read_ahead(self) -> None:
        while found := self._next():
            with suppress(Exception):  # the thread that needs the shard meets the error itself
                self._read(*found)

    def _next(self) -> "tuple[int, Future[pa.Table]] | None":
        """The next shard to read, when there is room for it; None: there is none."""
        with self._changed:
            while not self._closed and self._queue:
                number = self._queue[0]
                if number in self._tables or self._left[number] <= 0:  # a user was faster
                    self._queue.popleft()
                elif len(self._tables) < WINDOWS * self.cache_shards:
                    coming = self._tables[number] = Future()
                    return self._queue.popleft(), coming
                else:
                    self._changed.wait()
        return None
