"""Temporary replacement of a module's attribute.

Python reads an object's own dictionary before `nn.Module.__getattr__` returns registered parameters
and before the class's methods. A value set there hides a parameter or `forward`, while parameters,
their order, the state dict, optimizers and the class of the module do not change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def shadowed(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """`module.name` reads as `value` inside the context; shadows of one name may nest."""
    own = vars(module)
    before = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        own.pop(name, None)
        own.update(before)
