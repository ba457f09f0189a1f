"""Removal of parts of a network: a residual block, its attention or its MLP.

Bhojanapalli et al., "Understanding Robustness of Transformers for Image Classification", sec. 4:
the residual stream passes the missing part unchanged.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from components.core.errors import CasemateError
from components.models.attention.discover import BlockSite, blocks_of, check_patchable
from components.models.attention.shadow import shadowed


@contextmanager
def removed(net: nn.Module, parts: Iterable[tuple[int, str]]) -> Iterator[None]:
    """Remove `parts` of the network inside the context.

    A part is a position in `blocks_of(net)` and a name from `removable_parts`: `block`, `attn`,
    `mlp`, `local` (XCiT's patch interaction).
    """
    sites = blocks_of(net)
    check_patchable(net)
    with ExitStack() as stack:
        for index, part in parts:
            if not 0 <= index < len(sites):
                raise ValueError(f"there is no block {index}; the network has {len(sites)}")
            stack.enter_context(without(sites[index], part))
        yield


def removable_parts(site: BlockSite) -> list[str]:
    """Parts of a block that can be removed without changing the meaning of the rest."""
    whole = [] if site.layout.stream is None else ["block"]
    return whole + list(site.layout.branches)


def without(site: BlockSite, part: str) -> AbstractContextManager[None]:
    """Remove one part of one block inside the context; see `removed` for several."""
    if part not in (known := removable_parts(site)):
        raise CasemateError(
            site.name, part, f"cannot be removed from a {type(site.module).__name__}, only {known}"
        )
    if part in site.layout.branches:
        return _silenced([module for _, module in site.parts(site.layout.branches[part])])
    assert site.layout.stream is not None  # or it would not be removable
    return shadowed(site.module, "forward", _passing(site.layout.stream))


def _passing(position: int) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return args[position]

    return forward


@contextmanager
def _silenced(modules: Iterable[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(_zeros).remove)
        yield


def _zeros(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return torch.zeros_like(output)  # not 0 * output: infinity would become NaN
