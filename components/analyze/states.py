"""States of streamed analyses: partial results of a unit of items, stored and merged.

A worker returns the state of its unit; merged in the order of the units, the result has the same
bytes for any number of workers. Float sums depend on that order, counts do not.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from components.core.types import Array

SCHEMA = pa.schema(
    [
        ("state", pa.string()),
        ("field", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("data", pa.binary()),  # little-endian, C order
    ]
)


class State(Protocol):
    """A partial result."""

    def merged(self, other: Any) -> Any:
        """The state of both, `other` after this one."""
        ...

    def arrays(self) -> dict[str, Array]:
        """Its content; `of_arrays` of the class reads it back, bit for bit."""
        ...


StateT = TypeVar("StateT", bound=State)


def merge_all(states: Iterable[StateT]) -> StateT:
    """One state of all, merged in the given order."""
    whole: StateT = reduce(lambda one, other: one.merged(other), states)
    return whole


def to_table(states: Mapping[str, State]) -> pa.Table:
    """Named states as rows (`SCHEMA`): the durable result of a unit."""
    rows = [
        {
            "state": name,
            "field": field,
            "dtype": array.dtype.newbyteorder("<").str,
            "shape": list(array.shape),
            "data": np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes(),
        }
        for name, state in states.items()
        for field, array in state.arrays().items()
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def read_arrays(table: pa.Table) -> dict[str, dict[str, Array]]:
    """The arrays of `to_table`, by state and field."""
    found: dict[str, dict[str, Array]] = {}
    for row in table.to_pylist():
        array = np.frombuffer(row["data"], np.dtype(row["dtype"])).reshape(row["shape"])
        found.setdefault(row["state"], {})[row["field"]] = array
    return found
