"""Values that a process keeps to use again, up to a number of bytes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class Kept:
    """Values by key; the least recently used ones are dropped before `limit` is passed.

    A single value may be larger than the limit; it is then the only one.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.num_bytes = limit, 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable, size: int, make: Callable[[], Any]) -> Any:
        """The value of `key`, of `size` bytes, made if it is not there; room is made first."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key][0]
        while self._values and self.num_bytes + size > self.limit:
            self.num_bytes -= self._values.popitem(last=False)[1][1]
        value = make()
        self._values[key] = (value, size)
        self.num_bytes += size
        return value
