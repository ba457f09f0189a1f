"""Work units: what the sharded executor hands to a worker."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of work: `name` is its file name, `about` says which items it holds."""

    name: str
    about: str
    payload: Any
