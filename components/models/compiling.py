"""Networks compiled by torch.compile, in place; where that fails they stay as they were."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from components.models.pixels import PixelModel


def compile_network(model: PixelModel, *, rows: int = 2) -> str | None:
    """Compile the network in place, tried by a pass on grey images; the reason if that fails.

    Other numbers of rows may be compiled anew.
    """
    net, spec = model.net, model.spec
    grey = torch.full((rows, spec.channels, spec.image_size, spec.image_size), 0.5)
    training = net.training
    net.eval()  # no running statistics change
    try:
        with torch.no_grad():
            return compile_all([net], trial=lambda: model(grey.to(model.mean.device)))
    finally:
        net.train(training)


def compile_all(nets: Sequence[nn.Module], *, trial: Callable[[], object]) -> str | None:
    """Compile networks in place; the reason if `trial` fails, and then they stay as they were.

    The compiler needs a C++ compiler on CPUs and triton on GPUs.
    """
    try:
        for net in nets:
            net.compile()
        with _limits_are_errors():
            trial()
    except Exception as error:
        for net in nets:
            net._compiled_call_impl = None
        said = " ".join(str(error).split()) or type(error).__name__
        return f"torch.compile failed: {said[:200]}"
    return None


def _limits_are_errors() -> AbstractContextManager[None]:
    """After some networks of one class torch stops compiling without a word; here it says so."""
    import torch._dynamo  # loads the compiler

    limits: AbstractContextManager[None] = torch._dynamo.config.patch(
        fail_on_recompile_limit_hit=True
    )
    return limits


@contextmanager
def eager(net: nn.Module) -> Iterator[None]:
    """Run a compiled network by its own code inside the context.

    Compiled code does not notice hooks and replaced parts of a network.
    """
    compiled, net._compiled_call_impl = net._compiled_call_impl, None
    try:
        yield
    finally:
        net._compiled_call_impl = compiled
