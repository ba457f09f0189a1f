"""The residual stream after every block, as part of the autograd graph."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from components.models.attention.discover import BlockSite, blocks_of, check_patchable


@contextmanager
def block_outputs(
    net: nn.Module, sites: Sequence[BlockSite] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Outputs of blocks (all, or `sites`) in the last forward pass, by name, in execution order.

    Not detached, before the network's final norm. Shapes follow the family: (B, N, C) for tokens,
    (B, 1, C) in CaiT's class blocks, (B, H, W, C) in Swin.
    """
    sites = blocks_of(net) if sites is None else sites
    check_patchable(net)
    outputs: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for site in sites:

            def keep(module: nn.Module, args: Any, output: Tensor, name: str = site.name) -> None:
                outputs[name] = output

            stack.callback(site.module.register_forward_hook(keep).remove)
        yield outputs
