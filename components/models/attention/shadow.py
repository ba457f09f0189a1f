"""Another value behind an attribute of a module, for a while.

Python looks into an object's own dictionary before `nn.Module.__getattr__` asks for registered
parameters and before the class is asked for methods. A value placed there hides a parameter or a
`forward` from whoever reads it, while parameters, their order, the state dict, optimizers and the
class of the module stay untouched.
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
